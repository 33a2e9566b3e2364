"""cross_entropy, entry ``split``: each row divided among ``blocks`` programs, in two launches.

The ``partial`` kernel reduces each block of a row, the ``finish`` kernel merges the partial results of the row. Every
program merges them in the same order, so all get the same bits. Where neighbouring rows are adjacent in an operand, a
program has a block of ROWS neighbours: it moves whole sectors. If each of these programs would merge many results, a
``merge`` kernel does so between the two launches, once for each row.

Strides: see ``common/rows_kernels``; ``groups``: groups of ROWS lanes at one outer point. Targets and reductions: see
``shared_kernels``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import (
    axis_offset,
    element_pointers,
    group_lanes,
    load_rows,
    merge_softmax_parts,
    row_pointers,
    store_rows,
    store_softmax_part,
)
from triplan.backends.triton.losses.cross_entropy_kernels import (
    gradient_of,
    load_weights,
    logit_shift,
    loss_of,
    row_weights,
    weighted_sum,
)
from triplan.backends.triton.losses.shared_kernels import load_targets, row_share


@jit
def _merged_sum(parts, row, inside, blocks, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """sum(parts) of each ``row`` [ROWS, 1] of those ``inside``; parts: [rows, blocks], BLOCKS >= blocks. As in
    ``_merged_parts``, those of one row are summed as [BLOCKS]."""
    part = tl.arange(0, BLOCKS)[None, :]
    found = tl.load(parts + row.to(tl.int64) * blocks + part, mask=inside & (part < blocks), other=0.0)
    if ROWS == 1:
        total = tl.full((1, 1), tl.sum(tl.reshape(found, (BLOCKS,)), 0), found.dtype)
    else:
        total = tl.sum(found, 1, keep_dims=True)
    return total


@jit
def _merged_parts(tops, totals, row, inside, blocks, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """``merge_softmax_parts`` of each ``row`` [ROWS, 1].

    The results of one row are merged as [BLOCKS]: Triton takes loads of fewer elements than threads for cheap, and
    would let each thread load all of [1, BLOCKS], in the layout that stores one element.
    """
    if ROWS == 1:
        row, inside = tl.reshape(row, (1,)), tl.reshape(inside, (1,))
    top, total = merge_softmax_parts(tops, totals, row, inside, blocks, BLOCKS)
    if ROWS == 1:
        top, total = tl.reshape(top, (1, 1)), tl.reshape(total, (1, 1))
    return top, total


@jit
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
    groups,
    ignore,
    SMOOTH: tl.constexpr,
    CLAMP: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """tops = max(x), totals = sum(exp(x - top)), plains = sum(w * (x - shift)) of a block of ROWS rows; mines =
    x[target].

    x: [outer, lanes, n] of f16, bf16, f32 or f64; target: [rows]; weight: [n]; tops, totals, plains: [rows, blocks],
    mines: [rows], of COMPUTE. ``plains`` are for SMOOTH alone.
    """
    block = tl.program_id(0) % blocks
    outer, lane = group_lanes(tl.program_id(0) // blocks, groups, lanes, sizes, ROWS)
    inside = lane < lanes
    row = outer.to(tl.int64) * lanes + lane
    label, kept = load_targets(target, row, inside, n, ignore, None, CLAMP)
    x_at = row_pointers(x, x_strides, outer, sizes, lane)
    col = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = x_at + axis_offset(col, x_strides[2])
    # Of several rows, ignored ones are read too: a mask that depends on targets would forbid vectors across rows.
    live = (inside if ROWS > 1 else kept) & (col < n)
    v = load_rows(at, live, -float("inf"), x_strides, "evict_last").to(COMPUTE)
    store_softmax_part(v, tops, totals, row * blocks + block, inside)
    if SMOOTH:
        target_logit = tl.load(x_at + axis_offset(label, x_strides[2]), mask=kept, other=0.0).to(COMPUTE)
        plain = weighted_sum(v, logit_shift(target_logit), weight, col, kept, n, 1, COMPUTE)
        tl.store(plains + row * blocks + block, tl.expand_dims(plain, 1), mask=inside)
    if block == 0:
        target_logit = tl.load(x_at + axis_offset(label, x_strides[2]), mask=kept, other=0.0).to(COMPUTE)
        tl.store(mines + row, target_logit, mask=inside)


@jit
def cross_entropy_merge_kernel(
    tops,
    totals,
    plains,
    row_tops,
    row_totals,
    row_plains,
    blocks,
    SMOOTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """row_tops = max(tops), row_totals = sum(totals * exp(tops - row_tops)), row_plains = sum(plains) of one row.

    tops, totals, plains: [rows, blocks], the results: [rows], of COMPUTE; BLOCK >= blocks. ``plains`` are for SMOOTH.
    """
    row = tl.program_id(0) + tl.arange(0, 1)[:, None]
    top, total = _merged_parts(tops, totals, row, row >= 0, blocks, 1, BLOCK)
    tl.store(row_tops + row, top)
    tl.store(row_totals + row, total)
    if SMOOTH:
        tl.store(row_plains + row, _merged_sum(plains, row, row >= 0, blocks, 1, BLOCK))


@jit
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
    pieces,
    groups,
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
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """losses = -log(softmax(x)[target]) and lse = log(sum(exp(x))) from partial results; with GRAD, dx of one of
    ``pieces`` blocks of ROWS rows.

    x, dx: [outer, lanes, n] of f16, bf16, f32 or f64; target: [rows]; losses, lse: [rows], weight, share: [n], counts:
    [parts], class_sum: [1], tops, totals, plains: [rows, blocks], mines: [rows], of COMPUTE; BLOCKS >= blocks. Whole
    formulas, with weights and smoothing: see ``cross_entropy_kernels``.

    The first program of a row stores its loss. Without GRAD there is only that program.
    """
    block = tl.program_id(0) % pieces
    outer, lane = group_lanes(tl.program_id(0) // pieces, groups, lanes, sizes, ROWS)
    inside = lane < lanes
    row = outer.to(tl.int64) * lanes + lane
    label, kept = load_targets(target, row, inside, n, ignore, status, CLAMP)
    top, total = _merged_parts(tops, totals, row, inside, blocks, ROWS, BLOCKS)
    top = tl.where(kept, top, -float("inf"))
    total = tl.where(kept, total, 0.0)
    weighted = 0.0
    if SMOOTH:
        weighted = _merged_sum(plains, row, inside, blocks, ROWS, BLOCKS)
    target_weight, spread, weight_sum = row_weights(weight, class_sum, label, kept, n, smoothing, SMOOTH, COMPUTE)
    if block == 0:
        target_logit = tl.load(mines + row, mask=inside, other=0.0)
        shift = logit_shift(target_logit)
        loss = loss_of(target_logit, top, total, weighted, shift, kept, target_weight, spread, weight_sum, SMOOTH)
        tl.store(losses + row, loss, mask=inside)
        tl.store(lse + row, top + tl.log(total), mask=inside)
    if GRAD:
        scale = row_share(share, counts, parts, target, n, ignore, label, kept, MEAN, CLAMP, COMPUTE, PARTS)
        factor = tl.where(kept, scale * (target_weight + spread * weight_sum) / total, 0.0)
        col = block * BLOCK + tl.arange(0, BLOCK)[None, :]
        at = element_pointers(x, x_strides, outer, sizes, lane, col)
        live = (inside if ROWS > 1 else kept) & (col < n)  # as in ``cross_entropy_partial_kernel``
        v = load_rows(at, live, -float("inf"), x_strides, "evict_first").to(COMPUTE)
        if ROWS > 1:
            v = tl.where(kept, v, -float("inf"))
        weights = load_weights(weight, col, col < n, COMPUTE) if SMOOTH else 0.0
        top = tl.where(kept, top, 0.0)
        g = gradient_of(v, col, label, weights, top, factor, scale * target_weight, scale * spread, SMOOTH)
        to = element_pointers(dx, dx_strides, outer, sizes, lane, col)
        store_rows(to, g.to(dx.dtype.element_ty), inside & (col < n), dx_strides, "")
