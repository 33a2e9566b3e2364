"""Draws of cumulative sums and products along any axis, and of the backward of the products."""

from __future__ import annotations

from typing import Any

import torch

import triplan as tp
from bench.anywhere.drawing import Draw, Peer, Tensors, described, placed
from triplan.testing.placing import write

FOLLOWING = ("out",)


def draw(op: str, d: Draw) -> tp.Descriptor:
    element = d.element(op)
    rows, n = d.matrix(d.bytes // (element.itemsize * (4 if op.endswith("_backward") else 2)))
    shape = (*d.folded(rows), n)
    axis = len(shape) - 1
    if d.chance(0.3):  # along another axis
        axis = d.one_of(range(len(shape)))
        shape = (*shape[:axis], n, *shape[axis:-1])
    options = {} if op.endswith("_backward") else {"reverse": d.chance(0.3)}
    return described(op, input_shape=shape, scan_axis=axis, element=element, **options)


def complete(desc: Any, t: Tensors) -> None:
    """Factors whose products stay in range; ``out`` of the backward is what the forward wrote."""
    if desc.op != "cumsum" and desc.element.is_floating_point:
        write(t["x"], torch.where(t["x"] < 0, -1.0, 1.0).to(t["x"].dtype))
    if desc.op == "cumprod_backward":
        write(t["out"], torch.cumprod(t["x"], desc.scan_axis))


def peers(desc: Any) -> dict[str, Peer]:
    axis, aten = desc.scan_axis, torch.ops.aten
    if desc.op == "cumprod_backward":
        return {"torch": placed(lambda t: {"dx": aten.cumprod_backward(t["dout"], t["x"], axis, t["out"])})}
    scan = getattr(torch, desc.op)
    if desc.reverse:  # as torch's own backward of cumsum does
        return {"torch": placed(lambda t: {"out": scan(t["x"].flip(axis), axis).flip(axis)})}
    return {"torch": placed(lambda t: {"out": scan(t["x"], axis)})}
