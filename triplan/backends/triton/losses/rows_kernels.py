"""Whole rows in registers: cross_entropy, nll_loss and scale_gradient."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.rows_kernels import (
    axis_offset,
    exponential,
    finite_shift,
    group_lanes,
    rematerialize,
    row_pointers,
)
from triplan.backends.triton.losses.cross_entropy_kernels import (
    loss_of,
    parts_of,
    plain_of,
    read_block,
    write_block,
    write_target,
)
from triplan.backends.triton.losses.shared_kernels import of_class, share_of, targets_of


@triton.jit
def cross_entropy_rows_kernel(
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
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Whole rows in registers: each element is read once and written once.

    With NARROW they are held as they are read, in 16 bits, for two programs' rows to be there at a time. The target's
    gradient is written on its own, last.
    """
    outer, lane = group_lanes(tl.program_id(0), blocks, lanes, sizes, ROWS)
    inside = lane < lanes
    row = outer.to(tl.int64) * lanes + lane
    at, kept = targets_of(target, row, inside, n, ignore, status, CLAMP)
    from_row = row_pointers(x, x_strides, outer, sizes, lane)
    mine = tl.load(from_row + axis_offset(at, x_strides[2]), mask=kept, other=0.0).to(COMPUTE)
    col = tl.arange(0, BLOCK)[None, :]
    held = read_block(from_row, col, x_strides[2], n, kept, "evict_first")
    picked, spread, whole = parts_of(weight, class_sum, at, kept, n, smoothing, SMOOTH, COMPUTE)
    scale = share_of(share, counts, parts, at, kept, MEAN, COMPUTE, PARTS) if GRAD else 0.0
    v = held.to(COMPUTE)
    top = tl.max(v, 1, keep_dims=True)
    if NARROW:
        v = rematerialize(held).to(COMPUTE)
    total = tl.sum(exponential(v - finite_shift(top)), 1, keep_dims=True)
    plain = 0.0
    if SMOOTH:
        plain = plain_of(v, top, weight, col, kept, n, 1, COMPUTE)[:, None]
    tl.store(losses + row, loss_of(mine, top, total, plain, top, kept, picked, spread, whole, SMOOTH), mask=inside)
    tl.store(lse + row, top + tl.log(total), mask=inside)
    if GRAD:
        factor = tl.where(kept, scale * (picked + spread * whole) / total, 0.0)
        picked = scale * picked
        spread = scale * spread
        top = tl.where(kept, top, 0.0)
        to_row = row_pointers(dx, dx_strides, outer, sizes, lane)
        if NARROW:
            held = rematerialize(held)
        # Where the gradient goes over x, every thread has its row's target by now.
        tl.debug_barrier()
        write_block(held, to_row, col, dx_strides[2], n, inside, top, factor, spread, weight, SMOOTH, COMPUTE)
        write_target(mine, to_row, at, dx_strides[2], kept, top, factor, picked, spread, weight, SMOOTH, COMPUTE)


@triton.jit
def nll_loss_kernel(
    x,
    target,
    losses,
    weight,
    status,
    x_strides,
    sizes,
    lanes,
    n,
    blocks,
    ignore,
    CLAMP: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One element of each row."""
    outer = tl.program_id(0) // blocks
    lane = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = lane < lanes
    row = outer.to(tl.int64) * lanes + lane
    at, kept = targets_of(target, row, live, n, ignore, status, CLAMP)
    v = tl.load(
        row_pointers(x, x_strides, outer, sizes, lane) + axis_offset(at, x_strides[2]), mask=kept, other=0.0
    ).to(COMPUTE)
    found = tl.where(kept, -v * of_class(weight, at, kept, COMPUTE), 0.0)
    tl.store(losses + row, found, mask=live)


@triton.jit
def scale_gradient_rows_kernel(
    dloss,
    unscaled,
    dx,
    unscaled_strides,
    dx_strides,
    sizes,
    lanes,
    n,
    blocks,
    tiles,
    IN_PLACE: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same by rows, of whatever strides."""
    factor = tl.load(dloss).to(COMPUTE)
    columns = tl.cdiv(n, BLOCK)
    last = tiles
    if IN_PLACE:
        if factor == 1.0:
            last = 0
    for tile in range(tl.program_id(0), last, tl.num_programs(0)):
        group = tile // columns
        outer, lane = group_lanes(group, blocks, lanes, sizes, ROWS)
        col = (tile % columns) * BLOCK + tl.arange(0, BLOCK)[None, :]
        live = (lane < lanes) & (col < n)
        at = row_pointers(unscaled, unscaled_strides, outer, sizes, lane) + axis_offset(col, unscaled_strides[2])
        to = row_pointers(dx, dx_strides, outer, sizes, lane) + axis_offset(col, dx_strides[2])
        v = tl.load(at, mask=live, other=0.0).to(COMPUTE)
        tl.store(to, (v * factor).to(dx.dtype.element_ty), mask=live)
