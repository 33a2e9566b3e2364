"""Losses over classes in plain torch, from their definitions: shares no computation with the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from triplan.backends.table import CheckRules, Compute, reference
from triplan.backends.triton.common import bounds
from triplan.descriptors import (
    CrossEntropyBackwardDescriptor,
    CrossEntropyDescriptor,
    NllLossBackwardDescriptor,
    NllLossDescriptor,
    Operand,
    ScaleGradientDescriptor,
)
from triplan.descriptors.fields import NO_BAD_INDEX
from triplan.descriptors.losses import LossDescriptor
from triplan.sku import PrecisionGuarantee

FLOATS = ("f16", "bf16", "f32", "f64")
Tensors = Mapping[str, Tensor]
CrossEntropy: TypeAlias = CrossEntropyDescriptor | CrossEntropyBackwardDescriptor


def _guarantee(desc: LossDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """One rounding per term of the longest sum, in any order, and 48 for all else. The sums are: of cross_entropy, that
    along a row; of the loss, those over rows; of a gradient, the denominator of the mean, a sum over rows too.

    (A smoothed gradient has two sums along a row, of exponentials and of weights. One rounding per term covers both,
    because torch keeps several partial sums: a term passes through less than half as many additions.)

    Never batch-invariant: torch may divide sums into blocks that depend on the batch.
    """
    classes = desc.classes
    rows = math.prod(desc.input_shape) // max(classes, 1)
    exponentials = isinstance(desc, (CrossEntropyDescriptor, CrossEntropyBackwardDescriptor))
    smooths = getattr(desc, "label_smoothing", 0.0) != 0
    # Order-invariant if nothing is summed, or only a count of rows, which is exact below 2**24.
    counted = desc.op.endswith("_backward") and desc.reduction == "mean" and not desc.weight and rows < 2**24
    single = desc.reduction == "none" and not (desc.weight and smooths)
    order = desc.op != "cross_entropy" and (counted or single)
    found = {}
    for o in desc.operands():
        if o.name == "status":
            found["status"] = PrecisionGuarantee.exact(o.element)
        elif o.is_written:
            over = o.name == "loss" or (o.name in ("x", "dx") and desc.reduction in ("mean", "byte_mean"))
            found[o.name] = _rounded(desc, o, (classes if exponentials else 0) + (rows if over else 0) + 48, order)
    return found


def _rounded(
    desc: LossDescriptor | ScaleGradientDescriptor, o: Operand, roundings: int, order: bool, batch: bool = False
) -> PrecisionGuarantee:
    return bounds.rounded(
        o.element,
        desc.element.compute,
        relative=roundings,
        per_term=roundings,
        flushes=roundings,
        batch=batch,
        order=order,
    )


def _scaled(desc: ScaleGradientDescriptor) -> Mapping[str, PrecisionGuarantee]:
    return {"dx": _rounded(desc, desc.operand("dx"), 2, order=True, batch=True)}


def _declare(op: str) -> Callable[[Compute], Compute]:
    rules = CheckRules(_terms, _inputs, ("unit", "special"))
    return reference(op=op, elements=FLOATS, index_elements=("i32", "i64"), guarantee=_guarantee, checks=rules)


# --- targets ---


def _rows(desc: LossDescriptor, t: Tensor) -> Tensor:
    """``t`` as (rows, classes)."""
    moved = t.movedim(desc.class_axis, -1)
    return moved.reshape(math.prod(moved.shape[:-1]), moved.shape[-1])


def _whole(desc: LossDescriptor, rows: Tensor) -> Tensor:
    """``rows``, of shape (rows, classes), in the shape of the logits."""
    moved = [n for a, n in enumerate(desc.input_shape) if a != desc.class_axis]
    whole: Tensor = rows.reshape(*moved, rows.shape[1]).movedim(-1, desc.class_axis)
    return whole


class _Targets:
    """For each row: its class, whether it is kept (neither ignored nor out of bounds), its weight, and its share: the
    factor of its loss in the reduced loss."""

    def __init__(self, desc: LossDescriptor, x: Tensors, like: Tensor) -> None:
        given = x["target"].reshape(-1).long()
        classes = desc.input_shape[desc.class_axis]
        asked = given != desc.ignore_index
        at = given.clamp(0, classes - 1) if desc.out_of_bounds == "clamp" and classes else given
        inside = (at >= 0) & (at < classes)
        self.kept = asked & inside
        self.bad = asked & ~inside
        self.at = torch.where(self.kept, at, 0)
        ones = torch.ones(classes, dtype=like.dtype)
        self.weight = x["weight"] if desc.weight else ones
        self.of_target = self._look_up(self.weight)
        counted = x["bytes"] if desc.reduction == "byte_mean" else self.weight
        self.share = self._look_up(x["bytes"] if desc.reduction == "byte_mean" else ones)
        if desc.reduction in ("mean", "byte_mean"):
            self.share = torch.where(self.kept, self.share / self._look_up(counted).sum(), 0)

    def _look_up(self, table: Tensor) -> Tensor:
        """The target's entry of ``table`` for each row; 0 for rows that are not kept."""
        if table.numel() == 0:
            return torch.zeros(self.at.shape, dtype=table.dtype)
        found: Tensor = torch.where(self.kept, table[self.at], 0)
        return found

    def one_hot(self, classes: int) -> Tensor:
        found: Tensor = (torch.arange(classes) == self.at[:, None]) & self.kept[:, None]
        return found


