"""rms_norm, layer_norm and l2_norm of rows of any length, block by block.

CENTRED, LENGTH and the operands as in ``norm_kernels``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.norm_kernels import read, scale_of, start_of, two_sums, write
from triplan.backends.triton.rows_kernels import rows_of


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
