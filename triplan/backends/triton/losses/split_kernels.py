"""cross_entropy, entry ``split``: each row divided among ``blocks`` programs, in two launches.

The ``partial`` kernel reduces each block of a row, the ``finish`` kernel merges the partial results of the row. Every
program merges them in the same order, so all get the same bits.
Strides and ``blocks``: see ``common/rows_kernels``; targets and reductions: see ``shared_kernels``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import (
    axis_offset,
    element_pointers,
    merge_softmax_parts,
    row_pointers,
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
    """tops = max(x), totals = sum(exp(x - top)), plains = sum(w * (x - shift)) of one block; mines = x[target].

    x: [outer, lanes, n] of f16, bf16, f32 or f64; target: [rows]; weight: [n]; tops, totals, plains: [rows, blocks],
    mines: [rows], of COMPUTE. ``plains`` are for SMOOTH alone.
    """
    row = (tl.program_id(0) // blocks).to(tl.int64) + tl.arange(0, 1)
    block = tl.program_id(0) % blocks
    label, kept = load_targets(target, row, row >= 0, n, ignore, None, CLAMP)
    x_at = row_pointers(x, x_strides, row // lanes, sizes, row % lanes)
    col = block * BLOCK + tl.arange(0, BLOCK)
    live = kept & (col < n)
    v = tl.load(x_at + axis_offset(col, x_strides[2]), mask=live, other=-float("inf"), eviction_policy="evict_last")
    v = v.to(COMPUTE)
    store_softmax_part(v, tops, totals, tl.program_id(0) + tl.arange(0, 1), row >= 0)
    if SMOOTH:
        target_logit = tl.load(x_at + axis_offset(label, x_strides[2]), mask=kept, other=0.0).to(COMPUTE)
        tl.store(
            plains + tl.program_id(0),
            weighted_sum(v, logit_shift(target_logit), weight, col, kept, n, 0, COMPUTE),
        )
    if block == 0:
        tl.store(mines + row, tl.load(x_at + axis_offset(label, x_strides[2]), mask=kept, other=0.0).to(COMPUTE))


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
    """losses = -log(softmax(x)[target]) and lse = log(sum(exp(x))) from partial results; with GRAD, dx of one block.

    x, dx: [outer, lanes, n] of f16, bf16, f32 or f64; target: [rows]; losses, lse: [rows], weight, share: [n], counts:
    [parts], class_sum: [1], tops, totals, plains: [rows, blocks], mines: [rows], of COMPUTE; BLOCKS >= blocks. Whole
    formulas, with weights and smoothing: see ``cross_entropy_kernels``.

    The first program of a row stores its loss. Without GRAD there is only that program.
    """
    if GRAD:
        row = (tl.program_id(0) // blocks).to(tl.int64) + tl.arange(0, 1)
        block = tl.program_id(0) % blocks
    else:
        row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
        block = 0
    label, kept = load_targets(target, row, row >= 0, n, ignore, status, CLAMP)
    top, total = merge_softmax_parts(tops, totals, row, row >= 0, blocks, BLOCKS)
    weighted = 0.0
    if SMOOTH:
        part = tl.arange(0, BLOCKS)
        weighted = tl.sum(tl.load(plains + row * blocks + part, mask=part < blocks, other=0.0), 0)
    target_weight, spread, weight_sum = row_weights(weight, class_sum, label, kept, n, smoothing, SMOOTH, COMPUTE)
    if block == 0:
        target_logit = tl.load(mines + row)
        shift = logit_shift(target_logit)
        loss = loss_of(target_logit, top, total, weighted, shift, kept, target_weight, spread, weight_sum, SMOOTH)
        tl.store(losses + row, loss)
        tl.store(lse + row, top + tl.log(total))
    if GRAD:
        scale = row_share(share, counts, parts, target, n, ignore, label, kept, MEAN, CLAMP, COMPUTE, PARTS)
        factor = tl.where(kept, scale * (target_weight + spread * weight_sum) / total, 0.0)
        col = block * BLOCK + tl.arange(0, BLOCK)
        x_at = row_pointers(x, x_strides, row // lanes, sizes, row % lanes)
        v = tl.load(
            x_at + axis_offset(col, x_strides[2]),
            mask=kept & (col < n),
            other=-float("inf"),
            eviction_policy="evict_first",
        ).to(COMPUTE)
        weights = load_weights(weight, col, col < n, COMPUTE) if SMOOTH else 0.0
        top = tl.where(kept, top, 0.0)
        g = gradient_of(v, col, label, weights, top, factor, scale * target_weight, scale * spread, SMOOTH)
        to = element_pointers(dx, dx_strides, row // lanes, sizes, row % lanes, col)
        tl.store(to, g.to(dx.dtype.element_ty), mask=col < n)
