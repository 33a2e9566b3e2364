"""rms_norm, layer_norm, l2_norm and their backward: rows of any length, read block by block, twice.

CENTRED, LENGTH and the operands: see ``shared_kernels``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.rows_kernels import axis_offset, outer_and_lane, row_pointers
from triplan.backends.triton.norms.shared_kernels import (
    affine,
    read,
    scale_again,
    scale_of,
    start_of,
    two_sums,
    write,
    write_gradient,
)


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
def statistics(
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
    """(centre, what the mean is off it, the sum of squares about the mean, and about the centre) of a row.

    FINDS takes the mean of the first block for ``centre``; without CENTRED there is none, and the sums are of squares.
    While threads wait for each other nothing new is asked of memory: they wait but once, with UNROLL blocks on their
    way; until then VECTOR neighbours, which one thread holds, are added up.
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
    off = centre
    if CENTRED:
        total, raw = two_sums(total, squares, 0, False)
        off = total / n.to(COMPUTE)
        about = raw - total * off
    else:
        raw = tl.sum(squares, 0)
        about = raw
    return centre, off, about, raw


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
    at = row_pointers(x, x_strides, outer, sizes, lane)
    to = row_pointers(out, out_strides, outer, sizes, lane)
    residual_at = start_of(residual, residual_strides, outer, sizes, lane)
    row = outer.to(tl.int64) * lanes + lane
    centre = tl.zeros((), COMPUTE)
    centre, middle, squares, raw = statistics(
        at, x_strides, residual_at, residual_strides, n, centre, CENTRED, CENTRED, COMPUTE, BLOCK, UNROLL, VECTOR, FULL
    )
    if CENTRED:
        if raw > 4.0 * squares:
            centre, middle, squares, raw = statistics(
                at, x_strides, residual_at, residual_strides, n, centre + middle, CENTRED, False, COMPUTE, BLOCK,
                UNROLL, VECTOR, FULL,
            )  # fmt: skip
        squares = tl.where(squares < 0, 0.0, squares)
        tl.store(mean + row, centre + middle)
    saved, scale = scale_of(squares, 1.0 / n.to(COMPUTE), eps, LENGTH)
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


@triton.jit
def norm_backward_looped_kernel(
    dout,
    x,
    mean,
    rstd,
    dx,
    weight,
    dsummed,
    dout_strides,
    x_strides,
    dx_strides,
    dsummed_strides,
    sizes,
    lanes,
    n,
    eps,
    CENTRED: tl.constexpr,
    LENGTH: tl.constexpr,
    OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """One row, block by block: the sums, then, backwards, the gradients of x."""
    row = tl.program_id(0).to(tl.int64)
    outer, lane = outer_and_lane(row, sizes, lanes)
    dout_at = row_pointers(dout, dout_strides, outer, sizes, lane)
    x_at = row_pointers(x, x_strides, outer, sizes, lane)
    to = row_pointers(dx, dx_strides, outer, sizes, lane)
    saved = tl.load(rstd + row)
    scale = scale_again(saved, eps, LENGTH)
    centre = tl.zeros((), COMPUTE)
    if CENTRED:
        centre = tl.load(mean + row)
    total = tl.zeros((BLOCK,), COMPUTE)
    projected = tl.zeros((BLOCK,), COMPUTE)
    for start in range(0, n, BLOCK * UNROLL):
        for u in tl.static_range(UNROLL):
            col = start + u * BLOCK + tl.arange(0, BLOCK)
            live = col < n
            g = tl.load(dout_at + axis_offset(col, dout_strides[2]), mask=live, other=0.0, eviction_policy="evict_last")
            g = affine(g.to(COMPUTE), weight, None, col, live, OFFSET)
            v = tl.load(x_at + axis_offset(col, x_strides[2]), mask=live, other=0.0, eviction_policy="evict_last").to(
                COMPUTE
            )
            if CENTRED:
                total += g
            projected += g * ((v - centre) * scale)
    terms = 1.0 if LENGTH else n.to(COMPUTE)
    projected = tl.sum(projected, 0) / terms
    if LENGTH:
        projected = tl.where(saved < eps, 0.0, projected)
    middle = tl.zeros((), COMPUTE)
    if CENTRED:
        middle = tl.sum(total, 0) / terms
    steps = tl.cdiv(n, BLOCK * UNROLL)
    for step in range(steps):
        kept = ()
        for u in tl.static_range(UNROLL):
            col = ((steps - 1 - step) * UNROLL + u) * BLOCK + tl.arange(0, BLOCK)
            live = col < n
            dy = tl.load(
                dout_at + axis_offset(col, dout_strides[2]), mask=live, other=0.0, eviction_policy="evict_first"
            )
            v = tl.load(x_at + axis_offset(col, x_strides[2]), mask=live, other=0.0, eviction_policy="evict_first")
            kept = kept + (dy, v)
        for u in tl.static_range(UNROLL):
            col = ((steps - 1 - step) * UNROLL + u) * BLOCK + tl.arange(0, BLOCK)
            live = col < n
            g = affine(kept[2 * u].to(COMPUTE), weight, None, col, live, OFFSET)
            v = kept[2 * u + 1].to(COMPUTE)
            write_gradient(
                g, v, to, dx, dsummed, dx_strides, dsummed_strides, sizes, outer, lane, col, live, centre, middle,
                scale, projected, CENTRED, COMPUTE,
            )  # fmt: skip
