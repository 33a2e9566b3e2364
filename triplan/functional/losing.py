"""cross_entropy and nll_loss with class indices, as torch has them, and their mean over bytes.

Where autograd records an eager call of cross_entropy with a reduced loss, the forward writes the gradient of the logits
as well, and the backward only scales it. Compiled graphs and reduction ``"none"`` keep the logits and each row's
logsumexp instead, and the backward computes the softmax again: a graph that is traced once cannot tell whether it will
be retained.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import torch
from torch.autograd.function import Function, once_differentiable

from triplan.descriptors.losses import Reduction
from triplan.facade import (
    CrossEntropyBackwardPlan,
    CrossEntropyPlan,
    NllLossBackwardPlan,
    NllLossPlan,
    ScaleGradientPlan,
)
from triplan.functional._ops import _LIBRARY, _nothing_watches, _register, _transformed, needs_grad
from triplan.functional._plans import run
from triplan.functional._shapes import check_index_dtype, check_same_device, require
from triplan.sku import ElementKind

Tensor = torch.Tensor
REDUCTIONS = get_args(Reduction)
#: Whether the graph outlives the backward pass under way; without this torch the gradient is always copied.
_retained: Any = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


class _How(NamedTuple):
    """What a loss is told beside its tensors, in the order of every op's last arguments."""

    reduction: str
    ignore_index: int
    label_smoothing: float
    check_indices: bool


_HOW = "str reduction, SymInt ignore_index, float label_smoothing, bool check_indices"
_TABLES = "Tensor? weight, Tensor? bytes"


def _compute(t: Tensor) -> torch.dtype:
    return ElementKind.of(t.dtype).compute.torch


def _run(plan: Any, how: _How, operands: dict[str, Tensor | None], **options: Any) -> None:
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
        return x.new_empty(target.shape, dtype=_compute(x))
    return x.new_empty(())


# --- cross_entropy ---


def _forward_fake(x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, *how: Any) -> Any:
    return _result(x, target, _How(*how).reduction), x.new_empty(target.shape, dtype=_compute(x))


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


_cross_entropy = _register(
    "cross_entropy",
    f"(Tensor x, Tensor target, {_TABLES}, {_HOW}) -> (Tensor, Tensor)",
    _forward_kernel,
    _forward_fake,
)
_cross_entropy_backward = _register(
    "cross_entropy_backward",
    f"(Tensor dloss, Tensor x, Tensor target, Tensor lse, {_TABLES}, {_HOW}) -> Tensor",
    _backward_kernel,
    _backward_fake,
)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, target, weight, counts, *ctx.how = inputs
    _, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(x, target, lse, weight, counts)


def _grad(ctx: Any, dloss: Tensor, _: Any) -> Any:
    # Whether a target is outside the classes, the forward has asked.
    how = _How(*ctx.how)._replace(check_indices=False)
    return _cross_entropy_backward(dloss, *ctx.saved_tensors, *how), *(None,) * (len(ctx.how) + 3)


torch.library.register_autograd("triplan::cross_entropy", _grad, setup_context=_setup, lib=_LIBRARY)


