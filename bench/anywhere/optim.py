"""Draws of optimizer steps, norms and clipping: lists of separate tensors of many sizes, against torch's functions of
the same lists."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

import triplan as tp
from bench.anywhere.drawing import Draw, Peer, Tensors, described
from triplan.backends.reference.optim import STEPS, USUAL
from triplan.backends.triton.optim.pointwise import ELEMENTS

#: torch, whose functions of lists have no types; and its steps of lists.
aten: Any = torch
TORCHS: dict[str, Any] = {"adam": adam, "sgd": sgd}
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
    """Numbers that training has; squares; the second update. A norm by which elements are scaled. Each tensor of a list
    has memory of its own."""
    for name in desc.streams:
        t[name] = [x.clone() for x in t[name].split(list(desc.sizes))]
    if desc.op not in STEPS:
        if desc.op == "clip_norm":
            t["norm"].fill_(4.0)
        return
    t["hyper"].copy_(torch.tensor([USUAL[name] for name in desc.hyper]))
    t["steps"].fill_(1.0)
    for name in desc.kept:
        if name.endswith("_sq"):
            aten._foreach_abs_(t[name])


def peers(desc: Any) -> dict[str, Peer]:
    def norm(t: Tensors) -> Tensors:
        each = torch.stack(aten._foreach_norm(t["x"], desc.order, torch.float32))
        return {"norm": torch.linalg.vector_norm(each, desc.order).double().view(1)}

    def by_norm(t: Tensors) -> Tensors:
        scale = (t["limit"] / (t["norm"] + 1e-6)).clamp(max=1.0)
        aten._foreach_mul_(t["x"], scale.view(()).to(t["x"][0].dtype))
        return {"x": t["x"]}

    def by_value(t: Tensors) -> Tensors:
        aten._foreach_clamp_min_(t["x"], -t["limit"])
        aten._foreach_clamp_max_(t["x"], t["limit"])
        return {"x": t["x"]}

    def along(t: Tensors) -> Tensors:
        y = aten._foreach_mul(t["y"], t["s"].to(t["y"][0].dtype)) if "s" in t else t["y"]
        aten._foreach_add_(t["x"], y)
        return {"x": t["x"]}

    if desc.op == "list_expression":
        return {"torch foreach": along}
    if desc.op not in STEPS:
        return {"torch foreach": {"total_norm": norm, "clip_norm": by_norm, "clip_value": by_value}[desc.op]}

    single = {n: desc.replace(sizes=(n,)) for n in desc.sizes}

    def formula(t: Tensors) -> Tensors:
        """Of one tensor after the other."""
        hyper = t["hyper"].double()
        for i, n in enumerate(desc.sizes):
            given = {name: t[name][i].float() for name in desc.streams}
            found = STEPS[desc.op](single[n], {**given, "steps": t["steps"][i : i + 1], "hyper": hyper})
            for name, x in found.items():
                t[name][i].copy_(x)
        return {**{name: t[name] for name in ("param", *desc.kept)}, "steps": t["steps"].add_(1)}

    one_element = len({o.element for o in desc.operands() if o.name in desc.streams}) == 1
    if not one_element:  # torch's functions of lists take no other
        return {"torch": formula}
    steps = {"torch": formula, "torch foreach": in_lists(desc, foreach)}
    return steps if desc.op == "lion" else {**steps, "torch fused": in_lists(desc, fused)}


def in_lists(desc: Any, call: Any) -> Peer:
    """A step by ``call`` of (the problem, lists in the order of streams, steps, hyperparameters)."""

    def step(t: Tensors) -> Tensors:
        # On the CPU steps of it round to the element.
        wide = t if t["steps"].is_cuda else {name: [x.float() for x in t[name]] for name in desc.streams}
        call(desc, [wide[name] for name in desc.streams], [*t["steps"].unbind()], {n: USUAL[n] for n in desc.hyper})
        for name in ("param", *desc.kept) if wide is not t else ():
            aten._foreach_copy_(t[name], wide[name])
        return {name: t[name] for name in ("param", *desc.kept)}

    return step


def fused(desc: Any, lists: list[list[Tensor]], steps: list[Tensor], own: dict[str, Any]) -> None:
    aten._foreach_add_(steps, 1)
    if desc.op == "sgd":
        aten._fused_sgd_(*lists, **own, nesterov=desc.nesterov, maximize=False, is_first_step=False)
    else:
        call = aten._fused_adamw_ if desc.decoupled else aten._fused_adam_
        call(*lists, [], steps, **own, amsgrad=False, maximize=False)


def foreach(desc: Any, lists: list[list[Tensor]], steps: list[Tensor], own: dict[str, Any]) -> None:
    if desc.op == "lion":  # torch has none
        p, g, m = lists
        c = aten._foreach_lerp(m, g, 1 - own["beta1"])
        aten._foreach_mul_(p, 1 - own["lr"] * own["weight_decay"])
        aten._foreach_add_(p, aten._foreach_sign(c), alpha=-own["lr"])
        aten._foreach_lerp_(m, g, 1 - own["beta2"])
    elif desc.op == "sgd":
        TORCHS[desc.op](*lists, foreach=True, **own, nesterov=desc.nesterov, maximize=False)
    else:
        capturable, decoupled = steps[0].is_cuda, desc.decoupled
        flags: dict[str, Any] = {"foreach": True, "capturable": capturable, "decoupled_weight_decay": decoupled}
        TORCHS[desc.op](*lists, [], steps, **flags, **own, amsgrad=False, maximize=False)
