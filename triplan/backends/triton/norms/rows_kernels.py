"""rms_norm, layer_norm and l2_norm of rows held whole. (Rows in a loop: ``norm_looped_kernels``; adjoints:
``norm_adjoint_kernels``.)

All come from the same kernels: CENTRED takes the mean off, LENGTH divides by a row's length in place of the root of its
mean square. Deviations are centred twice: the mean that a sum gives is off by a rounding of its own size, which the
mean of the deviations from it corrects; without that, rows far from 0 would lose as many digits as their mean has over
their spread (Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance", equation 1.7, corrected
two-pass). Each operand of whole rows comes with (outer strides, lane stride, step along the row); see ``rows_kernels``.
Statistics, weight and bias are packed.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.rows_kernels import along, group_of, rows_of
from triplan.sku import interpreting

#: Whether several sums are reduced at once. The interpreter would walk through them one element at a time.
TOGETHER = tl.constexpr(not interpreting())


@triton.jit
def parameter(at, col, live_col):
    """What weight or bias hold for the columns ``col``; None of what is absent."""
    found = None
    if at is not None:
        found = tl.load(at + col, mask=live_col, other=0.0, eviction_policy="evict_last")
    return found


@triton.jit
def transformed(v, w, b, OFFSET: tl.constexpr):
    """``v * (w + OFFSET) + b``, of which either may be absent."""
    if w is not None:
        w = w.to(v.dtype)
        if OFFSET:
            w += OFFSET
        v = v * w
    if b is not None:
        v = v + b.to(v.dtype)
    return v


@triton.jit
def affine(v, weight, bias, col, live_col, OFFSET: tl.constexpr):
    """``transformed`` by the parameters of the columns ``col``."""
    return transformed(v, parameter(weight, col, live_col), parameter(bias, col, live_col), OFFSET)


@triton.jit
def both(a, b, c, d):
    """Two sums at once."""
    return a + c, b + d


@triton.jit
def two_sums(a, b, axis: tl.constexpr, keep_dims: tl.constexpr):
    """Of ``a`` and of ``b``, for which threads meet once."""
    if TOGETHER:
        found = tl.reduce((a, b), axis, both, keep_dims=keep_dims)
    else:
        found = (tl.sum(a, axis, keep_dims=keep_dims), tl.sum(b, axis, keep_dims=keep_dims))
    return found


@triton.jit
def scale_of(squares, share, eps, LENGTH: tl.constexpr):
    """(the statistic that is saved, what a row is multiplied by) from its sum of squares and ``share``, 1 / n."""
    if LENGTH:
        length = tl.sqrt(squares)
        saved = length
        scale = 1.0 / tl.where(length < eps, eps, length)  # NaN stays NaN
    else:
        scale = tl.rsqrt(squares * share + eps)
        saved = scale
    return saved, scale


@triton.jit
def read(at, strides, residual_at, residual_strides, col, live, COMPUTE: tl.constexpr, POLICY: tl.constexpr):
    """What is normalised: x, as narrow as it is, or x + residual."""
    v = tl.load(at + along(col, strides[2]), mask=live, other=0.0, eviction_policy=POLICY)
    if residual_at is not None:
        v = v.to(COMPUTE)
        more = tl.load(residual_at + along(col, residual_strides[2]), mask=live, other=0.0, eviction_policy=POLICY)
        v += more.to(COMPUTE)
    return v


@triton.jit
def write(
    v,
    at,
    out,
    summed,
    weight,
    bias,
    out_strides,
    summed_strides,
    sizes,
    outer,
    lane,
    col,
    live,
    centre,
    middle,
    scale,
    CENTRED: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Elements ``col`` of a row, whose results begin at ``at``, from what is normalised, which goes into ``summed``."""
    if summed is not None:
        sums_to = rows_of(summed, summed_strides, outer, sizes, lane) + along(col, summed_strides[2])
        tl.store(sums_to, v.to(summed.dtype.element_ty), mask=live)
    if CENTRED:
        v = (v - centre) * scale - middle * scale  # one fused multiplication and addition
    else:
        v = v * scale
    y = affine(v, weight, bias, col, live, OFFSET)
    tl.store(at + along(col, out_strides[2]), y.to(out.dtype.element_ty), mask=live)


