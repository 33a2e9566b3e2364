"""rms_norm, layer_norm and l2_norm: rows held whole, and rows in a loop. (Their adjoints: ``norm_adjoint_kernels``.)

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

from triplan.backends.triton.overlap import begin
from triplan.backends.triton.rows_kernels import again, along, lanes_of, rows_of
from triplan.sku import interpreting

#: Whether several sums are reduced at once. The interpreter would walk through them one element at a time.
TOGETHER = tl.constexpr(not interpreting())


@triton.jit
def affine(v, weight, bias, col, live_col, OFFSET: tl.constexpr):
    """``v * (weight + OFFSET) + bias``, of which either may be absent."""
    if weight is not None:
        w = tl.load(weight + col, mask=live_col, other=0.0, eviction_policy="evict_last").to(v.dtype)
        if OFFSET:
            w += OFFSET
        v = v * w
    if bias is not None:
        v = v + tl.load(bias + col, mask=live_col, other=0.0, eviction_policy="evict_last").to(v.dtype)
    return v


@triton.jit
def both(a, b, c, d):
    """Two sums at once."""
    return a + c, b + d


@triton.jit
def each_of_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def two_sums(a, b, axis: tl.constexpr, keep_dims: tl.constexpr):
    """Of ``a`` and of ``b``, for which threads meet once."""
    if TOGETHER:
        found = tl.reduce((a, b), axis, both, keep_dims=keep_dims)
    else:
        found = (tl.sum(a, axis, keep_dims=keep_dims), tl.sum(b, axis, keep_dims=keep_dims))
    return found


@triton.jit
def scale_of(squares, count, eps, LENGTH: tl.constexpr):
    """(the statistic that is saved, what a row is multiplied by) from its sum of squares."""
    if LENGTH:
        length = tl.sqrt(squares)
        saved = length
        scale = 1.0 / tl.where(length < eps, eps, length)  # NaN stays NaN
    else:
        scale = 1.0 / tl.sqrt(squares / count + eps)
        saved = scale
    return saved, scale


@triton.jit
def read(at, strides, residual_at, residual_strides, col, live, COMPUTE: tl.constexpr, POLICY: tl.constexpr):
    """What is normalised: x, or x + residual."""
    v = tl.load(at + along(col, strides[2]), mask=live, other=0.0, eviction_policy=POLICY).to(COMPUTE)
    if residual_at is not None:
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
        v = (v - centre) - middle
    y = affine(v * scale, weight, bias, col, live, OFFSET)
    tl.store(at + along(col, out_strides[2]), y.to(out.dtype.element_ty), mask=live)


@triton.jit
def start_of(pointer, strides, outer, sizes, lane):
    """Addresses of the first elements of rows; None of an operand that is absent."""
    found = None
    if pointer is not None:
        found = rows_of(pointer, strides, outer, sizes, lane)
    return found


@triton.jit
def norm_group(
    group,
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
    NARROW: tl.constexpr,
    FULL: tl.constexpr,
):
    outer = group // blocks
    lane = lanes_of(group, blocks, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    inside = lane < lanes
    live = inside & (col < n)
    if FULL:
        live = inside
    residual_at = start_of(residual, residual_strides, outer, sizes, lane)
    at = rows_of(x, x_strides, outer, sizes, lane)
    kept = x
    if NARROW:
        kept = tl.load(at + along(col, x_strides[2]), mask=live, other=0.0)
        v = kept.to(COMPUTE)
    else:
        v = read(at, x_strides, residual_at, residual_strides, col, live, COMPUTE, "")
    if summed is not None:
        sums_to = rows_of(summed, summed_strides, outer, sizes, lane) + along(col, summed_strides[2])
        tl.store(sums_to, v.to(summed.dtype.element_ty), mask=live)
    count = n.to(COMPUTE)
    row = outer.to(tl.int64) * lanes + lane
    if CENTRED:
        centre = tl.sum(v, 1, keep_dims=True) / count
        if NARROW:
            v = again(kept).to(COMPUTE)
        v = v - centre
        if not FULL:
            v = tl.where(live, v, 0.0)
        rest, squares = two_sums(v, v * v, 1, True)
        rest = rest / count
        # What ``rest`` takes off is a rounding's worth, and never all.
        squares -= rest * rest * count
        squares = tl.where(squares < 0, 0.0, squares)
        if NARROW:
            v = again(kept).to(COMPUTE) - centre
        v = v - rest
        tl.store(mean + row, centre + rest, mask=inside)
    else:
        squares = tl.sum(v * v, 1, keep_dims=True)
        if NARROW:
            v = again(kept).to(COMPUTE)
    saved, scale = scale_of(squares, count, eps, LENGTH)
    tl.store(rstd + row, saved, mask=inside)
    y = affine(v * scale, weight, bias, col, col < n, OFFSET)
    to = rows_of(out, out_strides, outer, sizes, lane) + along(col, out_strides[2])
    tl.store(to, y.to(out.dtype.element_ty), mask=live)


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
    groups,
    eps,
    CENTRED: tl.constexpr,
    LENGTH: tl.constexpr,
    OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
    FULL: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Whole rows in registers: each element is read once and written once. FULL: they are of BLOCK elements.

    With NARROW they are held as they are read, in 16 bits, for two programs' rows to be there at a time. With STAGES
    programs stay for several groups of rows, and the next ones are on their way meanwhile.
    """
    begin(OVERLAPS)
    first = tl.program_id(0)
    if STAGES == 0:
        norm_group(
            first, x, out, mean, rstd, weight, bias, residual, summed, x_strides, out_strides, residual_strides,
            summed_strides, sizes, lanes, n, blocks, eps, CENTRED, LENGTH, OFFSET, COMPUTE, ROWS, BLOCK, NARROW, FULL,
        )  # fmt: skip
    else:
        for group in tl.range(first, groups, tl.num_programs(0), num_stages=STAGES):
            norm_group(
                group, x, out, mean, rstd, weight, bias, residual, summed, x_strides, out_strides, residual_strides,
                summed_strides, sizes, lanes, n, blocks, eps, CENTRED, LENGTH, OFFSET, COMPUTE, ROWS, BLOCK, NARROW,
                FULL,
            )  # fmt: skip