def _finished(desc: LossDescriptor, targets: _Targets, rows: Tensor, found: dict[str, Tensor]) -> Tensors:
    """``found`` with the status and, of a forward op, the reduction of the losses ``rows``."""
    if desc.reduced and not desc.op.endswith("_backward"):
        # The mean over no rows is 0 / 0.
        empty = desc.reduction in ("mean", "byte_mean") and not bool(targets.kept.any())
        total = torch.where(targets.kept, rows * targets.share, 0).sum()
        found["loss"] = (total / 0 if empty else total).reshape(1)
    if desc.out_of_bounds == "error":
        bad = targets.bad.nonzero().reshape(-1)
        found["status"] = bad[:1].clone() if len(bad) else torch.tensor([NO_BAD_INDEX])
    return found


def _picked(v: Tensor, targets: _Targets) -> Tensor:
    """The target's element of each row; 0 where no row is kept."""
    if v.shape[1] == 0:
        return v.new_zeros(v.shape[0])
    return torch.where(targets.kept, v.gather(1, targets.at[:, None]).squeeze(1), 0)


# --- what checks must know: what may be given, and sum|terms| from absolute values ---


def _inputs(desc: LossDescriptor, x: Tensors) -> Tensors:
    """Positive tables. For the backward of cross_entropy, the logsumexp of the logits, and finite gradients: the result
    of an infinite one depends on which probabilities underflow to 0."""
    found = {name: x[name].double().nan_to_num(0, 0, 0).abs() % 1 + 0.5 for name in ("weight", "bytes") if name in x}
    if isinstance(desc, CrossEntropyBackwardDescriptor):
        found["dloss"] = x["dloss"].double().nan_to_num(0, 0, 0).clamp(-4, 4)
        lse = torch.logsumexp(x["x"].double(), desc.class_axis)
        found["lse"] = torch.where(lse == math.inf, math.nan, lse)
    return {name: t.to(desc.operand(name).element.torch) for name, t in found.items()}


def _terms(desc: LossDescriptor, x: Tensors) -> Tensors:
    """Sum|terms|. A loss of cross_entropy: (|maximum| + |target's logit| + log n + 1) * weight. Its gradient: a
    probability of at most 1, the target's 1, and what smoothing subtracts. A loss of nll_loss is one product."""
    v = x["dloss"] if desc.op == "nll_loss_backward" else _rows(desc, x["x"])
    targets = _Targets(desc, x, v)
    if not isinstance(desc, (CrossEntropyDescriptor, CrossEntropyBackwardDescriptor)):
        if desc.op == "nll_loss_backward":
            return {}
        rows = targets.of_target * _picked(v, targets)
        return {"loss": (rows * targets.share).sum().reshape(1)}
    (picked, spread), w, w_at = _smoothing(desc), targets.weight, targets.of_target
    hot = w_at[:, None] * targets.one_hot(v.shape[1])
    dx = targets.share[:, None] * (picked * (hot + w_at[:, None]) + spread * (w.sum() + w))
    if desc.op == "cross_entropy_backward":
        return {"dx": _whole(desc, dx * x["dloss"].reshape(-1)[:, None])}
    size = 1 + math.log(max(v.shape[1], 1)) + 2 * (v.max(1).values if v.shape[1] else v.new_zeros(len(v)))
    rows = picked * w_at * size + spread * (w.sum() * size + (w * v).sum(1))
    found = {name: t.reshape(x["target"].shape) for name, t in (("losses", rows), ("lse", size))}
    found["loss"] = (rows * targets.share).sum().reshape(1)
    return found | dict.fromkeys(("x", "dx"), _whole(desc, dx))