@triton.jit
def start_of(pointer, strides, outer, sizes, lane):
    """Addresses of the first elements of rows; None of an operand that is absent."""
    found = None
    if pointer is not None:
        found = rows_of(pointer, strides, outer, sizes, lane)
    return found


@triton.jit
def shortened(v):
    """``v`` of f32 with the 14 leading bits of its significand: times a count of up to 1,024 it is exact."""
    return (v.to(tl.int32, bitcast=True) & -1024).to(tl.float32, bitcast=True)


@triton.jit
def norm_rows_kernel(
    x,
    out,
    mean,
    rstd,
    weight,
    bias,
    residual,
    summed,
    x_strides,
    out_strides,
    residual_strides,
    summed_strides,
    sizes,
    lanes,
    n,
    blocks,
    eps,
    CENTRED: tl.constexpr,
    LENGTH: tl.constexpr,
    OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    ABREAST: tl.constexpr,
    ADDS_UP: tl.constexpr,
):
    """Whole rows in registers: each element is read once and written once. FULL: they are of BLOCK elements.

    All threads together hold ABREAST rows at a time, a vector each: each reads weight and bias for itself, once for all
    of its rows. (Read by fewer threads, as for one row, they would come through shared memory.) With ADDS_UP the sum of
    a row is exact, unless some elements are far smaller than others; what the mean is off by then follows from it,
    without another sum. Threads wait for each other before they write statistics, so the results go first.
    """
    outer, first = group_of(tl.program_id(0), blocks, lanes, sizes, ROWS)
    lane = first + tl.arange(0, ABREAST)[:, None, None] + tl.arange(0, ROWS // ABREAST)[None, :, None] * ABREAST
    col = tl.arange(0, BLOCK)[None, None, :]
    inside = lane < lanes
    live = inside & (col < n)
    if FULL:
        live = inside
    residual_at = start_of(residual, residual_strides, outer, sizes, lane)
    at = rows_of(x, x_strides, outer, sizes, lane)
    v = read(at, x_strides, residual_at, residual_strides, col, live, COMPUTE, "").to(COMPUTE)
    place = tl.broadcast_to(col, (ABREAST, 1, BLOCK))
    if not CENTRED:  # two sums leave no registers for what comes early
        w = parameter(weight, place, place < n)
        b = parameter(bias, place, place < n)
    if summed is not None:
        sums_to = rows_of(summed, summed_strides, outer, sizes, lane) + along(col, summed_strides[2])
        tl.store(sums_to, v.to(summed.dtype.element_ty), mask=live)
    count = n.to(COMPUTE)
    share = 1.0 / count  # once: divisions are many instructions
    row = outer.to(tl.int64) * lanes + lane
    if CENTRED:
        total = tl.sum(v, 2, keep_dims=True)
        centre = total * share
        if ADDS_UP:
            centre = shortened(centre)
        v = v - centre
        if not FULL:
            v = tl.where(live, v, 0.0)
        if ADDS_UP:
            rest = total - centre * count
            squares = tl.sum(v * v, 2, keep_dims=True)
        else:
            rest, squares = two_sums(v, v * v, 2, True)
        rest = rest * share
        # What ``rest`` takes off is a rounding's worth, and never all.
        squares -= rest * rest * count
        squares = tl.where(squares < 0, 0.0, squares)
    else:
        squares = tl.sum(v * v, 2, keep_dims=True)
    saved, scale = scale_of(squares, share, eps, LENGTH)
    v = v * scale
    if CENTRED:
        v = v - rest * scale  # one fused multiplication and addition
        w = parameter(weight, place, place < n)
        b = parameter(bias, place, place < n)
    y = transformed(v, w, b, OFFSET)
    to = rows_of(out, out_strides, outer, sizes, lane) + along(col, out_strides[2])
    tl.store(to, y.to(out.dtype.element_ty), mask=live)
    tl.store(rstd + row, saved, mask=inside)
    if CENTRED:
        tl.store(mean + row, centre + rest, mask=inside)
