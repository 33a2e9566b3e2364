"""Expressions of one's own on lists of tensors, in one launch; norms of each tensor; unscaling of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor

from triplan.descriptors import ListExpressionDescriptor, TotalNormDescriptor
from triplan.descriptors.expressions.expression import Expr, operand
from triplan.errors import InvalidProblem
from triplan.facade import ListExpressionArgs, TotalNormArgs, Workspace
from triplan.functional._plans import PLANS
from triplan.optim._shards import join
from triplan.optim.clip import gradients, lists_of
from triplan.sku import Target

__all__ = ["foreach_expression", "foreach_norm", "unscale_grads_"]

Tensors: TypeAlias = Sequence[Tensor]
Trees: TypeAlias = Expr | tuple[Expr, ...]
_SCALED = operand("x") * operand("s")


@torch.no_grad()
def foreach_expression(
    tree: Trees | Callable[..., Trees], *operands: Any, out: Tensors | tuple[Tensors, ...] | None = None, **named: Any
) -> Any:
    """An expression of lists of tensors, in one launch for all tensors of any sizes.

    ``tree`` is a function that builds it of its operands (``lambda x, y: x + 0.5 * y``), given in order; or an
    expression, whose operands are given by name. Operands are lists of contiguous tensors of one element, whose i-th
    tensors have equal shapes; tensors of shape (), read on the device, for all tensors; or numbers. Returns a list of
    tensors, or a tuple of as many lists as ``tree`` has; with ``out`` these are written, and may be operands
    (``out=x``). Values are promoted as in torch and computed as by ``functional.expression``, in the same bits.

    Records no gradient. Raises ``InvalidProblem`` for a bad tree, lists that do not fit, and for lists that share
    memory in part.
    """
    given = {**{f"x{i}": value for i, value in enumerate(operands)}, **named}
    lists = {name: list(value) for name, value in given.items() if isinstance(value, (list, tuple))}
    if not lists:
        raise InvalidProblem("foreach_expression(): no operand is a list; at least one must be")
    made = tree(*map(operand, given)) if callable(tree) else tree
    roots = (made,) if isinstance(made, Expr) else tuple(made)
    first = next(iter(lists.values()))
    for name, own in lists.items():
        if list(map(Tensor.size, own)) != list(map(Tensor.size, first)):
            raise InvalidProblem(f"foreach_expression(): {name} has tensors of other shapes than the first list")
    if not first:
        return [] if isinstance(made, Expr) else tuple([] for _ in roots)
    outs: list[Any] = [None] * len(roots) if out is None else [out] if isinstance(made, Expr) else list(out)
    # A result that an operand's tensors receive has its name; others have names that no operand has.
    places = {tuple(map(id, own)): name for name, own in lists.items()}
    free = (name for i in count() if (name := f"out{i}") not in given)
    names = [places.get(tuple(map(id, own or ()))) or next(free) for own in outs]
    kinds = {name: _kind(name, value, given) for name, value in given.items()}
    elements = {name: own[0].dtype for name, own in zip(names, outs, strict=True) if own is not None}
    sizes = tuple(map(Tensor.numel, first))
    desc = ListExpressionDescriptor.of(dict(zip(names, roots, strict=True)), sizes, elements, **kinds)
    for i, (_, element) in enumerate(desc.tree.results):
        if outs[i] is None:
            outs[i] = [torch.empty_like(t, dtype=element.torch) for t in first]
    values = {**given, **lists, **dict(zip(names, map(list, outs), strict=True))}
    _run(desc, ListExpressionArgs(**values), first[0].device)
    return outs[0] if isinstance(made, Expr) else tuple(outs)


def _run(desc: Any, args: Any, device: torch.device) -> None:
    plan: Any = PLANS.get(desc, target=Target.of(device))
    plan.run(args, Workspace.allocate(plan, device) if plan.workspace_size() else None)


@torch.no_grad()
def foreach_norm(tensors: Tensors, norm_type: float = 2.0) -> list[Tensor]:
    """The norm of each tensor, as ``torch._foreach_norm``: f64 of shape (), in two launches for all.

    Tensors are contiguous, of one element (f32, bf16, f16) and on one device, of any sizes; the norm of an empty one is
    0, or inf of a negative order. ``norm_type``: any number but 0. Sums are accumulated in f64 in a fixed order: no
    square overflows, and every run has the same bits. Records no gradient. Raises ``InvalidProblem``.
    """
    given = list(tensors)
    if not given:
        return []
    norm = torch.empty(len(given), dtype=torch.float64, device=given[0].device)
    args = TotalNormArgs(given, norm)
    _run(TotalNormDescriptor.from_args(args, order=float(norm_type), each=True), args, given[0].device)
    return list(norm.unbind())


def _kind(name: str, value: Any, given: dict[str, Any]) -> tuple[Any, str]:
    """The element of an operand, and how it is given."""
    if isinstance(value, (list, tuple)):
        return value[0].dtype, "list"
    if isinstance(value, Tensor):
        if value.dim():
            raise InvalidProblem(
                f"foreach_expression(): {name} has shape {list(value.shape)}; lists or () are expected"
            )
        return value.dtype, "one"
    if not isinstance(value, (bool, int, float)):
        raise InvalidProblem(f"foreach_expression(): {name} is {type(value).__name__}")
    wide = any(isinstance(v, (list, tuple)) and v[0].dtype is torch.float64 for v in given.values())
    return ("i64" if not isinstance(value, float) else "f64" if wide else "f32"), "number"


@torch.no_grad()
def unscale_grads_(parameters: Tensor | Iterable[Tensor], scale: Tensor) -> Tensor:
    """Divide gradients in place by ``scale``, one element on the device, as ``GradScaler.unscale_`` does.

    Returns f32 of shape (): 1 if an element of the gradients is infinite or NaN, else 0; what the optimizers take as
    ``found_inf``. A product with 1 / scale is taken, which is exact for powers of two. Nothing waits for the device.
    Of DTensors each rank has its part, and all return the same. Gradients and what is raised are those of
    ``clip_grad_norm_``.
    """
    found = torch.zeros((), device=scale.device)
    factor = scale.detach().reshape(()).float().reciprocal()
    for own in lists_of(gradients(parameters)):
        norm = own.norm(float("inf"))
        if own.divided:
            join(norm, float("inf"), own.divided)
        found = torch.maximum(found, (~norm.isfinite()).reshape(()).to(found.device, torch.float32))
        foreach_expression(_SCALED, x=own.tensors, s=factor.to(own.device), out=own.tensors)
        own.written()
    return found