class _WithGradient(Function):
    """The forward writes the gradient; the backward scales it.

    A graph that is not retained gives its gradient away: it is scaled in place, and the kernel leaves it alone where
    it finds a scale of 1 on the device. A graph that is retained keeps it as it is, and gives a scaled copy: so it is
    never scaled twice, and nothing waits for the device.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, how: _How) -> Tensor:
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        out, _ = _forward(x, target, weight, bytes, how, dx)
        ctx.save_for_backward(dx)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> Any:
        (dx,) = ctx.saved_tensors
        kept = _retained()
        result = torch.empty_like(dx) if kept else dx
        operands = {"dloss": dloss.reshape(1), "dx": result, **({"unscaled": dx} if kept else {})}
        run(ScaleGradientPlan, operands, in_place=not kept)
        return result, None, None, None, None


# --- nll_loss ---


def _nll_fake(x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, *how: Any) -> Tensor:
    return _result(x, target, _How(*how).reduction)


def _nll_kernel(x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, *how: Any) -> Tensor:
    out, reduced = _nll_fake(x, target, weight, bytes, *how), _How(*how).reduction != "none"
    losses = x.new_empty(target.shape, dtype=_compute(x)) if reduced else out
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


_nll_loss = _register("nll_loss", f"(Tensor x, Tensor target, {_TABLES}, {_HOW}) -> Tensor", _nll_kernel, _nll_fake)
_nll_loss_backward = _register(
    "nll_loss_backward",
    f"(Tensor dloss, Tensor x, Tensor target, {_TABLES}, {_HOW}) -> Tensor",
    _nll_backward_kernel,
    _nll_backward_fake,
)


def _nll_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, target, weight, counts, *ctx.how = inputs
    ctx.save_for_backward(x, target, weight, counts)


def _nll_grad(ctx: Any, dloss: Tensor) -> Any:
    how = _How(*ctx.how)._replace(check_indices=False)
    return _nll_loss_backward(dloss, *ctx.saved_tensors, *how), *(None,) * (len(ctx.how) + 3)


torch.library.register_autograd("triplan::nll_loss", _nll_grad, setup_context=_nll_setup, lib=_LIBRARY)


# --- calls ---


def _checked(
    name: str, input: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, how: _How
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Input and target with a batch axis, and tables in the element that is computed in."""
    if not input.is_floating_point():
        raise RuntimeError(f"{name}(): expected a floating-point tensor, but got {input.dtype}")
    if how.reduction not in REDUCTIONS:
        raise ValueError(f"{how.reduction} is not a valid value for reduction; valid are {', '.join(REDUCTIONS)}")
    if not 0 <= how.label_smoothing <= 1:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {how.label_smoothing}")
    if (bytes is not None) != (how.reduction == "byte_mean"):
        raise ValueError(f"{name}(): bytes are given for reduction 'byte_mean', and for no other")
    if not 1 <= input.dim() <= 8:
        raise RuntimeError(f"{name}(): expected 1 to 8 dimensions, but input has {input.dim()}")
    if target.is_floating_point():
        raise RuntimeError(f"{name}(): expected class indices as target, not probabilities ({target.dtype})")
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
        require(
            table.dim() == 1 and table.size(0) == classes,
            lambda what=what, table=table: (  # type: ignore[misc]
                f"{name}(): {what} should be defined for all {classes} classes or not at all, but got a tensor of "
                f"shape {list(table.shape)}"
            ),
        )
    if input.dim() == 1:
        input, target = input.unsqueeze(0), target.unsqueeze(0)
    compute = _compute(input)
    weight, bytes = (None if t is None else t.detach().to(compute).contiguous() for t in (weight, bytes))
    return input, target.contiguous(), weight, bytes


def _shaped(out: Tensor, input: Tensor, how: _How) -> Tensor:
    """Losses of rows in the input's dtype and without a batch axis that it did not have."""
    if how.reduction != "none":
        return out
    return (out.squeeze(0) if input.dim() == 1 else out).to(input.dtype)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    bytes: Tensor | None = None,
    check_indices: bool = False,
) -> Tensor:
    """Cross-entropy of logits with class indices (torch.nn.functional.cross_entropy, without its deprecated arguments).

    ``input``: f16, bf16, f32 or f64, of shape (C), (N, C) or (N, C, ...) with up to 8 axes and any strides. ``target``:
    i32 or i64, of ``input``'s shape without C; rows of ``ignore_index`` count nothing. ``weight``: one a class, not
    negative. ``reduction``: ``"mean"`` (over the targets' weights), ``"sum"``, ``"none"``, or ``"byte_mean"``:
    ``sum(loss * bytes[target]) / sum(bytes[target])`` with ``bytes``, one a class. Computed in f32, f64 for f64.

    Returns a 0-d tensor, with ``"none"`` one of ``target``'s shape, in ``input``'s dtype. Differentiable once, in
    ``input``; infinities and NaN as in torch, but rows that are ignored always have gradients of 0.
    Raises ``IndexError`` for a target outside the classes on the CPU; on CUDA such a row is ignored, or with
    ``check_indices`` the call synchronises and raises. ``RuntimeError`` or ``ValueError`` for what does not fit.
    """
    how = _How(reduction, ignore_index, label_smoothing, check_indices)
    given = _checked("cross_entropy", input, target, weight, bytes, how)
    if (
        reduction != "none"
        and not torch.compiler.is_compiling()
        and needs_grad((input,))
        and not _transformed()
        and _nothing_watches(tuple(t for t in given if t is not None))
    ):
        apply: Any = _WithGradient.apply
        recorded: Tensor = apply(*given, how)
        return recorded
    return _shaped(_cross_entropy(*given, *how)[0], input, how)


def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    bytes: Tensor | None = None,
    check_indices: bool = False,
) -> Tensor:
    """Negative log-likelihood of log-probabilities with class indices (torch.nn.functional.nll_loss): as
    ``cross_entropy``, of an ``input`` that log_softmax gave. Differentiable once, in ``input``.
    """
    how = _How(reduction, ignore_index, 0.0, check_indices)
    given = _checked("nll_loss", input, target, weight, bytes, how)
    return _shaped(_nll_loss(*given, *how), input, how)
