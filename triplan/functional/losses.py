"""cross_entropy and nll_loss, as torch has them, and their mean over bytes.

Where autograd records an eager call of cross_entropy with a reduced loss, the forward also writes the gradient of the
logits, and the backward only scales it. Compiled graphs and reduction ``"none"`` keep the logits and each row's
logsumexp instead, and the backward computes the softmax again: a graph that is traced once cannot tell whether it will
be retained. f16 does so too, where a gradient divided by the number of rows underflows before a loss scale can save it.

Second derivatives are plain torch: with ``_shares`` of the rows' classes, the loss is
``sum(shares * (logsumexp(x) - x))``, and its gradient ``sum(shares) * softmax(x) - shares``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, get_args

import torch
from torch.autograd.function import Function

from triplan.descriptors.fields import MAX_RANK
from triplan.descriptors.losses import Reduction
from triplan.facade import (
    CrossEntropyBackwardPlan,
    CrossEntropyPlan,
    NllLossBackwardPlan,
    NllLossPlan,
    ScaleGradientPlan,
)
from triplan.functional._autocast import widened, without
from triplan.functional._ops import Differentiable, Recorded
from triplan.functional._plans import run
from triplan.functional._replay.recording import recording, setting
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import check_index_dtype, check_same_device, require
from triplan.functional._watching import needs_grad, nothing_watches, transformed
from triplan.sku import ElementKind

__all__ = ["cross_entropy", "nll_loss"]

Tensor = torch.Tensor
_REDUCTIONS = get_args(Reduction)
#: Whether the graph outlives the backward pass under way. In a torch without this, the gradient is always copied.
_retained: Any = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


class _How(NamedTuple):
    """The options of a loss: the last arguments of every registered op, in order."""

    reduction: str
    ignore_index: int
    label_smoothing: float
    check_indices: bool


def _checked(
    name: str, input: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, how: _How
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The tensors: ``input`` with a batch axis and at most ``MAX_RANK`` axes, the tables in the compute element."""
    if not input.is_floating_point():
        raise RuntimeError(f"{name}(): expected a floating-point tensor, but got {input.dtype}")
    if how.reduction not in _REDUCTIONS:
        raise ValueError(f"{how.reduction} is not a valid value for reduction; valid are {', '.join(_REDUCTIONS)}")
    if not 0 <= how.label_smoothing <= 1:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {how.label_smoothing}")
    if (bytes is not None) != (how.reduction == "byte_mean"):
        raise ValueError(f"{name}(): bytes are given for reduction 'byte_mean', and for no other")
    if input.dim() == 0:
        raise RuntimeError(f"{name}(): expected an input of at least 1 dimension, but got a scalar")
    if target.is_floating_point():
        raise RuntimeError(f"{name}(): expected class indices as target, not {target.dtype}")
    target = target.int() if target.dtype == torch.uint8 else target
    check_index_dtype(name, target)
    check_same_device(name, input, target, *(t for t in (weight, bytes) if t is not None))
    wanted = (*input.shape[:1], *input.shape[2:]) if input.dim() > 1 else ()
    require(
        target.dim() == len(wanted) and all(n == m for n, m in zip(target.shape, wanted, strict=True)),
        lambda: f"{name}(): Expected target of size {list(wanted)}, but got {list(target.shape)}",
    )
    classes = input.size(1 if input.dim() > 1 else 0)
    for what, table in (("weight", weight), ("bytes", bytes)):
        if table is None:
            continue
        if torch.is_grad_enabled() and table.requires_grad:
            raise RuntimeError(
                f"The function '{name}' is not differentiable with respect to argument '{what}'. This input cannot "
                "have requires_grad True."
            )
        require(
            table.dim() == 1 and table.size(0) == classes,
            lambda what=what, table=table: (  # type: ignore[misc]
                f"{name}(): {what} should be defined for all {classes} classes or not at all, but got a tensor of "
                f"shape {list(table.shape)}"
            ),
        )
    if input.dim() == 1:
        input, target = input.unsqueeze(0), target.unsqueeze(0)
    if input.dim() > MAX_RANK:
        input, target = input.flatten(2), target.flatten(1)
    compute = _compute_dtype(input)
    weight, bytes = (None if t is None else t.detach().to(compute).contiguous() for t in (weight, bytes))
    return input, target.contiguous(), weight, bytes


def _shaped(out: Tensor, input: Tensor, target: Tensor, how: _How) -> Tensor:
    """The losses of rows in ``input``'s dtype and ``target``'s shape; a reduced loss is returned unchanged."""
    return out if how.reduction != "none" else out.reshape(target.shape).to(input.dtype)


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
    (input,) = widened(input)
    reduction = _legacy(reduction, size_average, reduce)
    if target.is_floating_point():
        return _with_probabilities(input, target, weight, reduction, label_smoothing, bytes)
    how = _How(reduction, ignore_index, label_smoothing, check_indices)
    given = _checked("cross_entropy", input, target, weight, bytes, how)
    with without(input):
        if (
            reduction != "none"
            and not torch.compiler.is_compiling()
            and input.dtype != torch.float16
            and needs_grad((input,))
            and not transformed()
            and nothing_watches(given, modes=recording() is not None)
        ):
            loss: Tensor = _with_gradient(*given, how)[0]
            return loss
    return _shaped(_cross_entropy(*given, *how)[0], input, target, how)


