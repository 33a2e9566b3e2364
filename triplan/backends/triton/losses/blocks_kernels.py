"""Backward of cross_entropy and nll_loss: each program writes one block of its rows' columns."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.rows_kernels import axis_offset, group_lanes, row_pointers
from triplan.backends.triton.losses.cross_entropy_kernels import gradient_of, parts_of, weights_at
from triplan.backends.triton.losses.shared_kernels import (
    incoming,
    of_class,
    share_of,
    targets_of,
)


@triton.jit
def cross_entropy_backward_kernel(
    dloss,
    x,
    target,
    lse,
    dx,
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
    MEAN: tl.constexpr,
    EACH: tl.constexpr,
    SMOOTH: tl.constexpr,
    CLAMP: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Each element by itself, from its row's logsumexp. A program has one block of its rows' columns."""
    columns = tl.maximum(tl.cdiv(n, BLOCK), 1)
    group = tl.program_id(0) // columns
    outer, lane = group_lanes(group, blocks, lanes, sizes, ROWS)
    inside = lane < lanes
    row = outer.to(tl.int64) * lanes + lane
    at, kept = targets_of(target, row, inside, n, ignore, status, CLAMP)
    picked, spread, whole = parts_of(weight, class_sum, at, kept, n, smoothing, SMOOTH, COMPUTE)
    scale = share_of(share, counts, parts, at, kept, MEAN, COMPUTE, PARTS)
    scale = tl.where(kept, scale * incoming(dloss, row, inside, EACH, COMPUTE), 0.0)
    known = tl.load(lse + row, mask=kept, other=0.0)
    col = (tl.program_id(0) % columns) * BLOCK + tl.arange(0, BLOCK)[None, :]
    v = tl.load(
        row_pointers(x, x_strides, outer, sizes, lane) + axis_offset(col, x_strides[2]),
        mask=kept & (col < n),
        other=-float("inf"),
        eviction_policy="evict_first",
    ).to(COMPUTE)
    weights = weights_at(weight, col, col < n, COMPUTE) if SMOOTH else 0.0
    factor = scale * (picked + spread * whole)
    g = gradient_of(v, col, at, weights, known, factor, scale * picked, scale * spread, SMOOTH)
    to = row_pointers(dx, dx_strides, outer, sizes, lane) + axis_offset(col, dx_strides[2])
    tl.store(to, g.to(dx.dtype.element_ty), mask=inside & (col < n), eviction_policy="evict_first")


@triton.jit
def nll_loss_backward_kernel(
    dloss,
    target,
    dx,
    weight,
    share,
    counts,
    status,
    dx_strides,
    sizes,
    lanes,
    n,
    blocks,
    ignore,
    parts,
    MEAN: tl.constexpr,
    EACH: tl.constexpr,
    CLAMP: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Zeros, and one other element a row. A program has one block of its rows' columns."""
    columns = tl.maximum(tl.cdiv(n, BLOCK), 1)
    group = tl.program_id(0) // columns
    outer, lane = group_lanes(group, blocks, lanes, sizes, ROWS)
    live = lane < lanes
    row = outer.to(tl.int64) * lanes + lane
    at, kept = targets_of(target, row, live, n, ignore, status, CLAMP)
    g = share_of(share, counts, parts, at, kept, MEAN, COMPUTE, PARTS) * of_class(weight, at, kept, COMPUTE)
    g = g * incoming(dloss, row, live, EACH, COMPUTE)
    col = (tl.program_id(0) % columns) * BLOCK + tl.arange(0, BLOCK)[None, :]
    found = tl.where((col == at) & kept, -g, 0.0)
    to = row_pointers(dx, dx_strides, outer, sizes, lane) + axis_offset(col, dx_strides[2])
    tl.store(to, found.to(dx.dtype.element_ty), mask=live & (col < n))
