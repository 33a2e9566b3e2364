"""Draws of elementwise ops. An op joins by its line in ``FORMULAS`` of ``bench/elementwise.py``."""

from __future__ import annotations

from typing import Any

import triplan as tp
from bench.anywhere.drawing import Draw, Peer, described
from bench.elementwise import FORMULAS


def draw(op: str, d: Draw) -> tp.Descriptor:
    element = d.element(op)
    rows, n = d.matrix(d.bytes // (element.itemsize * (3 if op.endswith("_backward") else 2)))
    return described(op, input_shape=(*d.folded(rows), n), element=element)


def peers(desc: Any) -> dict[str, Peer]:
    inputs = [o.name for o in desc.operands() if not o.is_written]
    (output,) = (o.name for o in desc.operands() if o.is_written)
    return {"torch": lambda t: {output: FORMULAS[desc.op](*(t[name] for name in inputs))}}