@replayed
def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    *,
    bytes: Tensor | None = None,
    check_indices: bool = False,
) -> Tensor:
    """Negative log-likelihood of log-probabilities with class indices (torch.nn.functional.nll_loss): as
    ``cross_entropy``, of an ``input`` that log_softmax gave.
    """
    (input,) = widened(input)
    how = _How(_legacy(reduction, size_average, reduce), ignore_index, 0.0, check_indices)
    given = _checked("nll_loss", input, target, weight, bytes, how)
    return _shaped(_nll_loss(*given, *how), input, target, how)


def _legacy(reduction: str, size_average: bool | None, reduce: bool | None) -> str:
    """``reduction``, unless one of torch's deprecated arguments is given."""
    if size_average is None and reduce is None:
        return reduction
    return "none" if reduce is False else "sum" if size_average is False else "mean"


def _with_probabilities(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: str, smoothing: float, bytes: Tensor | None
) -> Tensor:
    if reduction not in ("none", "sum", "mean") or bytes is not None:
        raise ValueError(f"cross_entropy(): reduction {reduction!r} is not supported with class probabilities")
    if not 0 <= smoothing <= 1:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {smoothing}")
    at = 1 if input.dim() > 1 else 0
    classes = input.size(at) if input.dim() else 0
    if input.dim() == 0 or target.shape != input.shape or (weight is not None and tuple(weight.shape) != (classes,)):
        raise RuntimeError("cross_entropy(): class probabilities have input's shape, and weight one element per class")
    logs = torch.log_softmax(input, at, _compute_dtype(input))
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


# --- registered ops, of inputs with a batch axis ---

_HOW = "str reduction, SymInt ignore_index, float label_smoothing, bool check_indices"
_TABLES = "Tensor? weight, Tensor? bytes"


def _compute_dtype(t: Tensor) -> torch.dtype:
    return ElementKind.of(t.dtype).compute.torch


def _run(plan: Any, how: _How, operands: dict[str, Tensor | None], **options: Any) -> None:
    """Run ``plan`` with the operands that are present; 0-d tensors become vectors of one element."""
    given = {name: t.reshape(1) if t.dim() == 0 else t for name, t in operands.items() if t is not None}
    if "label_smoothing" in plan.descriptor_type.model_fields:
        options["label_smoothing"] = how.label_smoothing
    run(
        plan,
        given,
        check_indices=how.check_indices,
        class_axis=1,
        reduction=how.reduction,
        ignore_index=how.ignore_index,
        **options,
    )