@triton.jit
def deviations(
    at,
    strides,
    residual_at,
    residual_strides,
    first,
    n,
    centre,
    CENTRED: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Sums of what is normalised less ``centre``, and of its squares, over one row from element ``first`` on: in each
    column of its blocks. While threads wait for each other nothing is on its way from memory; else UNROLL blocks are.
    """
    total = tl.zeros((BLOCK,), COMPUTE)
    squares = tl.zeros((BLOCK,), COMPUTE)
    for start in range(first, n, BLOCK * UNROLL):
        for u in tl.static_range(UNROLL):
            col = start + u * BLOCK + tl.arange(0, BLOCK)
            live = col < n
            v = read(at, strides, residual_at, residual_strides, col, live, COMPUTE, "evict_last")
            if CENTRED:
                v = tl.where(live, v - centre, 0.0)
                total += v
            squares += v * v
    return total, squares


@triton.jit
def norm_looped_kernel(
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
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One row, block by block: statistics, then, backwards, the results.

    Each column of blocks takes deviations from its first element, and their squares less that of their sum meet with
    those of other columns at the row's mean (Chan, Golub and LeVeque, equation 2.1). What is subtracted is large only
    where a row begins unlike its rest: it is then read once more, with deviations from its own mean.
    """
    begin(OVERLAPS)
    outer = tl.program_id(0) // blocks
    lane = (tl.program_id(0) % blocks).to(tl.int64)
    at = rows_of(x, x_strides, outer, sizes, lane)
    to = rows_of(out, out_strides, outer, sizes, lane)
    residual_at = start_of(residual, residual_strides, outer, sizes, lane)
    row = outer.to(tl.int64) * lanes + lane
    count = n.to(COMPUTE)
    centre = tl.zeros((), COMPUTE)
    middle = tl.zeros((), COMPUTE)
    if CENTRED:
        place = tl.arange(0, BLOCK)
        shift = read(at, x_strides, residual_at, residual_strides, place, place < n, COMPUTE, "evict_last")
        total, raw = deviations(
            at, x_strides, residual_at, residual_strides, BLOCK, n, shift, CENTRED, COMPUTE, BLOCK, UNROLL
        )
        times = tl.where(place < n, tl.cdiv(n - place, BLOCK), 0).to(COMPUTE)  # elements of each column
        own = total / tl.maximum(times, 1.0)
        centre = tl.sum(times * shift + total, 0) / count
        off = (shift - centre) + own
        apart = (raw - total * own) + times * off * off
        if TOGETHER:
            rest, squares, raw = tl.reduce((times * off, apart, raw + 0.0), 0, each_of_three)
        else:
            rest, squares, raw = tl.sum(times * off, 0), tl.sum(apart, 0), tl.sum(raw, 0)
        if raw > 4.0 * squares:
            total, again_squares = deviations(
                at, x_strides, residual_at, residual_strides, 0, n, centre, CENTRED, COMPUTE, BLOCK, UNROLL
            )
            rest, squares = two_sums(total, again_squares, 0, False)
        middle = rest / count
        squares -= rest * middle
        squares = tl.where(squares < 0, 0.0, squares)
        tl.store(mean + row, centre + middle)
    else:
        total, found = deviations(
            at, x_strides, residual_at, residual_strides, 0, n, centre, CENTRED, COMPUTE, BLOCK, UNROLL
        )
        squares = tl.sum(found, 0)
    saved, scale = scale_of(squares, count, eps, LENGTH)
    tl.store(rstd + row, saved)
    steps = tl.cdiv(n, BLOCK * UNROLL)
    for walked in range(steps):
        kept = ()
        for u in tl.static_range(UNROLL):
            col = ((steps - 1 - walked) * UNROLL + u) * BLOCK + tl.arange(0, BLOCK)
            kept = kept + (read(at, x_strides, residual_at, residual_strides, col, col < n, COMPUTE, "evict_first"),)
        for u in tl.static_range(UNROLL):
            col = ((steps - 1 - walked) * UNROLL + u) * BLOCK + tl.arange(0, BLOCK)
            write(
                kept[u], to, out, summed, weight, bias, out_strides, summed_strides, sizes, outer, lane, col, col < n,
                centre, middle, scale, CENTRED, OFFSET,
            )  # fmt: skip
