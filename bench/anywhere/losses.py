"""Draws of cross-entropy and negative log-likelihood, and of their backward ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import triplan as tp
from bench.anywhere.drawing import VOCABULARIES, Draw, Peer, Tensors, described, placed, streamed_us

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def draw(op: str, d: Draw) -> tp.Descriptor:
    element = d.element(op)
    options: dict[str, Any] = {}
    if op == "scale_gradient":
        options = {"in_place": d.chance(0.5)}
        whole = 1 if options["in_place"] else 2
    else:
        options = {"reduction": d.weighed({"mean": 6, "sum": 2, "none": 2}), "weight": d.chance(0.15)}
        whole = 2 if op == "cross_entropy_backward" else 1
    if op == "cross_entropy":
        options["label_smoothing"] = d.weighed({0.0: 4, 0.1: 1})
        if options["reduction"] != "none" and d.chance(0.5):
            options |= {"gradient": True}
            whole = 2
    rows, n = d.matrix(d.bytes // (element.itemsize * whole), 2, VOCABULARIES)
    return described(op, input_shape=(rows, n), element=element, **options)


def complete(desc: Any, t: Tensors) -> None:
    """``lse`` follows from x. torch's backward reads the forward's log-probabilities, in memory of their own."""
    if "weight" in t:
        t["weight"].abs_()
    if desc.op == "cross_entropy_backward":
        t["log_probabilities"] = torch.log_softmax(t["x"], 1)
        at = t["x"][:, :1]
        t["lse"].copy_((at.double() - t["log_probabilities"][:, :1].double())[:, 0])


def peers(desc: Any) -> dict[str, Peer]:
    if desc.op == "scale_gradient":
        if desc.in_place:
            return {"torch": lambda t: {"dx": t["dx"].mul_(t["dloss"])}}
        return {"torch": lambda t: {"dx": torch.mul(t["unscaled"], t["dloss"], out=t["dx"])}}
    return {"torch": placed(lambda t: (_backward if desc.op.endswith("_backward") else _forward)(desc, t))}


def _forward(desc: Any, t: Tensors) -> Tensors:
    x, target, weight = t["x"], t["target"], _weight(desc, t)
    reduced = desc.reduction != "none"
    name = "loss" if reduced else "losses"
    if desc.op == "nll_loss":
        loss = functional.nll_loss(x, target, weight, reduction=desc.reduction)
        return {name: loss.reshape(1) if reduced else loss}
    gradient = getattr(desc, "gradient", False)
    if gradient:
        x = x.detach().requires_grad_()
    loss = functional.cross_entropy(x, target, weight, reduction=desc.reduction, label_smoothing=desc.label_smoothing)
    found = {name: loss.detach().reshape(1) if reduced else loss}
    if gradient:
        (found["dx"],) = torch.autograd.grad(loss, x)
    return found


def _weight(desc: Any, t: Tensors) -> Tensor | None:
    """In the element of the logits, as torch has it."""
    return t["weight"].to(desc.element.torch) if desc.weight else None


def _backward(desc: Any, t: Tensors) -> Tensors:
    """torch's own backward: of nll_loss, and for cross_entropy then of log_softmax."""
    aten, target, weight = torch.ops.aten, t["target"], _weight(desc, t)
    like: Tensor = t["log_probabilities"] if "log_probabilities" in t else t["dx"]
    reduced = desc.reduction != "none"
    # A mean divides by the weights of the targets, which the forward op summed.
    total = weight[target].sum() if weight is not None else torch.full_like(t["dloss"], len(target)).reshape(-1)[0]
    dloss = t["dloss"].reshape(()) if reduced else t["dloss"].to(like.dtype)
    grad = aten.nll_loss_backward(
        dloss, like, target, weight, REDUCTIONS[desc.reduction], desc.ignore_index, total.to(like.dtype)
    )
    if desc.op == "nll_loss_backward":
        return {"dx": grad}
    return {"dx": aten._log_softmax_backward_data(grad, like, 1, like.dtype)}


def floor_us(desc: Any) -> float:
    """nll_loss reads one class of each row, in sectors of 32 bytes."""
    if desc.op != "nll_loss":
        return streamed_us(desc)
    one = desc.replace(input_shape=(desc.input_shape[0], min(32 // desc.element.itemsize, desc.classes)), layouts={})
    return streamed_us(one)
