"""The losses' registered ops, of inputs with a batch axis: what ``losing`` calls.

Where autograd records an eager call of cross_entropy with a reduced loss, the forward writes the gradient of the logits
as well, and the backward only scales it. Compiled graphs and reduction ``"none"`` keep the logits and each row's
logsumexp instead, and the backward computes the softmax again: a graph that is traced once cannot tell whether it will
be retained. So does f16, where a gradient divided by the rows is lost to underflow before a loss scale can save it.

Second derivatives are plain torch: with ``_shares`` of the rows' classes, the loss is
``sum(shares * (logsumexp(x) - x))``, and its gradient ``sum(shares) * softmax(x) - shares``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import Function

from triplan.facade import (
    CrossEntropyBackwardPlan,
    CrossEntropyPlan,
    NllLossBackwardPlan,
    NllLossPlan,
    ScaleGradientPlan,
)
from triplan.functional._ops import Recorded, _nothing_watches
from triplan.functional._plans import run
from triplan.sku import ElementKind

Tensor = torch.Tensor
#: Whether the graph outlives the backward pass under way; without this torch the gradient is always copied.
_retained: Any = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


class How(NamedTuple):
    """What a loss is told beside its tensors, in the order of every op's last arguments."""

    reduction: str
    ignore_index: int
    label_smoothing: float
    check_indices: bool


_HOW = "str reduction, SymInt ignore_index, float label_smoothing, bool check_indices"
_TABLES = "Tensor? weight, Tensor? bytes"


def compute_dtype(t: Tensor) -> torch.dtype:
    return ElementKind.of(t.dtype).compute.torch


def _run(plan: Any, how: How, operands: dict[str, Tensor | None], **options: Any) -> None:
    """With the operands that are there; 0-d results as one element."""
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
        return x.new_empty(target.shape, dtype=compute_dtype(x))
    return x.new_empty(())


# --- cross_entropy ---


def _forward_fake(x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, *how: Any) -> Any:
    return _result(x, target, How(*how).reduction), x.new_empty(target.shape, dtype=compute_dtype(x))


