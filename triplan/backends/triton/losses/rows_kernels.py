"""Entry ``rows``: cross_entropy with whole rows in registers, and nll_loss and scale_gradient by tiles of rows.

Strides and ``blocks``: see ``common/rows_kernels``; targets and reductions: see ``shared_kernels``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import unravel
from triplan.backends.triton.common.rows_kernels import (
    axis_offset,
    element_pointers,
    exponential,
    finite_shift,
    group_lanes,
    load_rows,
    rematerialize,
    row_pointers,
    store_rows,
)
from triplan.backends.triton.losses.cross_entropy_kernels import (
    load_block,
    loss_of,
    row_weights,
    store_block,
    store_target,
    weighted_sum,
)
from triplan.backends.triton.losses.elements_kernels import scaled_tiles
from triplan.backends.triton.losses.shared_kernels import class_value, load_targets, row_share


@jit
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
    """losses = -log(softmax(x)[target]) and lse = log(sum(exp(x))) of each row; with GRAD, dx, the loss's gradient.

    x, dx: [outer, lanes, n] of f16, bf16, f32 or f64; target: [rows]; losses, lse: [rows], weight, share: [n], counts:
    [parts], class_sum: [1], of COMPUTE; status: [1] of i64. A program holds a tile [ROWS, BLOCK], BLOCK >= n. The whole
    formulas, with weights and smoothing, are in ``cross_entropy_kernels``.

    Each element is read once and written once. With NARROW, registers hold the 16-bit elements as loaded, and each
    use converts them to COMPUTE: two programs then fit on a multiprocessor.
    """
    outer, lane = group_lanes(tl.program_id(0), blocks, lanes, sizes, ROWS)
    inside = lane < lanes
    row = outer.to(tl.int64) * lanes + lane
    label, kept = load_targets(target, row, inside, n, ignore, status, CLAMP)
    x_at = row_pointers(x, x_strides, outer, sizes, lane)
    target_logit = tl.load(x_at + axis_offset(label, x_strides[2]), mask=kept, other=0.0).to(COMPUTE)
    col = tl.arange(0, BLOCK)[None, :]
    loaded = load_block(x_at, col, x_strides, n, kept, "evict_first")
    target_weight, spread, weight_sum = row_weights(weight, class_sum, label, kept, n, smoothing, SMOOTH, COMPUTE)
    scale = (
        row_share(share, counts, parts, target, n, ignore, label, kept, MEAN, CLAMP, COMPUTE, PARTS) if GRAD else 0.0
    )
    v = loaded.to(COMPUTE)
    top = tl.max(v, 1, keep_dims=True)
    if NARROW:
        v = rematerialize(loaded).to(COMPUTE)
    total = tl.sum(exponential(v - finite_shift(top)), 1, keep_dims=True)
    weighted = 0.0
    if SMOOTH:
        weighted = weighted_sum(v, top, weight, col, kept, n, 1, COMPUTE)[:, None]
    tl.store(
        losses + row,
        loss_of(target_logit, top, total, weighted, top, kept, target_weight, spread, weight_sum, SMOOTH),
        mask=inside,
    )
    tl.store(lse + row, top + tl.log(total), mask=inside)
    if GRAD:
        factor = tl.where(kept, scale * (target_weight + spread * weight_sum) / total, 0.0)
        target_weight = scale * target_weight
        spread = scale * spread
        top = tl.where(kept, top, 0.0)
        dx_at = row_pointers(dx, dx_strides, outer, sizes, lane)
        if NARROW:
            loaded = rematerialize(loaded)
        # If dx is x: past this barrier every thread has loaded its target's logit, which may now be overwritten.
        tl.debug_barrier()
        store_block(loaded, dx_at, col, dx_strides, n, inside, top, factor, spread, weight, SMOOTH, COMPUTE)
        store_target(
            target_logit, dx_at, label, dx_strides[2], kept, top, factor, target_weight, spread, weight, SMOOTH, COMPUTE
        )


@jit
def nll_loss_kernel(
    x,
    target,
    losses,
    loss,
    weight,
    share,
    counted,
    status,
    x_strides,
    sizes,
    lanes,
    n,
    blocks,
    ignore,
    MEAN: tl.constexpr,
    CLAMP: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """losses = -x[target] * weight[target] of each row.

    x: [outer, lanes, n] of f16, bf16, f32 or f64; target: [rows]; losses: [rows], weight, share, counted: [n], of
    COMPUTE; loss: [1]; status: [1] of i64. A program has ROWS rows, of each of which it reads one element. If ``loss``
    is given, one program has all rows, and stores the reduced loss too.
    """
    outer = tl.program_id(0) // blocks
    lane = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = lane < lanes
    row = outer.to(tl.int64) * lanes + lane
    label, kept = load_targets(target, row, live, n, ignore, status, CLAMP)
    v = tl.load(element_pointers(x, x_strides, outer, sizes, lane, label), mask=kept, other=0.0).to(COMPUTE)
    value = tl.where(kept, -v * class_value(weight, label, kept, COMPUTE), 0.0)
    tl.store(losses + row, value, mask=live)
    if loss is not None:
        if share is not None:
            value = tl.where(kept, value * class_value(share, label, kept, COMPUTE), 0.0)
        total = tl.sum(value, 0)
        if MEAN:
            total = total / tl.sum(class_value(counted, label, kept, COMPUTE), 0)
        tl.store(loss, total.to(loss.dtype.element_ty))


@jit
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
    """dx = dloss * unscaled, for operands of any strides.

    unscaled, dx: [outer, lanes, n] of f16, bf16, f32 or f64; dloss: [1]. A program walks over tiles [ROWS, BLOCK], of
    which there are ``tiles``. With IN_PLACE (dx is unscaled) and a factor of 1 it ends at once.
    """
    factor = tl.load(dloss).to(COMPUTE)
    columns = tl.cdiv(n, BLOCK)
    for tile in range(tl.program_id(0), scaled_tiles(tiles, factor, IN_PLACE), tl.num_programs(0)):
        group = tile // columns
        outer, lane = group_lanes(group, blocks, lanes, sizes, ROWS)
        col = (tile % columns) * BLOCK + tl.arange(0, BLOCK)[None, :]
        live = (lane < lanes) & (col < n)
        at = element_pointers(unscaled, unscaled_strides, outer, sizes, lane, col)
        to = element_pointers(dx, dx_strides, outer, sizes, lane, col)
        v = load_rows(at, live, 0.0, unscaled_strides, "").to(COMPUTE)
        store_rows(to, (v * factor).to(dx.dtype.element_ty), live, dx_strides, "")


@jit
def scale_gradient_points_kernel(
    dloss,
    unscaled,
    dx,
    unscaled_strides,
    dx_strides,
    extents,
    numel,
    tiles,
    IN_PLACE: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx = dloss * unscaled, element by element, for operands of any strides.

    unscaled, dx: ``numel`` points, numbered row-major over ``extents``, of f16, bf16, f32 or f64; dloss: [1]. Blocks go
    on from row to row, so that no lane is idle, and warps share no line of memory where rows follow each other. For
    IN_PLACE and ``tiles`` see ``scale_gradient_rows_kernel``.
    """
    factor = tl.load(dloss).to(COMPUTE)
    for tile in range(tl.program_id(0), scaled_tiles(tiles, factor, IN_PLACE), tl.num_programs(0)):
        point = tile * BLOCK + tl.arange(0, BLOCK)
        live = point < numel
        v = tl.load(unscaled + unravel(point, extents, unscaled_strides), mask=live, other=0.0).to(COMPUTE)
        tl.store(dx + unravel(point, extents, dx_strides), (v * factor).to(dx.dtype.element_ty), mask=live)
