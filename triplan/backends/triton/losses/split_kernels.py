"""cross_entropy of rows split between programs: partial results of blocks, then the rest from all of a row's.

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
    gradient_of,
    loss_of,
    parts_of,
    plain_of,
    shift_of,
    weights_at,
)
from triplan.backends.triton.losses.shared_kernels import share_of, targets_of


@triton.jit
def cross_entropy_partial_kernel(
    x,
    target,
    weight,
    tops,
    totals,
    plains,
    mines,
    x_strides,
    sizes,
    lanes,
    n,
    blocks,
    ignore,
    SMOOTH: tl.constexpr,
    CLAMP: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Maximum, sum of exponentials and sum of weighted logits of one block of one row; and the target's logit."""
    row = (tl.program_id(0) // blocks).to(tl.int64) + tl.arange(0, 1)
    block = tl.program_id(0) % blocks
    at, kept = targets_of(target, row, row >= 0, n, ignore, None, CLAMP)
    from_row = row_pointers(x, x_strides, row // lanes, sizes, row % lanes)
    col = block * BLOCK + tl.arange(0, BLOCK)
    live = kept & (col < n)
    v = tl.load(
        from_row + axis_offset(col, x_strides[2]), mask=live, other=-float("inf"), eviction_policy="evict_last"
    ).to(COMPUTE)
    top = tl.max(v, 0)
    tl.store(tops + tl.program_id(0), top)
    tl.store(totals + tl.program_id(0), tl.sum(exponential(v - finite_shift(top)), 0))
    if SMOOTH:
        mine = tl.load(from_row + axis_offset(at, x_strides[2]), mask=kept, other=0.0).to(COMPUTE)
        tl.store(plains + tl.program_id(0), plain_of(v, shift_of(mine), weight, col, kept, n, 0, COMPUTE))
    if block == 0:
        tl.store(mines + row, tl.load(from_row + axis_offset(at, x_strides[2]), mask=kept, other=0.0).to(COMPUTE))


@triton.jit
def cross_entropy_finish_kernel(
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
    tops,
    totals,
    plains,
    mines,
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
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The rest, from all partial results of a row, which every program adds up in the same order: with GRAD one block's
    gradients, and by the first program of a row, its loss. Without GRAD there is only that program."""
    if GRAD:
        row = (tl.program_id(0) // blocks).to(tl.int64) + tl.arange(0, 1)
        block = tl.program_id(0) % blocks
    else:
        row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
        block = 0
    at, kept = targets_of(target, row, row >= 0, n, ignore, status, CLAMP)
    part = tl.arange(0, BLOCKS)
    known = part < blocks
    first = row * blocks
    part_tops = tl.load(tops + first + part, mask=known, other=-float("inf"))
    part_totals = tl.load(totals + first + part, mask=known, other=0.0)
    top = tl.max(part_tops, 0)
    total = tl.sum(part_totals * exponential(part_tops - finite_shift(top)), 0)
    plain = tl.sum(tl.load(plains + first + part, mask=known, other=0.0), 0) if SMOOTH else 0.0
    picked, spread, whole = parts_of(weight, class_sum, at, kept, n, smoothing, SMOOTH, COMPUTE)
    if block == 0:
        mine = tl.load(mines + row)
        loss = loss_of(mine, top, total, plain, shift_of(mine), kept, picked, spread, whole, SMOOTH)
        tl.store(losses + row, loss)
        tl.store(lse + row, top + tl.log(total))
    if GRAD:
        scale = share_of(share, counts, parts, at, kept, MEAN, COMPUTE, PARTS)
        factor = tl.where(kept, scale * (picked + spread * whole) / total, 0.0)
        col = block * BLOCK + tl.arange(0, BLOCK)
        from_row = row_pointers(x, x_strides, row // lanes, sizes, row % lanes)
        v = tl.load(
            from_row + axis_offset(col, x_strides[2]),
            mask=kept & (col < n),
            other=-float("inf"),
            eviction_policy="evict_first",
        ).to(COMPUTE)
        weights = weights_at(weight, col, col < n, COMPUTE) if SMOOTH else 0.0
        g = gradient_of(v, col, at, weights, tl.where(kept, top, 0.0), factor, scale * picked, scale * spread, SMOOTH)
        to = row_pointers(dx, dx_strides, row // lanes, sizes, row % lanes) + axis_offset(col, dx_strides[2])
        tl.store(to, g.to(dx.dtype.element_ty), mask=col < n)
