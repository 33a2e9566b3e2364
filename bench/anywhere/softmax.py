"""Draws of softmax and log_softmax along any axis, and of their backward ops."""

from __future__ import annotations

from typing import Any

import torch

import triplan as tp
from bench.anywhere.drawing import Draw, Peer, Tensors, described, placed
from triplan.testing.placing import write

FOLLOWING = ("out",)


def draw(op: str, d: Draw) -> tp.Descriptor:
    element = d.element(op)
    rows, n = d.matrix(d.bytes // (element.itemsize * (3 if op.endswith("_backward") else 2)))
    shape = (*d.folded(rows), n)
    axis = len(shape) - 1
    if d.chance(0.2):  # along another axis
        axis = d.one_of(range(len(shape)))
        shape = (*shape[:axis], n, *shape[axis:-1])
    return described(op, input_shape=shape, softmax_axis=axis, element=element)


def complete(desc: Any, t: Tensors) -> None:
    """``out`` of a backward op is what the forward op wrote."""
    if desc.op.endswith("_backward"):
        forward = torch.log_softmax if desc.op.startswith("log") else torch.softmax
        write(t["out"], forward(t["out"], desc.softmax_axis))


def peers(desc: Any) -> dict[str, Peer]:
    axis, dtype, aten = desc.softmax_axis, desc.element.torch, torch.ops.aten
    is_log = desc.op.startswith("log")
    forward = torch.log_softmax if is_log else torch.softmax
    backward = aten._log_softmax_backward_data if is_log else aten._softmax_backward_data
    if desc.op.endswith("_backward"):
        return {"torch": placed(lambda t: {"dx": backward(t["dout"], t["out"], axis, dtype)})}
    return {"torch": placed(lambda t: {"out": forward(t["x"], axis)})}
