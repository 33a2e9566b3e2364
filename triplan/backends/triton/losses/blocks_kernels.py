"""Backward of cross_entropy and nll_loss, entry ``blocks``: a program stores one block of its rows' columns.

Each element is computed by itself: nothing is left to reduce along the rows.
Strides and ``blocks``: see ``common/rows_kernels``; targets and reductions: see ``shared_kernels``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import element_pointers, group_lanes
from triplan.backends.triton.losses.cross_entropy_kernels import gradient_of, load_weights, row_weights
from triplan.backends.triton.losses.shared_kernels import class_value, load_dloss, load_targets, row_share


@jit
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
    TURNED: tl.constexpr,
):
    """dx = dloss * share * (exp(x - lse) - (c == target)) for class c; weights and smoothing as in ``gradient_of``.

    x, dx: [outer, lanes, n] of f16, bf16, f32 or f64; target: [rows]; dloss: [rows] if EACH, else [1]; lse: [rows],
    weight, share: [n], counts: [parts], class_sum: [1], of COMPUTE; status: [1] of i64. A program has a tile
    [ROWS, BLOCK]. With TURNED x is loaded by vectors across rows.
    """
    columns = tl.maximum(tl.cdiv(n, BLOCK), 1)
    group = tl.program_id(0) // columns
    outer, lane = group_lanes(group, blocks, lanes, sizes, ROWS)
    inside = lane < lanes
    row = outer.to(tl.int64) * lanes + lane
    label, kept = load_targets(target, row, inside, n, ignore, status, CLAMP)
    target_weight, spread, weight_sum = row_weights(weight, class_sum, label, kept, n, smoothing, SMOOTH, COMPUTE)
    scale = row_share(share, counts, parts, target, n, ignore, label, kept, MEAN, CLAMP, COMPUTE, PARTS)
    scale = tl.where(kept, scale * load_dloss(dloss, row, inside, EACH, COMPUTE), 0.0)
    row_lse = tl.load(lse + row, mask=kept, other=0.0)
    col = (tl.program_id(0) % columns) * BLOCK + tl.arange(0, BLOCK)[None, :]
    read = kept
    if TURNED:  # a vector has an element of each of several rows: no row can be left out
        read = inside & (tl.max(kept.to(tl.int32), 0, keep_dims=True) > 0)
    v = tl.load(
        element_pointers(x, x_strides, outer, sizes, lane, col),
        mask=read & (col < n),
        other=-float("inf"),
        eviction_policy="evict_first",
    ).to(COMPUTE)
    if TURNED:
        v = tl.where(kept, v, -float("inf"))
    weights = load_weights(weight, col, col < n, COMPUTE) if SMOOTH else 0.0
    factor = scale * (target_weight + spread * weight_sum)
    g = gradient_of(v, col, label, weights, row_lse, factor, scale * target_weight, scale * spread, SMOOTH)
    to = element_pointers(dx, dx_strides, outer, sizes, lane, col)
    tl.store(to, g.to(dx.dtype.element_ty), mask=inside & (col < n), eviction_policy="evict_first")


@jit
def nll_gradient(
    dloss,
    target,
    weight,
    share,
    counts,
    status,
    row,
    live,
    n,
    ignore,
    parts,
    MEAN: tl.constexpr,
    EACH: tl.constexpr,
    CLAMP: tl.constexpr,
    COMPUTE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """(label, whether the row counts, dloss * share * weight[label]) of each ``row``; ``live``: which rows there are.

    The operands are those of ``nll_loss_backward_kernel``.
    """
    label, kept = load_targets(target, row, live, n, ignore, status, CLAMP)
    scale = row_share(share, counts, parts, target, n, ignore, label, kept, MEAN, CLAMP, COMPUTE, PARTS)
    g = scale * class_value(weight, label, kept, COMPUTE)
    return label, kept, g * load_dloss(dloss, row, live, EACH, COMPUTE)


@jit
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
    """dx = -dloss * share * weight[target] at the target of each row, else 0.

    dx: [outer, lanes, n] of f16, bf16, f32 or f64; target: [rows]; dloss: [rows] if EACH, else [1]; weight, share: [n],
    counts: [parts], of COMPUTE; status: [1] of i64. A program has a tile [ROWS, BLOCK].
    """
    columns = tl.maximum(tl.cdiv(n, BLOCK), 1)
    group = tl.program_id(0) // columns
    outer, lane = group_lanes(group, blocks, lanes, sizes, ROWS)
    live = lane < lanes
    row = outer.to(tl.int64) * lanes + lane
    label, kept, g = nll_gradient(
        dloss, target, weight, share, counts, status, row, live, n, ignore, parts, MEAN, EACH, CLAMP, COMPUTE, PARTS
    )
    col = (tl.program_id(0) % columns) * BLOCK + tl.arange(0, BLOCK)[None, :]
    d = tl.where((col == label) & kept, -g, 0.0)
    to = element_pointers(dx, dx_strides, outer, sizes, lane, col)
    tl.store(to, d.to(dx.dtype.element_ty), mask=live & (col < n))


@jit
def nll_loss_backward_flat_kernel(
    dloss,
    target,
    dx,
    weight,
    share,
    counts,
    status,
    rows,
    n,
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
    """dx = -dloss * share * weight[target] at the target of each row, else 0, for rows that begin between two vectors.

    dx: [rows, n] of f16, bf16, f32 or f64, packed; the rest as in ``nll_loss_backward_kernel``. A program fills BLOCK
    elements from a multiple of 16 bytes on, in which at most ROWS rows lie, with zeros by vectors, and then writes the
    targets' elements.
    """
    size: tl.constexpr = dx.dtype.element_ty.primitive_bitwidth // 8
    before = dx.to(tl.int64) % 16 // size
    first = tl.program_id(0).to(tl.int64) * BLOCK
    start = first - before
    numel = rows * n
    element = first + tl.arange(0, BLOCK)
    to = tl.multiple_of(dx - before, 16) + element
    zeros = tl.zeros((BLOCK,), dx.dtype.element_ty)
    if (start >= 0) & (start + BLOCK <= numel):
        tl.store(to, zeros)
    else:
        tl.store(to, zeros, mask=(element >= before) & (element < numel + before))
    tl.debug_barrier()  # past it, the zeros are written
    row = tl.maximum(start, 0) // n + tl.arange(0, ROWS)
    live = row < rows
    label, kept, g = nll_gradient(
        dloss, target, weight, share, counts, status, row, live, n, ignore, parts, MEAN, EACH, CLAMP, COMPUTE, PARTS
    )
    place = row * n + label
    tl.store(dx + place, (-g).to(dx.dtype.element_ty), mask=kept & (place >= start) & (place < start + BLOCK))