def _result(x: Tensor, target: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return x.new_empty(target.shape, dtype=_compute_dtype(x))
    return x.new_empty(())


# --- cross_entropy ---


def _forward_fake(x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, *how: Any) -> Any:
    return _result(x, target, _How(*how).reduction), x.new_empty(target.shape, dtype=_compute_dtype(x))


def _forward(
    x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, how: _How, dx: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    out, lse = _forward_fake(x, target, weight, bytes, *how)
    reduced = how.reduction != "none"
    losses = torch.empty_like(lse) if reduced else out
    operands = {"x": x, "target": target, "losses": losses, "lse": lse, "loss": out if reduced else None}
    _run(CrossEntropyPlan, how, {**operands, "dx": dx, "weight": weight, "bytes": bytes}, gradient=dx is not None)
    return out, lse


def _forward_kernel(x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, *how: Any) -> Any:
    return _forward(x, target, weight, bytes, _How(*how))


def _backward_fake(dloss: Tensor, x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


def _backward_kernel(
    dloss: Tensor, x: Tensor, target: Tensor, lse: Tensor, weight: Tensor | None, bytes: Tensor | None, *how: Any
) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    operands = {"dloss": dloss.contiguous(), "x": x, "target": target, "lse": lse, "dx": dx}
    _run(CrossEntropyBackwardPlan, _How(*how), {**operands, "weight": weight, "bytes": bytes})
    return dx


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, target, weight, counts, *ctx.how = inputs
    _, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(x, target, lse, weight, counts)


def _grad(ctx: Any, dloss: Tensor, _: Any) -> Any:
    # The forward has checked the targets.
    how = _How(*ctx.how)._replace(check_indices=False)
    return _cross_entropy_backward(dloss, *ctx.saved_tensors, *how), *(None,) * (len(ctx.how) + 3)


def _backward_setup(ctx: Any, inputs: Any, output: Any) -> None:
    dloss, x, target, _, weight, counts, *ctx.how = inputs
    ctx.save_for_backward(dloss, x, target, weight, counts)


def _backward_grad(ctx: Any, of_dx: Tensor) -> Any:
    dloss, x, target, weight, counts = ctx.saved_tensors
    how = _How(*ctx.how)
    shares = _shares(x.size(1), target, weight, counts, how, _compute_dtype(x))
    whole, p = _softmax(x, shares)
    v = of_dx.to(p.dtype)
    to_dloss = v * (whole * p - shares)
    to_dloss = to_dloss.sum() if how.reduction != "none" else to_dloss.sum(1)
    to_x = _by_class(dloss, p) * whole * p * (v - (v * p).sum(1, keepdim=True))
    return to_dloss.to(dloss.dtype), to_x.to(x.dtype), *(None,) * (len(ctx.how) + 4)


_cross_entropy = Recorded(
    "cross_entropy",
    f"(Tensor x, Tensor target, {_TABLES}, {_HOW}) -> (Tensor, Tensor)",
    _forward_kernel,
    _forward_fake,
    setup=_setup,
    backward=_grad,
)
_cross_entropy_backward = Recorded(
    "cross_entropy_backward",
    f"(Tensor dloss, Tensor x, Tensor target, Tensor lse, {_TABLES}, {_HOW}) -> Tensor",
    _backward_kernel,
    _backward_fake,
    setup=_backward_setup,
    backward=_backward_grad,
)


# --- second derivatives of cross_entropy, in plain torch ---


def _shares(
    classes: int, target: Tensor, weight: Tensor | None, bytes: Tensor | None, how: _How, dtype: torch.dtype
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


def _with_gradient_kernel(
    x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, how: _How
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
        shares = _shares(dx.size(1), target, weight, counts, ctx.how, _compute_dtype(dx))
        whole = shares.sum(1, keepdim=True)
        p = (dx + shares) / whole
        # The target's p follows from the others: its gradient is near -1, where a narrow element has few digits.
        p = torch.where(_hot(dx.size(1), target.unsqueeze(1)), p + (1 - p.sum(1, keepdim=True)), p)
        logits = torch.where(whole != 0, p.clamp(min=0).log(), 0)
        stand_in: Any = _StandIn.apply
        whole, p = _softmax(stand_in(like_x, logits), shares)
        return (dloss.to(p.dtype) * (whole * p - shares)).to(dx.dtype)
    if not nothing_watches((dloss,), modes=recording() is not None):  # batched gradients, for example
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


# --- nll_loss ---


def _nll_fake(x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, *how: Any) -> Tensor:
    return _result(x, target, _How(*how).reduction)


def _nll_kernel(x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, *how: Any) -> Tensor:
    out, reduced = _nll_fake(x, target, weight, bytes, *how), _How(*how).reduction != "none"
    losses = x.new_empty(target.shape, dtype=_compute_dtype(x)) if reduced else out
    operands = {"x": x, "target": target, "losses": losses, "loss": out if reduced else None}
    _run(NllLossPlan, _How(*how), {**operands, "weight": weight, "bytes": bytes})
    return out


def _nll_backward_fake(dloss: Tensor, x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


def _nll_backward_kernel(
    dloss: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, *how: Any
) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    operands = {"dloss": dloss.contiguous(), "target": target, "dx": dx, "weight": weight, "bytes": bytes}
    _run(NllLossBackwardPlan, _How(*how), operands)
    return dx


def _nll_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, target, weight, counts, *ctx.how = inputs
    ctx.save_for_backward(x, target, weight, counts)


def _nll_grad(ctx: Any, dloss: Tensor) -> Any:
    how = _How(*ctx.how)._replace(check_indices=False)
    return _nll_loss_backward(dloss, *ctx.saved_tensors, *how), *(None,) * (len(ctx.how) + 3)


def _nll_backward_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, target, weight, counts, *ctx.how = inputs
    ctx.save_for_backward(target, weight, counts)


def _nll_backward_grad(ctx: Any, of_dx: Tensor) -> Any:
    # The loss is linear in x, so the backward of its backward is the loss itself.
    return _nll_loss(of_dx, *ctx.saved_tensors, *ctx.how), *(None,) * (len(ctx.how) + 4)


_nll_loss = Recorded(
    "nll_loss",
    f"(Tensor x, Tensor target, {_TABLES}, {_HOW}) -> Tensor",
    _nll_kernel,
    _nll_fake,
    setup=_nll_setup,
    backward=_nll_grad,
)
_nll_loss_backward = Recorded(
    "nll_loss_backward",
    f"(Tensor dloss, Tensor x, Tensor target, {_TABLES}, {_HOW}) -> Tensor",
    _nll_backward_kernel,
    _nll_backward_fake,
    setup=_nll_backward_setup,
    backward=_nll_backward_grad,
)
