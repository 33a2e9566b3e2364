"""The formulas of cross-entropy, which its entries share.

With GRAD the gradient of the reduced loss is written as well: to ``dx``,
which may be ``x``. For one row with softmax p, target t and weights w, smoothed by s, it is

    share * ((A * p) - (1 - s) * w[t] * (c == t) - s / C * w[c]),   A = (1 - s) * w[t] + s / C * sum(w)

where ``share`` is what the row's loss is multiplied by in the reduced one. Rows that are not kept are not read.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.rows_kernels import axis_offset, exponential
from triplan.backends.triton.losses.shared_kernels import of_class


@triton.jit
def parts_of(weight, class_sum, at, kept, n, smoothing, SMOOTH: tl.constexpr, COMPUTE: tl.constexpr):
    """By row: (1 - s) * w[t]; s / C; sum(w)."""
    picked = of_class(weight, at, kept, COMPUTE)
    spread = tl.zeros_like(picked)
    whole = tl.zeros_like(picked)
    if SMOOTH:
        picked = picked * (1.0 - smoothing)
        whole += n.to(COMPUTE) if class_sum is None else tl.load(class_sum)
        spread = tl.where(kept, smoothing / n.to(COMPUTE), 0.0)
    return picked, spread, whole


@triton.jit
def weights_at(weight, col, mask, COMPUTE: tl.constexpr):
    """Weights of classes; where all are 1, the number."""
    if weight is None:
        found = tl.full((), 1.0, COMPUTE)
    else:
        found = tl.load(weight + col, mask=mask, other=0.0)
    return found


@triton.jit
def shift_of(mine):
    """What is taken off logits before they are weighted and added up, where the maximum is not yet known: the target's,
    if finite. The loss is of differences: sums of the logits themselves would lose what they have in common."""
    return tl.where(tl.abs(mine) < float("inf"), mine, 0.0)


@triton.jit
def plain_of(v, shift, weight, col, kept, n, axis: tl.constexpr, COMPUTE: tl.constexpr):
    """The sum of weighted logits, less ``shift`` each."""
    weights = weights_at(weight, col, col < n, COMPUTE)
    return tl.sum(tl.where(kept & (col < n), (v - shift) * weights, 0.0), axis)


@triton.jit
def loss_of(v, top, total, plain, shift, kept, picked, spread, whole, SMOOTH: tl.constexpr):
    """A row's loss from its target's logit, maximum, sum of exponentials, and what ``plain_of`` gave."""
    log_total = tl.log(total)
    loss = picked * (log_total - (v - top))
    if SMOOTH:
        loss += spread * (whole * ((top - shift) + log_total) - plain)
    return tl.where(kept, loss, 0.0)


@triton.jit
def gradient_of(v, col, at, weights, top, factor, picked, spread, SMOOTH: tl.constexpr):
    """An element's gradient; ``factor``, ``picked`` and ``spread`` have the row's share in them."""
    g = exponential(v - top) * factor
    if SMOOTH:
        g -= spread * weights
    return g - tl.where(col == at, picked, 0.0)


@triton.jit
def read_block(from_row, col, step, n, kept, policy: tl.constexpr):
    """Logits at the columns ``col``; -inf beyond their number, and in rows that are not kept."""
    return tl.load(
        from_row + axis_offset(col, step), mask=kept & (col < n), other=-float("inf"), eviction_policy=policy
    )


@triton.jit
def write_block(
    v, to_row, col, step, n, inside, top, factor, spread, weight, SMOOTH: tl.constexpr, COMPUTE: tl.constexpr
):
    """The gradients of a block, as if none of it were a target."""
    g = exponential(v.to(COMPUTE) - top) * factor
    if SMOOTH:
        g -= spread * weights_at(weight, col, col < n, COMPUTE)
    to = to_row + axis_offset(col, step)
    tl.store(to, g.to(to_row.dtype.element_ty), mask=inside & (col < n), eviction_policy="evict_first")


@triton.jit
def write_target(
    mine, to_row, at, step, kept, top, factor, picked, spread, weight, SMOOTH: tl.constexpr, COMPUTE: tl.constexpr
):
    """The gradient of the target, over what another thread wrote there."""
    tl.debug_barrier()
    weights = weights_at(weight, at, kept, COMPUTE) if SMOOTH else 0.0
    g = gradient_of(mine, at, at, weights, top, factor, picked, spread, SMOOTH)
    tl.store(to_row + axis_offset(at, step), g.to(to_row.dtype.element_ty), mask=kept)
