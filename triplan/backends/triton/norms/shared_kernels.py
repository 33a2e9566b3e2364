"""What the kernels of rms_norm, layer_norm and l2_norm share: statistics, weight and bias, and the formulas.

All three ops come from the same kernels: CENTRED subtracts the mean, LENGTH divides by a row's length in place of the
root of its mean square. Deviations are centred twice: the mean that a sum gives is off by a rounding of its own size,
which the mean of the deviations from it corrects; without that, rows far from 0 would lose as many digits as their mean
has over their spread (Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance", equation 1.7,
corrected two-pass). Each operand of whole rows comes with (outer strides, lane stride, step along the row); see
``common/rows_kernels``. Statistics, weight and bias are packed.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.rows_kernels import axis_offset, row_pointers
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
def scale_again(saved, eps, LENGTH: tl.constexpr):
    """What a row was multiplied by."""
    scale = saved
    if LENGTH:
        scale = 1.0 / tl.where(saved < eps, eps, saved)
    return scale


@triton.jit
def start_of(pointer, strides, outer, sizes, lane):
    """Addresses of the first elements of rows; None of an operand that is absent."""
    found = None
    if pointer is not None:
        found = row_pointers(pointer, strides, outer, sizes, lane)
    return found


@triton.jit
def read(at, strides, residual_at, residual_strides, col, live, COMPUTE: tl.constexpr, POLICY: tl.constexpr):
    """What is normalised: x, as narrow as it is, or x + residual."""
    v = tl.load(at + axis_offset(col, strides[2]), mask=live, other=0.0, eviction_policy=POLICY)
    if residual_at is not None:
        v = v.to(COMPUTE)
        more = tl.load(
            residual_at + axis_offset(col, residual_strides[2]), mask=live, other=0.0, eviction_policy=POLICY
        )
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
        sums_to = row_pointers(summed, summed_strides, outer, sizes, lane) + axis_offset(col, summed_strides[2])
        tl.store(sums_to, v.to(summed.dtype.element_ty), mask=live)
    if CENTRED:
        v = (v - centre) * scale - middle * scale  # one fused multiplication and addition
    else:
        v = v * scale
    y = affine(v, weight, bias, col, live, OFFSET)
    tl.store(at + axis_offset(col, out_strides[2]), y.to(out.dtype.element_ty), mask=live)


@triton.jit
def write_gradient(
    g,
    v,
    at,
    dx,
    dsummed,
    dx_strides,
    dsummed_strides,
    sizes,
    outer,
    lane,
    col,
    live,
    centre,
    middle,
    scale,
    projected,
    CENTRED: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Elements ``col`` of a row's gradient, which begins at ``at``: from weighted gradients ``g`` of results and values
    ``v``, with the row's mean, the mean of all its ``g``, and that of ``g`` times results before weights."""
    d = g - ((v - centre) * scale) * projected
    if CENTRED:
        d = d - middle
    d = d * scale
    if dsummed is not None:
        more = row_pointers(dsummed, dsummed_strides, outer, sizes, lane) + axis_offset(col, dsummed_strides[2])
        d += tl.load(more, mask=live, other=0.0).to(COMPUTE)
    tl.store(at + axis_offset(col, dx_strides[2]), d.to(dx.dtype.element_ty), mask=live)
