"""The formulas of cross-entropy, which the kernels of all its entries share.

For one row of logits x with target t, class weights w, n classes and label smoothing s, with p = softmax(x):

    target_weight = (1 - s) * w[t]    spread = s / n    weight_sum = sum(w)
    lse  = log(sum(exp(x)))
    loss = target_weight * (lse - x[t]) + spread * sum(w * (lse - x))
    dx   = share * ((target_weight + spread * weight_sum) * p - spread * w - target_weight * (c == t)) for class c

``share`` is the factor of the row's loss in the reduced loss. SMOOTH: s > 0; without it spread and weight_sum are not
used. With GRAD the forward also stores the gradient of the reduced loss, in ``dx``, which may be ``x``. Values of rows,
such as ``kept``, ``top`` and ``total`` (maximum, and sum of exp(x - top)), broadcast against elements. All are in
COMPUTE.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import axis_offset, exponential, load_rows, store_rows
from triplan.backends.triton.losses.shared_kernels import class_value


@jit
def row_weights(weight, class_sum, label, kept, n, smoothing, SMOOTH: tl.constexpr, COMPUTE: tl.constexpr):
    """(target_weight, spread, weight_sum) of each row; 0 for rows that are not kept, except weight_sum.

    weight: [n], class_sum: [1], its sum, or None if all weights are 1.
    """
    target_weight = class_value(weight, label, kept, COMPUTE)
    spread = tl.zeros_like(target_weight)
    weight_sum = tl.zeros_like(target_weight)
    if SMOOTH:
        target_weight = target_weight * (1.0 - smoothing)
        weight_sum += n.to(COMPUTE) if class_sum is None else tl.load(class_sum)
        spread = tl.where(kept, smoothing / n.to(COMPUTE), 0.0)
    return target_weight, spread, weight_sum


@jit
def load_weights(weight, col, mask, COMPUTE: tl.constexpr):
    """weight[col]; the scalar 1 if all weights are 1."""
    if weight is None:
        loaded = tl.full((), 1.0, COMPUTE)
    else:
        loaded = tl.load(weight + col, mask=mask, other=0.0)
    return loaded


@jit
def logit_shift(target_logit):
    """What ``weighted_sum`` subtracts from logits while their maximum is not yet known: the target's, or 0 if infinite.

    The loss consists of differences of logits. Sums of the logits themselves would lose digits to what all of them have
    in common.
    """
    return tl.where(tl.abs(target_logit) < float("inf"), target_logit, 0.0)


@jit
def weighted_sum(v, shift, weight, col, kept, n, axis: tl.constexpr, COMPUTE: tl.constexpr):
    """sum(w * (v - shift)) along ``axis``; 0 for rows that are not kept."""
    weights = load_weights(weight, col, col < n, COMPUTE)
    return tl.sum(tl.where(kept & (col < n), (v - shift) * weights, 0.0), axis)


@jit
def loss_of(target_logit, top, total, weighted, shift, kept, target_weight, spread, weight_sum, SMOOTH: tl.constexpr):
    """target_weight * (lse - x[t]) + spread * sum(w * (lse - x)), lse = top + log(total); 0 for rows not kept.

    ``weighted``: ``weighted_sum`` of the row, with ``shift``.
    """
    log_total = tl.log(total)
    loss = target_weight * (log_total - (target_logit - top))
    if SMOOTH:
        loss += spread * (weight_sum * ((top - shift) + log_total) - weighted)
    return tl.where(kept, loss, 0.0)


@jit
def gradient_of(v, col, label, weights, top, factor, target_weight, spread, SMOOTH: tl.constexpr):
    """exp(v - top) * factor - spread * w - target_weight * (col == label): dx of the elements ``v``.

    ``factor``: share * (target_weight + spread * weight_sum) / total; not divided by total if ``top`` is lse.
    ``target_weight`` and ``spread`` are already multiplied by share, and in the backward op by dloss, like ``factor``.
    """
    g = exponential(v - top) * factor
    if SMOOTH:
        g -= spread * weights
    return g - tl.where(col == label, target_weight, 0.0)


@jit
def load_block(x_at, col, strides, n, kept, POLICY: tl.constexpr):
    """Logits at the columns ``col`` of the rows that begin at ``x_at``; -inf past their end and in rows not kept."""
    return load_rows(x_at + axis_offset(col, strides[2]), kept & (col < n), -float("inf"), strides, POLICY)


@jit
def store_block(
    v, dx_at, col, strides, n, inside, top, factor, spread, weight, SMOOTH: tl.constexpr, COMPUTE: tl.constexpr
):
    """dx = exp(v - top) * factor - spread * w: ``gradient_of`` as if no class of the block were the target.

    ``store_target`` corrects the target's: that saves a comparison for each element.
    """
    g = exponential(v.to(COMPUTE) - top) * factor
    if SMOOTH:
        g -= spread * load_weights(weight, col, col < n, COMPUTE)
    to = dx_at + axis_offset(col, strides[2])
    store_rows(to, g.to(dx_at.dtype.element_ty), inside & (col < n), strides, "evict_first")


@jit
def store_target(
    target_logit, dx_at, label, stride, kept, top, factor, target_weight, spread, weight, SMOOTH: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """dx[label] = ``gradient_of`` the target's logit, after a barrier: another thread stored its own value there."""
    tl.debug_barrier()
    weights = load_weights(weight, label, kept, COMPUTE) if SMOOTH else 0.0
    g = gradient_of(target_logit, label, label, weights, top, factor, target_weight, spread, SMOOTH)
    tl.store(dx_at + axis_offset(label, stride), g.to(dx_at.dtype.element_ty), mask=kept)
