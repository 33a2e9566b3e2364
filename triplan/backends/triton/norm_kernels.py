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

from triplan.backends.triton.rows_kernels import again, along, lanes_of, rows_of
from triplan.sku import interpreting

#: Columns of a block in which elements of 16 bits add up exactly in f32, unless some are far smaller than others. What
#: the mean is off by then follows from that sum, without another one.
SHORT = tl.constexpr(1024)
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
def two_sums(a, b, axis: tl.constexpr, keep_dims: tl.constexpr):
    """Of ``a`` and of ``b``, for which threads meet once."""
    if TOGETHER:
        found = tl.reduce((a, b), axis, both, keep_dims=keep_dims)
    else:
        found = (tl.sum(a, axis, keep_dims=keep_dims), tl.sum(b, axis, keep_dims=keep_dims))
    return found


@triton.jit
def scale_of(squares, share, eps, LENGTH: tl.constexpr):
    """(the statistic that is saved, what a row is multiplied by) from its sum of squares, each of so large a share."""
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
    """``v`` of f32 with the 16 leading bits of its significand: times a count it is exact."""
    return (v.to(tl.int32, bitcast=True) & -256).to(tl.float32, bitcast=True)


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
    APART: tl.constexpr,
):
    outer, lane = lanes_of(group, blocks, sizes, ROWS)
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
        v = read(at, x_strides, residual_at, residual_strides, col, live, COMPUTE, "").to(COMPUTE)
    if summed is not None:
        sums_to = rows_of(summed, summed_strides, outer, sizes, lane) + along(col, summed_strides[2])
        tl.store(sums_to, v.to(summed.dtype.element_ty), mask=live)
    count = n.to(COMPUTE)
    share = 1.0 / count  # once: divisions are many instructions
    row = outer.to(tl.int64) * lanes + lane
    if CENTRED:
        total = tl.sum(v, 1, keep_dims=True)
        centre = total * share
        ADDS_UP: tl.constexpr = x.dtype.element_ty.primitive_bitwidth == 16 and residual is None and BLOCK <= SHORT
        if ADDS_UP:
            centre = shortened(centre)
        if NARROW:
            v = again(kept).to(COMPUTE)
        v = v - centre
        if not FULL:
            v = tl.where(live, v, 0.0)
        if ADDS_UP:
            rest = tl.fma(-centre, count, total)
            squares = tl.sum(v * v, 1, keep_dims=True)
        else:
            rest, squares = two_sums(v, v * v, 1, True)
        rest = rest * share
        # What ``rest`` takes off is a rounding's worth, and never all.
        squares -= rest * rest * count
        squares = tl.where(squares < 0, 0.0, squares)
        if NARROW:
            v = again(kept).to(COMPUTE) - centre
        tl.store(mean + row, centre + rest, mask=inside)
    else:
        squares = tl.sum(v * v, 1, keep_dims=True)
        if NARROW:
            v = again(kept).to(COMPUTE)
    saved, scale = scale_of(squares, share, eps, LENGTH)
    tl.store(rstd + row, saved, mask=inside)
    place = col
    if APART:
        place = tl.broadcast_to(col, (ROWS, BLOCK))
    v = v * scale
    if CENTRED:
        v = v - rest * scale  # one fused multiplication and addition
    y = affine(v, weight, bias, place, place < n, OFFSET)
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
    APART: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Whole rows in registers: each element is read once and written once. FULL: they are of BLOCK elements.

    With APART each row reads weight and bias anew: shared by several warps they would come through shared memory.
    With NARROW they are held as they are read, in 16 bits, for two programs' rows to be there at a time. With STAGES
    programs stay for several groups of rows, and the next ones are on their way meanwhile.
    """
    first = tl.program_id(0)
    if STAGES == 0:
        norm_group(
            first, x, out, mean, rstd, weight, bias, residual, summed, x_strides, out_strides, residual_strides,
            summed_strides, sizes, lanes, n, blocks, eps, CENTRED, LENGTH, OFFSET, COMPUTE, ROWS, BLOCK, NARROW, FULL,
            APART,
        )  # fmt: skip
    else:
        for group in tl.range(first, groups, tl.num_programs(0), num_stages=STAGES):
            norm_group(
                group, x, out, mean, rstd, weight, bias, residual, summed, x_strides, out_strides, residual_strides,
                summed_strides, sizes, lanes, n, blocks, eps, CENTRED, LENGTH, OFFSET, COMPUTE, ROWS, BLOCK, NARROW,
                FULL, APART,
            )  # fmt: skip


@triton.jit
def within(col, n, FULL: tl.constexpr):
    """Which of the columns ``col`` there are; with FULL all, as the compiler then knows."""
    live = col < n
    if FULL:
        live = tl.full(col.shape, True, tl.int1)
    return live


@triton.jit
def neighbours(v, VECTOR: tl.constexpr):
    """Sums of VECTOR neighbours each: those that one thread holds."""
    if VECTOR > 1:
        v = tl.sum(tl.reshape(v, (v.shape[0] // VECTOR, VECTOR)), 1)
    return v


@triton.jit
def read_blocks(
    at,
    strides,
    residual_at,
    residual_strides,
    first,
    n,
    COMPUTE: tl.constexpr,
    POLICY: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    FULL: tl.constexpr,
):
    """UNROLL blocks of a row from element ``first`` on, all of them on their way at a time."""
    found = ()
    for u in tl.static_range(UNROLL):
        col = first + u * BLOCK + tl.arange(0, BLOCK)
        live = within(col, n, FULL)
        found = found + (read(at, strides, residual_at, residual_strides, col, live, COMPUTE, POLICY),)
    return found


@triton.jit
def deviations(
    at,
    strides,
    residual_at,
    residual_strides,
    n,
    centre,
    CENTRED: tl.constexpr,
    FINDS: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    VECTOR: tl.constexpr,
    FULL: tl.constexpr,
):
    """Sums of what a row deviates from ``centre``, and of its squares, in columns of VECTOR neighbours, and ``centre``.

    FINDS takes the mean of the first block for it. While threads wait for each other nothing new is asked of memory:
    they wait but once, with UNROLL blocks on their way.
    """
    total = tl.zeros((BLOCK // VECTOR,), COMPUTE)
    squares = tl.zeros((BLOCK // VECTOR,), COMPUTE)
    for first in range(0, n, BLOCK * UNROLL):
        found = read_blocks(
            at, strides, residual_at, residual_strides, first, n, COMPUTE, "evict_last", BLOCK, UNROLL, FULL
        )
        if FINDS:
            if first == 0:
                centre = tl.sum(neighbours(found[0].to(COMPUTE), VECTOR), 0) / tl.minimum(n, BLOCK).to(COMPUTE)
        for u in tl.static_range(UNROLL):
            v = found[u].to(COMPUTE)
            if CENTRED:
                v = v - centre
                if not FULL:
                    v = tl.where(first + u * BLOCK + tl.arange(0, BLOCK) < n, v, 0.0)
                total += neighbours(v, VECTOR)
            squares += neighbours(v * v, VECTOR)
    return total, squares, centre


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
    VECTOR: tl.constexpr,
    FULL: tl.constexpr,
):
    """One row, block by block: statistics, then, backwards, the results. FULL: UNROLL blocks at a time fill the row.

    Deviations are from the mean of the row's first block, so that threads meet but twice: that mean is off the row's
    own by little unless the row begins unlike its rest (Chan, Golub and LeVeque, section 3, shifted data). If the
    squares of deviations are several times those from the row's mean, the row is read once more, with its own.
    """
    outer = tl.program_id(0) // blocks
    lane = (tl.program_id(0) % blocks).to(tl.int64)
    at = rows_of(x, x_strides, outer, sizes, lane)
    to = rows_of(out, out_strides, outer, sizes, lane)
    residual_at = start_of(residual, residual_strides, outer, sizes, lane)
    row = outer.to(tl.int64) * lanes + lane
    count = n.to(COMPUTE)
    centre = tl.zeros((), COMPUTE)
    middle = tl.zeros((), COMPUTE)
    total, found, centre = deviations(
        at, x_strides, residual_at, residual_strides, n, centre, CENTRED, CENTRED, COMPUTE, BLOCK, UNROLL, VECTOR, FULL
    )
    if CENTRED:
        off, raw = two_sums(total, found, 0, False)
        middle = off / count
        squares = raw - off * middle
        if raw > 4.0 * squares:
            centre = centre + middle
            total, found, centre = deviations(
                at,
                x_strides,
                residual_at,
                residual_strides,
                n,
                centre,
                CENTRED,
                False,
                COMPUTE,
                BLOCK,
                UNROLL,
                VECTOR,
                FULL,
            )
            off, raw = two_sums(total, found, 0, False)
            middle = off / count
            squares = raw - off * middle
        squares = tl.where(squares < 0, 0.0, squares)
        tl.store(mean + row, centre + middle)
    else:
        squares = tl.sum(found, 0)
    saved, scale = scale_of(squares, 1.0 / count, eps, LENGTH)
    tl.store(rstd + row, saved)
    steps = tl.cdiv(n, BLOCK * UNROLL)
    for walked in range(steps):
        first = (steps - 1 - walked) * UNROLL * BLOCK
        kept = read_blocks(
            at, x_strides, residual_at, residual_strides, first, n, COMPUTE, "evict_first", BLOCK, UNROLL, FULL
        )
        for u in tl.static_range(UNROLL):
            col = first + u * BLOCK + tl.arange(0, BLOCK)
            write(
                kept[u].to(COMPUTE), to, out, summed, weight, bias, out_strides, summed_strides, sizes, outer, lane,
                col, within(col, n, FULL), centre, middle, scale, CENTRED, OFFSET,
            )  # fmt: skip