# --- cross_entropy ---


def _logsumexp(v: Tensor) -> tuple[Tensor, Tensor]:
    """m, log(sum(exp(v - m))) of each row, with m its maximum, or 0 where all are -inf. Their sum is the logsumexp."""
    if v.shape[1] == 0:
        return v.new_zeros(v.shape[0]), v.new_full((v.shape[0],), -math.inf)
    top = v.max(1).values
    top = torch.where(top == -math.inf, 0.0, top)
    return top, (v - top[:, None]).exp().sum(1).log()


def _smoothing(desc: CrossEntropy) -> tuple[float, float]:
    """(weight of the target, weight of every class) under label smoothing."""
    s = desc.label_smoothing
    return 1 - s, s / max(desc.input_shape[desc.class_axis], 1)


def _gradient(desc: CrossEntropy, targets: _Targets, p: Tensor) -> Tensor:
    picked, spread = _smoothing(desc)
    w: Tensor = (picked * targets.of_target)[:, None]
    g = w * (p - targets.one_hot(p.shape[1]).to(p.dtype))
    if spread:
        g = g + spread * (targets.weight.sum() * p - targets.weight)
    return torch.where(targets.kept[:, None], g * targets.share[:, None], 0)


@_declare("cross_entropy")
def cross_entropy(desc: CrossEntropyDescriptor, x: Tensors) -> Tensors:
    v = _rows(desc, x["x"])
    targets = _Targets(desc, x, v)
    top, log_total = _logsumexp(v)
    picked, spread = _smoothing(desc)
    rows = picked * targets.of_target * (log_total - (_picked(v, targets) - top))
    if spread:
        rows = rows - spread * (targets.weight * (v - top[:, None] - log_total[:, None])).sum(1)
    rows = torch.where(targets.kept, rows, 0)
    found = {"losses": rows, "lse": torch.where(targets.kept, top + log_total, -math.inf)}
    shape = x["target"].shape
    found = {name: t.reshape(shape) for name, t in found.items()}
    if desc.gradient:
        p = (v - top[:, None]).exp() / log_total.exp()[:, None]
        found["x" if desc.in_place else "dx"] = _whole(desc, _gradient(desc, targets, p))
    return _finished(desc, targets, rows, found)


@_declare("cross_entropy_backward")
def cross_entropy_backward(desc: CrossEntropyBackwardDescriptor, x: Tensors) -> Tensors:
    v = _rows(desc, x["x"])
    targets = _Targets(desc, x, v)
    g = _gradient(desc, targets, (v - x["lse"].reshape(-1)[:, None]).exp())
    dloss = x["dloss"].reshape(-1)[:, None]
    dx = torch.where(targets.kept[:, None], g * dloss, 0)
    return _finished(desc, targets, v, {"dx": _whole(desc, dx)})


# --- nll_loss ---


@_declare("nll_loss")
def nll_loss(desc: NllLossDescriptor, x: Tensors) -> Tensors:
    v = _rows(desc, x["x"])
    targets = _Targets(desc, x, v)
    rows = torch.where(targets.kept, -targets.of_target * _picked(v, targets), 0)
    return _finished(desc, targets, rows, {"losses": rows.reshape(x["target"].shape)})


@_declare("nll_loss_backward")
def nll_loss_backward(desc: NllLossBackwardDescriptor, x: Tensors) -> Tensors:
    dloss = x["dloss"].reshape(-1)
    targets = _Targets(desc, x, dloss)
    g = -targets.of_target * targets.share * dloss
    dx = torch.where(targets.one_hot(desc.input_shape[desc.class_axis]), g[:, None], 0)
    return _finished(desc, targets, dloss, {"dx": _whole(desc, dx)})


@reference(
    op="scale_gradient",
    elements=FLOATS,
    guarantee=_scaled,
    checks=CheckRules(CheckRules.no_terms, passes=("unit", "special")),
)
def scale_gradient(desc: ScaleGradientDescriptor, x: Tensors) -> Tensors:
    return {"dx": x["dloss"] * x["dx" if desc.in_place else "unscaled"]}