def _forward(
    x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, how: How, dx: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    out, lse = _forward_fake(x, target, weight, bytes, *how)
    reduced = how.reduction != "none"
    losses = torch.empty_like(lse) if reduced else out
    operands = {"x": x, "target": target, "losses": losses, "lse": lse, "loss": out if reduced else None}
    _run(CrossEntropyPlan, how, {**operands, "dx": dx, "weight": weight, "bytes": bytes}, gradient=dx is not None)
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
    _run(CrossEntropyBackwardPlan, How(*how), {**operands, "weight": weight, "bytes": bytes})
    return dx


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, target, weight, counts, *ctx.how = inputs
    _, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(x, target, lse, weight, counts)


def _grad(ctx: Any, dloss: Tensor, _: Any) -> Any:
    # Whether a target is outside the classes, the forward has asked.
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


cross_entropy = Recorded(
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


# --- its second derivatives, in plain torch ---


def _shares(
    classes: int, target: Tensor, weight: Tensor | None, bytes: Tensor | None, how: How, dtype: torch.dtype
) -> Tensor:
    """How much ``logsumexp(x) - x`` of each class counts in the (reduced) loss: of x's shape, 0 in rows not kept."""
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
    """Which class each row of ``at``, with an axis for the classes, names."""
    return at == torch.arange(classes, device=at.device).reshape(classes, *(1,) * (at.dim() - 2))


def _softmax(x: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of each row's shares, and its softmax; rows without shares may hold anything."""
    whole = shares.sum(1, keepdim=True)
    return whole, torch.softmax(torch.where(whole != 0, x.to(shares.dtype), 0), 1)


def _by_class(dloss: Tensor, p: Tensor) -> Tensor:
    return dloss.to(p.dtype) if dloss.dim() == 0 else dloss.to(p.dtype).unsqueeze(1)


class _StandIn(Function):
    """``values`` as what ``x`` holds: x, of which only the shape is used, gets their gradient."""

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


class WithGradient(Function):
    """The forward writes the gradient; the backward scales it.

    A graph that is not retained gives its gradient away: it is scaled in place, and the kernel leaves it alone where
    it finds a scale of 1 on the device. A graph that is retained keeps it as it is, and gives a scaled copy: so it is
    never scaled twice, and nothing waits for the device.

    No logits are kept for a backward that is itself recorded: up to a constant of each row they follow from the
    gradient, and the second result, one element in the shape of ``x``, leads back to where they came from.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, how: How
    ) -> tuple[Tensor, Tensor]:
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        out, _ = _forward(x, target, weight, bytes, how, dx)
        like_x = x.new_empty(1).expand(x.shape)
        ctx.how = how
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(dx, like_x, target, weight, bytes)
        return out, like_x

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, direct: Tensor | None) -> Any:
        result = direct
        if dloss is not None:
            scaled = WithGradient.scaled(ctx, dloss)
            result = scaled if direct is None else scaled + direct
        return result, None, None, None, None

    @staticmethod
    def scaled(ctx: Any, dloss: Tensor) -> Tensor:
        dx: Tensor
        dx, like_x, target, weight, counts = ctx.saved_tensors
        if torch.is_grad_enabled():
            shares = _shares(dx.size(1), target, weight, counts, ctx.how, compute_dtype(dx))
            whole = shares.sum(1, keepdim=True)
            p = (dx + shares) / whole
            # The target's is found from the others: of its own gradient, near -1, a narrow element keeps few digits.
            p = torch.where(_hot(dx.size(1), target.unsqueeze(1)), p + (1 - p.sum(1, keepdim=True)), p)
            logits = torch.where(whole != 0, p.clamp(min=0).log(), 0)
            stand_in: Any = _StandIn.apply
            whole, p = _softmax(stand_in(like_x, logits), shares)
            return (dloss.to(p.dtype) * (whole * p - shares)).to(dx.dtype)
        if not _nothing_watches((dloss,)):  # several gradients at once, perhaps
            return dloss * dx
        kept = _retained()
        result = torch.empty_like(dx) if kept else dx
        operands = {"dloss": dloss.reshape(1), "dx": result, **({"unscaled": dx} if kept else {})}
        run(ScaleGradientPlan, operands, in_place=not kept)
        return result


# --- nll_loss ---


def _nll_fake(x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, *how: Any) -> Tensor:
    return _result(x, target, How(*how).reduction)


def _nll_kernel(x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, *how: Any) -> Tensor:
    out, reduced = _nll_fake(x, target, weight, bytes, *how), How(*how).reduction != "none"
    losses = x.new_empty(target.shape, dtype=compute_dtype(x)) if reduced else out
    operands = {"x": x, "target": target, "losses": losses, "loss": out if reduced else None}
    _run(NllLossPlan, How(*how), {**operands, "weight": weight, "bytes": bytes})
    return out


def _nll_backward_fake(dloss: Tensor, x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


def _nll_backward_kernel(
    dloss: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, *how: Any
) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    operands = {"dloss": dloss.contiguous(), "target": target, "dx": dx, "weight": weight, "bytes": bytes}
    _run(NllLossBackwardPlan, How(*how), operands)
    return dx


def _nll_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, target, weight, counts, *ctx.how = inputs
    ctx.save_for_backward(x, target, weight, counts)


def _nll_grad(ctx: Any, dloss: Tensor) -> Any:
    how = How(*ctx.how)._replace(check_indices=False)
    return _nll_loss_backward(dloss, *ctx.saved_tensors, *how), *(None,) * (len(ctx.how) + 3)


def _nll_backward_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, target, weight, counts, *ctx.how = inputs
    ctx.save_for_backward(target, weight, counts)


def _nll_backward_grad(ctx: Any, of_dx: Tensor) -> Any:
    # The loss is linear in x, so that its adjoint's adjoint is the loss itself.
    return nll_loss(of_dx, *ctx.saved_tensors, *ctx.how), *(None,) * (len(ctx.how) + 4)


nll_loss = Recorded(
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
