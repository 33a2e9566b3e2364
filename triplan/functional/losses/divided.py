"""Losses of logits that ranks divide: by rows, which are losses of their own, or by classes.

Of divided classes, ranks exchange two numbers a row (three with label smoothing) in one all_gather for each axis of the
mesh that divides them: the logsumexp of their own logits, and the target's logit, or 0. Both are combined in the order
of the ranks, so that all ranks get the same bits, and the same in every run. The gradient needs no exchange.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from triplan import expr
from triplan.functional import _plans
from triplan.functional._ops import RECORDED
from triplan.functional._plans import run_expression
from triplan.functional._sharding import all_of, as_blocks, block, copied, copies, divides, joined, local_of, local_part
from triplan.functional.losses.shared import How, compute_dtype, raise_if_any

_X, _LSE, _WHOLE, _HIT, _AT, _COLUMN, _KEPT, _SPREAD, _WEIGHT = map(
    expr.operand, ("x", "lse", "whole", "hit", "at", "column", "kept", "spread", "weight")
)
#: The gradient of a logit, by the row's factors of the softmax, of the target's class, and of each class.
_GRADIENT = _WHOLE * expr.exp(_X - _LSE) - expr.where(expr.eq(_COLUMN, _AT), _HIT, 0.0)
_GRADIENTS = {
    "plain": expr.where(_KEPT, _GRADIENT, 0.0),
    "smooth": expr.where(_KEPT, _GRADIENT - _SPREAD, 0.0),
    "weighted": expr.where(_KEPT, _GRADIENT - _SPREAD * _WEIGHT, 0.0),
}


def of_dtensor(op: str, x: Any, target: Tensor, weight: Tensor | None, how: How) -> Tensor:
    """The loss ``op`` of the DTensor ``x`` (N, C, ...), with reduction none, sum or mean, in the compute dtype.

    ``target`` and ``weight`` are DTensors, or the same on every rank. A reduced loss is whole on every rank. Raises
    ``IndexError`` for a target outside the classes as the loss does.
    """
    losses: Tensor
    target, weight = copied(target, x), None if weight is None else copied(weight, x)
    if op == "cross_entropy" and divides(x, (1,)):
        losses = _by_classes(x, target, weight, how)
    else:
        found = RECORDED[op](x, target, weight, None, *how._replace(reduction="none"))
        losses = found[0] if isinstance(found, tuple) else found
    if how.reduction == "none":
        return losses
    total = _sum(losses)
    if how.reduction == "mean":
        kept = (target >= 0) & (target < x.size(1)) & (target != how.ignore_index)
        shares = kept.to(total.dtype)
        if weight is not None:
            at = torch.where(kept, target, 0)
            shares = shares * RECORDED["index_select"](weight, 0, at.reshape(-1), False, False).reshape(target.shape)
        total = total / _sum(shares)
    result: Tensor = total
    return result


def _sum(t: Any) -> Any:
    """The sum of all elements of a DTensor, on every rank."""
    return all_of(RECORDED["reduce"]("sum", t, list(range(t.dim())), False, None, 1.0, 2.0))


def _by_classes(x: Any, target: Any, weight: Any, how: How) -> Tensor:
    x = as_blocks(x)
    mesh, classes = x.device_mesh, x.size(1)
    rows = [p if not p.is_shard() else type(p)(p.dim - (p.dim > 1)) for p in x.placements]
    split = [i for i, p in enumerate(x.placements) if p.is_shard(1)]
    rows = [copies() if i in split else p for i, p in enumerate(rows)]
    if how.check_indices or _plans.always_checks(x.device):
        of = local_of(all_of(target)).reshape(-1)
        raise_if_any("cross_entropy", of, ((of < 0) | (of >= classes)) & (of != how.ignore_index), classes)
    own = target.redistribute(placements=rows).to_local()
    table = None if weight is None else local_of(all_of(weight))
    apply: Any = _ByClasses.apply
    losses = apply(local_part(x), own, table, how, classes, block(x)[1][1], mesh, split)
    return joined(losses, mesh, rows, target.shape)


class _ByClasses(Function):
    """The losses of rows, of which ``x`` has the classes from ``first`` on."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor, weight: Any, how: How, classes: int, first: int, mesh: Any, split: Any
    ) -> Tensor:
        from triplan.functional._sharding.sums import gathered, in_order

        compute, count = compute_dtype(x), x.size(1)
        kept = (target >= 0) & (target < classes) & (target != how.ignore_index)
        own = kept & (target >= first) & (target < first + count)
        at = torch.where(own, target - first, 0)
        rows = x.new_empty(target.shape, dtype=compute)
        each = torch.ones_like(rows) if weight is None else weight[torch.where(kept, target, 0)]
        own_weight = None if weight is None else weight[first : first + count]
        if count:
            lse = RECORDED["reduce"]("logsumexp", x.to(compute), [1], False, None, 1.0, 2.0)
            hit = RECORDED["gather"](x, 1, at.unsqueeze(1), False, False).squeeze(1).to(compute)
        else:
            lse, hit = torch.full_like(rows, -torch.inf), torch.zeros_like(rows)
        known = [lse, torch.where(own, hit, 0)]
        if how.label_smoothing:
            wide = x.to(compute)
            known.append((wide if own_weight is None else wide * _by_class(own_weight, x)).sum(1))
        numbers = torch.stack(known)
        for axis in split:
            parts = gathered(numbers, mesh, axis)
            numbers = torch.stack([parts[:, 0].logsumexp(0), *(in_order(parts[:, i]) for i in range(1, len(known)))])
        lse, hit, *spread = numbers
        losses = each * (1 - how.label_smoothing) * (lse - hit)
        ctx.smooth = how.label_smoothing / classes
        ctx.total = float(classes) if weight is None else weight.sum()
        if spread:
            losses = losses + ctx.smooth * (ctx.total * lse - spread[0])
        ctx.sharp = 1 - how.label_smoothing
        ctx.save_for_backward(x, lse, torch.where(own, at, -1), kept, each, own_weight)
        return torch.where(kept, losses, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> Any:
        x, lse, at, kept, each, weight = ctx.saved_tensors
        d = dloss.to(lse.dtype)
        hit, spread = d * each * ctx.sharp, d * ctx.smooth
        rows = {"lse": lse, "whole": hit + spread * ctx.total, "hit": hit, "at": at, "kept": kept}
        operands = {"x": x, **{name: t.unsqueeze(1) for name, t in rows.items()}}
        operands["column"] = _by_class(torch.arange(x.size(1), device=x.device, dtype=at.dtype), x)
        kind = "plain"
        if ctx.smooth:
            kind, operands["spread"] = "smooth", spread.unsqueeze(1)
            if weight is not None:
                kind, operands["weight"] = "weighted", _by_class(weight, x)
        dx = torch.empty_like(x)
        if dx.numel():
            run_expression({**operands, "dx": dx}, "dx", _GRADIENTS[kind])
        return dx, *(None,) * 7


def _by_class(t: Tensor, x: Tensor) -> Tensor:
    """One element for each class, as it broadcasts against ``x``."""
    return t.reshape(1, -1, *(1,) * (x.dim() - 2))
