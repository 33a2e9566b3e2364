"""cross_entropy, as torch has it, and its mean over bytes.

Where autograd records an eager call of cross_entropy with a reduced loss, the forward also writes the gradient of the
logits, and the backward only scales it. Compiled graphs and reduction ``"none"`` keep the logits and each row's
logsumexp instead, and the backward computes the softmax again: a graph that is traced once cannot tell whether it will
be retained. f16 does so too, where a gradient divided by the number of rows underflows before a loss scale can save it.

Second derivatives are plain torch: with ``_shares`` of the rows' classes, the loss is
``sum(shares * (logsumexp(x) - x))``, and its gradient ``sum(shares) * softmax(x) - shares``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import Function

from triplan.errors import shown
from triplan.facade import (
    CrossEntropyBackwardPlan,
    CrossEntropyPlan,
    ScaleGradientPlan,
)
from triplan.functional._autocast import widened
from triplan.functional._ops import Differentiable, Recorded
from triplan.functional._plans import run
from triplan.functional._replay.recording import is_plain, setting, unwatched
from triplan.functional._replay.replay import replayed
from triplan.functional._sharding import is_dtensor
from triplan.functional._watching import needs_grad
from triplan.functional.losses.divided import of_dtensor
from triplan.functional.losses.shared import (
    HOW,
    TABLES,
    How,
    checked,
    compute_dtype,
    legacy,
    loss_axes,
    loss_backward_axes,
    new_result,
    run_loss,
    shaped,
)

__all__ = ["cross_entropy"]

Tensor = torch.Tensor
#: Whether the graph outlives the backward pass under way. In a torch without this, the gradient is always copied.
_retained: Any = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


@replayed
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    bytes: Tensor | None = None,
    check_indices: bool = False,
) -> Tensor:
    """Cross-entropy of logits with class indices or probabilities (torch.nn.functional.cross_entropy).

    ``input``: f16, bf16, f32 or f64, of shape (C), (N, C) or (N, C, ...) and any strides; under autocast it is
    converted to f32. ``target``: u8, i32 or i64, of ``input``'s shape without C; rows of ``ignore_index`` are left out.
    ``weight``: one for each class, not negative. ``reduction``: ``"mean"`` (over the targets' weights), ``"sum"``,
    ``"none"``, or ``"byte_mean"``: ``sum(loss * bytes[target]) / sum(bytes[target])``, with one of ``bytes`` for each
    class; the deprecated ``size_average`` and ``reduce`` override it. Computed in f32, f64 for f64.

    A floating-point ``target`` of ``input``'s shape holds class probabilities, in which the loss is differentiable too.
    It is computed in plain torch, without a plan; a mean is over the rows, and no row is ignored.

    Returns a 0-d tensor, or with ``"none"`` one of ``target``'s shape, in ``input``'s dtype. Differentiable in
    ``input``, any number of times. Infinities and NaN are as in torch, but the gradient of an ignored row is always 0.
    Raises ``IndexError`` for a target outside the classes on the CPU; on CUDA such a row is ignored, or with
    ``check_indices`` the call synchronises and raises. ``RuntimeError`` or ``ValueError`` for arguments that do not
    fit, and for a ``weight`` or ``bytes`` that requires grad.
    """
    (input,) = widened("nll_loss", input)  # in which torch's ends
    reduction = legacy(reduction, size_average, reduce)
    if target.is_floating_point():
        return _with_probabilities(input, target, weight, reduction, label_smoothing, bytes)
    how = How(reduction, ignore_index, label_smoothing, check_indices)
    given = checked("cross_entropy", input, target, weight, bytes, how)
    if is_dtensor(input) and not torch.compiler.is_compiling() and bytes is None:
        return shaped(of_dtensor("cross_entropy", *given[:3], how), input, target, how).to(input.dtype)
    if reduction != "none" and input.dtype != torch.float16 and needs_grad((input,)) and is_plain(*given):
        loss: Tensor = _with_gradient(*given, how)[0]
        return loss
    return shaped(_cross_entropy(*given, *how)[0], input, target, how)


def _with_probabilities(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: str, smoothing: float, bytes: Tensor | None
) -> Tensor:
    if reduction not in ("none", "sum", "mean") or bytes is not None:
        raise ValueError(f"cross_entropy(): reduction {shown(reduction)} is not supported with class probabilities")
    if not 0 <= smoothing <= 1:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {shown(smoothing)}")
    at = 1 if input.dim() > 1 else 0
    classes = input.size(at) if input.dim() else 0
    if input.dim() == 0 or target.shape != input.shape or (weight is not None and tuple(weight.shape) != (classes,)):
        raise RuntimeError("cross_entropy(): class probabilities have input's shape, and weight one element per class")
    logs = torch.log_softmax(input, at, compute_dtype(input))
    shares = target.to(logs.dtype)
    if smoothing:
        shares = shares * (1 - smoothing) + smoothing / classes
    if weight is not None:
        shares = shares * weight.to(logs.dtype).reshape(classes, *(1,) * (input.dim() - at - 1))
    losses = -(shares * logs).sum(at)
    if reduction != "none":
        losses = losses.sum()
    if reduction == "mean":
        losses = losses / (math.prod(input.shape) / classes)
    return losses.to(input.dtype)


# --- registered ops ---


def _forward_fake(x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, *how: Any) -> Any:
    return new_result(x, target, How(*how).reduction), x.new_empty(target.shape, dtype=compute_dtype(x))


def _forward(
    x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, how: How, dx: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    out, lse = _forward_fake(x, target, weight, bytes, *how)
    reduced = how.reduction != "none"
    losses = torch.empty_like(lse) if reduced else out
    operands = {"x": x, "target": target, "losses": losses, "lse": lse, "loss": out if reduced else None}
    run_loss(CrossEntropyPlan, how, {**operands, "dx": dx, "weight": weight, "bytes": bytes}, gradient=dx is not None)
    return out, lse


def _forward_kernel(x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, *how: Any) -> Any:
    return _forward(x, target, weight, bytes, How(*how))


def _backward_fake(dloss: Tensor, x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


def _backward_kernel(
    dloss: Tensor, x: Tensor, target: Tensor, lse: Tensor, weight: Tensor | None, bytes: Tensor | None, *how: Any
) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    operands = {"dloss": dloss.contiguous(), "x": x, "target": target, "lse": lse, "dx": dx}
    run_loss(CrossEntropyBackwardPlan, How(*how), {**operands, "weight": weight, "bytes": bytes})
    return dx


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, target, weight, counts, *ctx.how = inputs
    _, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(x, target, lse, weight, counts)


def _grad(ctx: Any, dloss: Tensor, _: Any) -> Any:
    # The forward has checked the targets.
    how = How(*ctx.how)._replace(check_indices=False)
    return _cross_entropy_backward(dloss, *ctx.saved_tensors, *how), *(None,) * (len(ctx.how) + 3)


def _backward_setup(ctx: Any, inputs: Any, output: Any) -> None:
    dloss, x, target, _, weight, counts, *ctx.how = inputs
    ctx.save_for_backward(dloss, x, target, weight, counts)


def _backward_grad(ctx: Any, of_dx: Tensor) -> Any:
    dloss, x, target, weight, counts = ctx.saved_tensors
    how = How(*ctx.how)
    shares = _shares(x.size(1), target, weight, counts, how, compute_dtype(x))
    whole, p = _softmax(x, shares)
    v = of_dx.to(p.dtype)
    to_dloss = v * (whole * p - shares)
    to_dloss = to_dloss.sum() if how.reduction != "none" else to_dloss.sum(1)
    to_x = _by_class(dloss, p) * whole * p * (v - (v * p).sum(1, keepdim=True))
    return to_dloss.to(dloss.dtype), to_x.to(x.dtype), *(None,) * (len(ctx.how) + 4)


_cross_entropy = Recorded(
    "cross_entropy",
    f"(Tensor x, Tensor target, {TABLES}, {HOW}) -> (Tensor, Tensor)",
    _forward_kernel,
    _forward_fake,
    axes=loss_axes(2),
    setup=_setup,
    backward=_grad,
)
_cross_entropy_backward = Recorded(
    "cross_entropy_backward",
    f"(Tensor dloss, Tensor x, Tensor target, Tensor lse, {TABLES}, {HOW}) -> Tensor",
    _backward_kernel,
    _backward_fake,
    axes=loss_backward_axes(lse=True),
    setup=_backward_setup,
    backward=_backward_grad,
)


# --- second derivatives of cross_entropy, in plain torch ---


def _shares(
    classes: int, target: Tensor, weight: Tensor | None, bytes: Tensor | None, how: How, dtype: torch.dtype
) -> Tensor:
    """The factor of ``logsumexp(x) - x`` of each class in the (reduced) loss: of x's shape, 0 in ignored rows."""
    kept = (target >= 0) & (target < classes) & (target != how.ignore_index)
    at = torch.where(kept, target, 0).long()
    table = torch.ones(classes, dtype=dtype, device=target.device) if weight is None else weight
    of_row = torch.where(kept, table[at], 0)
    factor = kept.to(dtype)
    if how.reduction == "mean":
        factor = factor / of_row.sum()
    elif bytes is not None:
        counts = torch.where(kept, bytes[at], 0)
        factor = counts / counts.sum()
    factor, at, of_row = (t.unsqueeze(1) for t in (torch.where(kept, factor, 0), at, of_row))
    columns = table.reshape(classes, *(1,) * (target.dim() - 1))
    spread = factor * columns * (how.label_smoothing / max(classes, 1))
    return spread + torch.where(_hot(classes, at), factor * of_row * (1 - how.label_smoothing), 0)


def _hot(classes: int, at: Tensor) -> Tensor:
    """One-hot masks of the classes ``at``, which has an axis of size 1 for the classes."""
    return at == torch.arange(classes, device=at.device).reshape(classes, *(1,) * (at.dim() - 2))


def _softmax(x: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of each row's shares, and its softmax. Rows whose shares are 0 may hold anything, NaN too."""
    whole = shares.sum(1, keepdim=True)
    return whole, torch.softmax(torch.where(whole != 0, x.to(shares.dtype), 0), 1)


def _by_class(dloss: Tensor, p: Tensor) -> Tensor:
    return dloss.to(p.dtype) if dloss.dim() == 0 else dloss.to(p.dtype).unsqueeze(1)


class _StandIn(Function):
    """``values`` in place of ``x``'s, of which only the shape is used: the gradient of ``values`` goes to ``x``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.to(ctx.dtype), None


# --- the forward writes the gradient ---


def _with_gradient_kernel(
    x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, how: How
) -> tuple[Tensor, Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out, _ = _forward(x, target, weight, bytes, how, dx)
    return out, dx


def _with_gradient_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, target, weight, bytes, ctx.how = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], target, weight, bytes)


def _with_gradient_grad(ctx: Any, dloss: Tensor | None, direct: Tensor | None) -> Any:
    result = direct
    if dloss is not None:
        scaled = _scaled(ctx, dloss)
        result = scaled if direct is None else scaled + direct
    return result, None, None, None, None


def _scaled(ctx: Any, dloss: Tensor) -> Tensor:
    dx: Tensor
    like_x, target, weight, counts = ctx.saved_tensors
    dx = like_x.detach()
    if torch.is_grad_enabled():
        shares = _shares(dx.size(1), target, weight, counts, ctx.how, compute_dtype(dx))
        whole = shares.sum(1, keepdim=True)
        p = (dx + shares) / whole
        # The target's p follows from the others: its gradient is near -1, where a narrow element has few digits.
        p = torch.where(_hot(dx.size(1), target.unsqueeze(1)), p + (1 - p.sum(1, keepdim=True)), p)
        logits = torch.where(whole != 0, p.clamp(min=0).log(), 0)
        stand_in: Any = _StandIn.apply
        whole, p = _softmax(stand_in(like_x, logits), shares)
        return (dloss.to(p.dtype) * (whole * p - shares)).to(dx.dtype)
    if not unwatched((dloss,)):  # batched gradients, for example
        return dloss * dx
    kept = setting(_retained)
    result = torch.empty_like(dx) if kept else dx
    operands = {"dloss": dloss.reshape(1), "dx": result, **({"unscaled": dx} if kept else {})}
    run(ScaleGradientPlan, operands, in_place=not kept)
    return result


#: The forward writes the gradient; the backward scales it.
#:
#: If the graph is not retained, the gradient is scaled in place and returned; the kernel writes nothing if it finds a
#: scale of 1 on the device. If the graph is retained, a scaled copy is returned. So a gradient is never scaled twice,
#: and the host never waits for the device.
#:
#: A backward that is itself recorded needs the logits, which are not kept: up to a constant of each row they follow
#: from the gradient. As a result of this op it also connects them to ``x``.
_with_gradient = Differentiable(
    "cross_entropy", _with_gradient_kernel, setup=_with_gradient_setup, backward=_with_gradient_grad
)
