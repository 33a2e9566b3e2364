"""cross_entropy of rows of any length, read block by block.

Arguments and gradient: see ``cross_entropy_kernels``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.rows_kernels import (
    axis_offset,
    exponential,
    finite_shift,
    row_pointers,
)
from triplan.backends.triton.losses.cross_entropy_kernels import (
    loss_of,
    parts_of,
    plain_of,
    read_block,
    shift_of,
    write_block,
    write_target,
)
from triplan.backends.triton.losses.shared_kernels import share_of, targets_of


@triton.jit
def absorbed(v, col, n, kept, top, total, plain, shift, weight, SMOOTH: tl.constexpr, COMPUTE: tl.constexpr):
    """Maxima, sums of exponentials and of weighted logits less ``shift``, with a block's added: [rows, cols] each."""
    v = v.to(COMPUTE)
    new = tl.maximum(top, tl.max(v, 2))
    base = finite_shift(new)
    total = total * exponential(top - base) + tl.sum(exponential(v - base[:, :, None]), 2)
    if SMOOTH:
        plain += plain_of(v, shift, weight, col, kept, n, 2, COMPUTE)
    return new, total, plain


@triton.jit
def cross_entropy_looped_kernel(
    x,
    dx,
    target,
    losses,
    lse,
    weight,
    share,
    counts,
    class_sum,
    status,
    x_strides,
    dx_strides,
    sizes,
    lanes,
    n,
    blocks,
    ignore,
    smoothing,
    parts,
    GRAD: tl.constexpr,
    MEAN: tl.constexpr,
    SMOOTH: tl.constexpr,
    CLAMP: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    VEC: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Rows block by block with running maxima and sums (Milakov and Gimelshein, arXiv 1805.02867).

    Each thread keeps a maximum and a sum of its own for every VEC neighbours that it loads at once: one exponential
    more for VEC of them, no exchange between threads within the loop, so that many loads are under way.
    The gradients go backwards: what was read last is still in the caches. The target's gradient is written on its own,
    last: a comparison less for each element.
    """
    WIDTH: tl.constexpr = COLS * VEC
    KEEP: tl.constexpr = "evict_last" if GRAD else "evict_first"
    outer = tl.program_id(0) // blocks
    lane = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = lane < lanes
    row = outer.to(tl.int64) * lanes + lane
    at, kept = targets_of(target, row, inside, n, ignore, status, CLAMP)
    from_row = row_pointers(x, x_strides, outer, sizes, lane)
    mine = tl.load(from_row + axis_offset(at, x_strides[2]), mask=kept, other=0.0).to(COMPUTE)
    picked, spread, whole = parts_of(weight, class_sum, at, kept, n, smoothing, SMOOTH, COMPUTE)
    from_row = from_row[:, None, None]
    read = kept[:, None, None]
    within = (tl.arange(0, COLS)[:, None] * VEC + tl.arange(0, VEC)[None, :])[None, :, :]
    steps = tl.cdiv(n, WIDTH)
    any_kept = tl.max(kept.to(tl.int32), 0) > 0
    top = tl.full((ROWS, COLS), -float("inf"), COMPUTE)
    total = tl.zeros((ROWS, COLS), COMPUTE)
    plain = tl.zeros((ROWS, COLS), COMPUTE)
    shift = shift_of(mine)
    for start in range(0, tl.where(any_kept, steps, 0) * WIDTH, WIDTH):
        col = start + within
        v = read_block(from_row, col, x_strides[2], n, read, KEEP)
        top, total, plain = absorbed(v, col, n, read, top, total, plain, shift[:, None, None], weight, SMOOTH, COMPUTE)
    tops = tl.max(top, 1)
    totals = tl.sum(total * exponential(top - finite_shift(tops)[:, None]), 1)
    plains = tl.sum(plain, 1)
    tl.store(losses + row, loss_of(mine, tops, totals, plains, shift, kept, picked, spread, whole, SMOOTH), mask=inside)
    tl.store(lse + row, tops + tl.log(totals), mask=inside)
    if GRAD:
        # Where the gradient goes over x, every thread has its row's target by now.
        tl.debug_barrier()
        scale = share_of(share, counts, parts, at, kept, MEAN, COMPUTE, PARTS)
        factor = tl.where(kept, scale * (picked + spread * whole) / totals, 0.0)
        tops = tl.where(kept, tops, 0.0)
        picked = scale * picked
        spread = scale * spread
        to_rows = row_pointers(dx, dx_strides, outer, sizes, lane)
        to_row = to_rows[:, None, None]
        live = inside[:, None, None]
        t = tops[:, None, None]
        f = factor[:, None, None]
        s = spread[:, None, None]
        for step in range(steps):
            col = (steps - 1 - step) * WIDTH + within
            v = read_block(from_row, col, x_strides[2], n, read, "evict_first")
            write_block(v, to_row, col, dx_strides[2], n, live, t, f, s, weight, SMOOTH, COMPUTE)
        write_target(mine, to_rows, at, dx_strides[2], kept, tops, factor, picked, spread, weight, SMOOTH, COMPUTE)
