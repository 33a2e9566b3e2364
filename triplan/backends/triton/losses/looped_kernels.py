"""cross_entropy, entry ``looped``: rows of any length, read block by block; twice for a gradient.

Strides and ``blocks``: see ``common/rows_kernels``; targets and reductions: see ``shared_kernels``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import accumulate_softmax, axis_offset, merge_softmax, row_pointers
from triplan.backends.triton.losses.cross_entropy_kernels import (
    load_block,
    logit_shift,
    loss_of,
    row_weights,
    store_block,
    store_target,
    weighted_sum,
)
from triplan.backends.triton.losses.shared_kernels import load_targets, row_share


@jit
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
    APART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """losses = -log(softmax(x)[target]) and lse = log(sum(exp(x))) of each row; with GRAD, dx, the loss's gradient.

    x, dx: [outer, lanes, n] of f16, bf16, f32 or f64; target: [rows]; losses, lse: [rows], weight, share: [n], counts:
    [parts], class_sum: [1], of COMPUTE; status: [1] of i64. A program walks along ROWS rows by blocks [COLS, VEC]. The
    whole formulas, with weights and smoothing, are in ``cross_entropy_kernels``.

    Of each block a thread has VEC neighbours, which it loads at once; or where rows may begin anywhere (APART), VEC
    elements that are COLS apart, so that consecutive threads load consecutive elements.

    The first pass accumulates by ``accumulate_softmax``. That takes one more exponential per VEC elements, and threads
    exchange nothing within the loop, so many loads are in flight. The second pass, for gradients, runs from a row's
    end to its start: what was read last is still in the caches.
    """
    WIDTH: tl.constexpr = COLS * VEC
    POLICY: tl.constexpr = "evict_last" if GRAD else "evict_first"
    outer = tl.program_id(0) // blocks
    lane = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = lane < lanes
    row = outer.to(tl.int64) * lanes + lane
    label, kept = load_targets(target, row, inside, n, ignore, status, CLAMP)
    x_at = row_pointers(x, x_strides, outer, sizes, lane)
    target_logit = tl.load(x_at + axis_offset(label, x_strides[2]), mask=kept, other=0.0).to(COMPUTE)
    target_weight, spread, weight_sum = row_weights(weight, class_sum, label, kept, n, smoothing, SMOOTH, COMPUTE)
    x_at = x_at[:, None, None]
    read = kept[:, None, None]
    if APART:
        place = (tl.arange(0, COLS)[:, None] + tl.arange(0, VEC)[None, :] * COLS)[None, :, :]
    else:
        place = (tl.arange(0, COLS)[:, None] * VEC + tl.arange(0, VEC)[None, :])[None, :, :]
    steps = tl.cdiv(n, WIDTH)
    any_kept = tl.max(kept.to(tl.int32), 0) > 0
    top = tl.full((ROWS, COLS), -float("inf"), COMPUTE)
    total = tl.zeros((ROWS, COLS), COMPUTE)
    weighted = tl.zeros((ROWS, COLS), COMPUTE)
    shift = logit_shift(target_logit)
    for start in range(0, tl.where(any_kept, steps, 0) * WIDTH, WIDTH):
        col = start + place
        v = load_block(x_at, col, x_strides, n, read, POLICY).to(COMPUTE)
        top, total = accumulate_softmax(v, top, total, False)
        if SMOOTH:
            weighted += weighted_sum(v, shift[:, None, None], weight, col, read, n, 2, COMPUTE)
    row_top, row_total = merge_softmax(top, total, 1, False)
    row_weighted = tl.sum(weighted, 1)
    tl.store(
        losses + row,
        loss_of(target_logit, row_top, row_total, row_weighted, shift, kept, target_weight, spread, weight_sum, SMOOTH),
        mask=inside,
    )
    tl.store(lse + row, row_top + tl.log(row_total), mask=inside)
    if GRAD:
        # If dx is x: past this barrier every thread has loaded its target's logit, which may now be overwritten.
        tl.debug_barrier()
        scale = row_share(share, counts, parts, target, n, ignore, label, kept, MEAN, CLAMP, COMPUTE, PARTS)
        factor = tl.where(kept, scale * (target_weight + spread * weight_sum) / row_total, 0.0)
        row_top = tl.where(kept, row_top, 0.0)
        target_weight = scale * target_weight
        spread = scale * spread
        dx_at = row_pointers(dx, dx_strides, outer, sizes, lane)
        to = dx_at[:, None, None]
        live = inside[:, None, None]
        t = row_top[:, None, None]
        f = factor[:, None, None]
        s = spread[:, None, None]
        for step in range(steps):
            col = (steps - 1 - step) * WIDTH + place
            v = load_block(x_at, col, x_strides, n, read, "evict_first")
            store_block(v, to, col, dx_strides, n, live, t, f, s, weight, SMOOTH, COMPUTE)
        store_target(
            target_logit, dx_at, label, dx_strides[2], kept, row_top, factor, target_weight, spread, weight, SMOOTH,
            COMPUTE,
        )  # fmt: skip
