"""Elementwise ops for the proofs: ``n`` elements, each a problem of its own. One op stands for each descriptor."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from samples import SAMPLES

import triplan as tp
from proofs import Kind, Values, draw, joins
from proofs.rows import Rows

a, b = tp.expr.operand("a"), tp.expr.operand("b")
OPS = tuple(op for op, desc in SAMPLES.items() if desc.category is tp.OpCategory.ELEMENTWISE)


class Elements(Rows):
    """The problems of expressions, too, whose shapes stand in ``inputs``."""

    def _with(self, rows: torch.Tensor, order: torch.Tensor | None = None) -> Rows:
        found = {name: self.taken(name, t, rows, order).clone() for name, t in self.values.items()}
        return Elements(described(self.desc.op, len(rows), self.desc.element), lambda: found)  # type: ignore[attr-defined]


def described(op: str, n: int, element: tp.ElementKind) -> Any:
    if op == "expression":
        root = a * (tp.expr.sigmoid(a) if element.is_floating_point else a) + b
        return tp.ExpressionDescriptor.of(root, a=(element, (n,)), b=(element, (n,)))
    return tp.descriptor_types()[op](op=op, input_shape=(n,), element=element)


def values(desc: tp.Descriptor, n: int, element: tp.ElementKind, kind: Kind) -> Values:
    g = torch.Generator().manual_seed(0)
    return {o.name: draw((n,), element, kind, 1, g) for o in desc.operands() if o.is_tensor and not o.is_written}


def problem(op: str, n: int, element: tp.ElementKind, kind: Kind) -> Rows:
    desc = described(op, n, element)
    return Elements(desc, partial(values, desc, n, element, kind))


for _op in OPS:
    joins(_op)(partial(problem, _op))
