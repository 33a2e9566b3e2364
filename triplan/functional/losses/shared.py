"""What the losses share: their options, the checks of their arguments, and how their plans run."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import torch

from triplan.descriptors.fields import MAX_RANK
from triplan.descriptors.losses import Reduction
from triplan.errors import shown
from triplan.functional._plans import run
from triplan.functional._shapes import check_index_dtype, check_same_device, require
from triplan.functional._sharding.axes import Rule
from triplan.sku import ElementKind

Tensor = torch.Tensor
_REDUCTIONS = get_args(Reduction)


class How(NamedTuple):
    """The options of a loss: the last arguments of every registered op, in order."""

    reduction: str
    ignore_index: int
    label_smoothing: float
    check_indices: bool


def checked(
    name: str, input: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, how: How
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The tensors: ``input`` with a batch axis and at most ``MAX_RANK`` axes, the tables in the compute element."""
    if not input.is_floating_point():
        raise RuntimeError(f"{name}(): expected a floating-point tensor, but got {input.dtype}")
    if how.reduction not in _REDUCTIONS:
        raise ValueError(
            f"{shown(how.reduction)} is not a valid value for reduction; valid are {', '.join(_REDUCTIONS)}"
        )
    if not 0 <= how.label_smoothing <= 1:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {shown(how.label_smoothing)}")
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
    compute = compute_dtype(input)
    weight, bytes = (None if t is None else t.detach().to(compute).contiguous() for t in (weight, bytes))
    return input, target.contiguous(), weight, bytes


def shaped(out: Tensor, input: Tensor, target: Tensor, how: How) -> Tensor:
    """The losses of rows in ``input``'s dtype and ``target``'s shape; a reduced loss is returned unchanged."""
    return out if how.reduction != "none" else out.reshape(target.shape).to(input.dtype)


def legacy(reduction: str, size_average: bool | None, reduce: bool | None) -> str:
    """``reduction``, unless one of torch's deprecated arguments is given."""
    if size_average is None and reduce is None:
        return reduction
    return "none" if reduce is False else "sum" if size_average is False else "mean"


# --- registered ops, of inputs with a batch axis ---

HOW = "str reduction, SymInt ignore_index, float label_smoothing, bool check_indices"
TABLES = "Tensor? weight, Tensor? bytes"


def loss_axes(results: int) -> Rule:
    """Rows are losses of their own, or terms of a sum; a mean needs the divisor of all rows."""

    def rule(x: Any, target: Any, weight: Any, bytes: Any, reduction: str, *_: Any) -> str | None:
        loss = {"none": "n*", "sum": "+n*"}.get(reduction)
        return None if loss is None else f"n.*, n*, ., . -> {loss}{', n*' * (results - 1)}"

    return rule


def loss_backward_axes(lse: bool) -> Rule:
    """``lse``: whether the op reads the rows' logarithms of sums."""

    def rule(dloss: Any, x: Any, target: Any, *rest: Any) -> str | None:
        reduction = rest[3 if lse else 2]
        incoming = {"none": "n*", "sum": ""}.get(reduction)
        return None if incoming is None else f"{incoming}, n.*, n*{', n*' * lse}, ., . -> n.*"

    return rule


def compute_dtype(t: Tensor) -> torch.dtype:
    return ElementKind.of(t.dtype).compute.torch


def run_loss(plan: Any, how: How, operands: dict[str, Tensor | None], **options: Any) -> None:
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


def new_result(x: Tensor, target: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return x.new_empty(target.shape, dtype=compute_dtype(x))
    return x.new_empty(())


def raise_if_any(name: str, target: Tensor, bad: Tensor, classes: int) -> None:
    """Raise ``IndexError`` for the first target of a vector that is ``bad``. Synchronises."""
    found = bad.nonzero()
    if len(found):
        at = int(found[0])
        value = int(target[at])
        raise IndexError(f"{name}: target[{at}] = {value} is out of bounds for extent {classes}")
