"""Draws of optimizer steps, norms and clipping: lists of many sizes, against torch's formulas on the whole vectors.

The plans get whole vectors, too. Clipping and expressions take such a vector as one tensor, so these figures say
nothing of the tables of addresses that lists of separate tensors need.
"""

from __future__ import annotations

import math
from typing import Any

import torch

import triplan as tp
from bench.anywhere.drawing import Draw, Peer, Tensors, described
from triplan.backends.reference.optim import STEPS, USUAL
from triplan.backends.triton.optim.pointwise import ELEMENTS

#: Tensors of a list.
COUNTS = (1, 2, 12, 148)


def _list_expression(d: Draw) -> tp.Descriptor:
    """A step along a direction whose length is on the device; of integers, a sum."""
    element = d.one_of((*ELEMENTS, *(e for e in ELEMENTS if e.is_floating_point)))
    x, y, s = (tp.expr.operand(name) for name in "xys")
    lists = {"x": (element, "list"), "y": (element, "list")}
    sizes = _sizes(d, 3 * element.itemsize)
    if not element.is_floating_point:
        return tp.ListExpressionDescriptor.of({"x": x + y}, sizes, **lists)
    return tp.ListExpressionDescriptor.of({"x": x + s * y}, sizes, **lists, s=("f32", "one"))


def _sizes(d: Draw, each: int) -> tuple[int, ...]:
    """Half of them equal, the others as skewed as an embedding beside biases. ``each``: bytes moved by an element."""
    total, count = max(d.bytes // each, 1), d.one_of(COUNTS)
    sizes = [total // count] * count if d.chance(0.5) else [max(total >> (i + 1), 1) for i in range(min(count, 20))]
    return tuple(max(n, 1) for n in sizes)


def draw(op: str, d: Draw) -> tp.Descriptor:
    if op == "list_expression":
        return _list_expression(d)
    element, state = d.element(op), d.one_of((None, tp.ElementKind.F32))
    each = element.itemsize
    if op in STEPS:
        each += element.itemsize + {"adam": 2, "sgd": 1, "lion": 1}[op] * (state or element).itemsize
    sizes = _sizes(d, each)
    options: dict[str, Any] = {"adam": {"decoupled": d.chance(0.5)}, "sgd": {"nesterov": d.chance(0.5)}}.get(op, {})
    if op in STEPS:
        options |= {"state_element": state}
    elif op == "total_norm":
        options = {"order": d.one_of((2.0, 2.0, 1.0, math.inf))}
    return described(op, element=element, sizes=sizes, **options)


def complete(desc: Any, t: Tensors) -> None:
    """Numbers that training has; squares; the second update. A norm by which elements are scaled."""
    if desc.op not in STEPS:
        if desc.op == "clip_norm":
            t["norm"].fill_(4.0)
        return
    t["hyper"].copy_(torch.tensor([USUAL[name] for name in desc.hyper]))
    t["steps"].fill_(1.0)
    for name in desc.kept:
        if name.endswith("_sq"):
            t[name].abs_()


def peers(desc: Any) -> dict[str, Peer]:
    def norm(t: Tensors) -> Tensors:
        return {"norm": torch.linalg.vector_norm(t["x"], desc.order, dtype=torch.float32).double().view(1)}

    def by_norm(t: Tensors) -> Tensors:
        return {"x": t["x"].mul_((t["limit"] / (t["norm"] + 1e-6)).clamp(max=1.0))}

    def by_value(t: Tensors) -> Tensors:
        return {"x": t["x"].clamp_(-t["limit"], t["limit"])}

    def along(t: Tensors) -> Tensors:
        return {"x": t["x"].add_(t["s"] * t["y"] if "s" in t else t["y"])}

    if desc.op == "list_expression":
        return {"torch": along}
    if desc.op not in STEPS:
        return {"torch": {"total_norm": norm, "clip_norm": by_norm, "clip_value": by_value}[desc.op]}

    whole = desc.replace(sizes=(sum(desc.sizes),))  # all tensors are in the same step

    def formula(t: Tensors) -> Tensors:
        given = {name: x.float() if x.is_floating_point() else x for name, x in t.items() if x is not None}
        found = STEPS[desc.op](whole, {**given, "steps": given["steps"][:1], "hyper": t["hyper"].double()})
        # In place, as ours.
        return {**{name: t[name].copy_(x) for name, x in found.items()}, "steps": t["steps"].add_(1)}

    one_element = len({o.element for o in desc.operands() if o.name in desc.streams}) == 1
    return {"torch": formula, **({"torch fused": fused(desc)} if one_element and desc.op != "lion" else {})}


def fused(desc: Any) -> Peer:
    """torch's fused step over the tensors of the vectors."""
    aten: Any = torch

    def step(t: Tensors) -> Tensors:
        # On the CPU steps of it round to the element.
        wide = t if t["param"].is_cuda else {name: t[name].float() for name in desc.streams}
        lists = [list(wide[name].split(list(desc.sizes))) for name in desc.streams]
        own = {name: USUAL[name] for name in desc.hyper}
        steps = list(t["steps"].split(1))
        aten._foreach_add_(steps, 1)
        if desc.op == "sgd":
            aten._fused_sgd_(*lists, **own, nesterov=desc.nesterov, maximize=False, is_first_step=False)
        else:
            call = aten._fused_adamw_ if desc.decoupled else aten._fused_adam_
            call(*lists, [], steps, **own, amsgrad=False, maximize=False)
        return {name: t[name].copy_(wide[name]) for name in ("param", *desc.kept)}

    return step
