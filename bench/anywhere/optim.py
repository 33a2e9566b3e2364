"""Draws of optimizer steps: lists of many sizes, against torch's formulas on the whole vectors."""

from __future__ import annotations

from typing import Any

import torch

import triplan as tp
from bench.anywhere.drawing import Draw, Peer, Tensors, described
from triplan.backends.reference.optim import STEPS, USUAL

#: Tensors of a list.
COUNTS = (1, 2, 12, 148)


def draw(op: str, d: Draw) -> tp.Descriptor:
    element, state = d.element(op), d.one_of((None, tp.ElementKind.F32))
    each = 2 * element.itemsize + {"adam": 2, "sgd": 1, "lion": 1}[op] * (state or element).itemsize
    total, count = max(d.bytes // each, 1), d.one_of(COUNTS)
    # Half of them equal, the others as skewed as an embedding beside biases.
    sizes = [total // count] * count if d.chance(0.5) else [max(total >> (i + 1), 1) for i in range(min(count, 20))]
    options = {"adam": {"decoupled": d.chance(0.5)}, "sgd": {"nesterov": d.chance(0.5)}}.get(op, {})
    return described(op, element=element, state_element=state, sizes=tuple(max(n, 1) for n in sizes), **options)


def complete(desc: Any, t: Tensors) -> None:
    """Numbers that training has; squares; the second update."""
    t["hyper"].copy_(torch.tensor([USUAL[name] for name in desc.hyper]))
    t["steps"].fill_(1.0)
    for name in desc.kept:
        if name.endswith("_sq"):
            t[name].abs_()


def peers(desc: Any) -> dict[str, Peer]:
    def formula(t: Tensors) -> Tensors:
        given = {name: x.float() if x.is_floating_point() else x for name, x in t.items() if x is not None}
        hyper = t["hyper"].double()
        found = STEPS[desc.op](desc, {**given, "hyper": hyper})
        # In place, as ours.
        return {**{name: t[name].copy_(x) for name, x in found.items()}, "steps": t["steps"].add_(1)}

    return {"torch": formula}
