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
#: The columns of a problem whose operand a is contiguous along the rows.
TURNED = 40


class Elements(Rows):
    """The problems of expressions, too, whose shapes stand in ``inputs``."""

    def _with(self, rows: torch.Tensor, order: torch.Tensor | None = None) -> Rows:
        found = {name: self.taken(name, t, rows, order).clone() for name, t in self.values.items()}
        desc: Any = self.desc
        return Elements(described(desc.op, len(rows), desc.element, bool(desc.layouts)), partial(_laid, desc, found))


def described(op: str, n: int, element: tp.ElementKind, turned: bool = False) -> Any:
    shape = (n, TURNED) if turned else (n,)
    if op != "expression":
        desc: Any = tp.descriptor_types()[op](op=op, input_shape=shape, element=element)
        first = next(o.name for o in desc.operands() if not o.is_written)
        return desc.replace(layouts={first: tp.Layout.strided(unit_axis=0)} if turned else {})
    root = a * (tp.expr.sigmoid(a) if element.is_floating_point else a) + b
    desc = tp.ExpressionDescriptor.of(root, a=(element, shape), b=(element, shape))
    return desc.replace(layouts={"a": tp.Layout.strided(unit_axis=0)} if turned else {})


def _laid(desc: tp.Descriptor, values: Values) -> Values:
    """``values`` in the layouts of ``desc``."""
    return {
        name: t.t().contiguous().t() if desc.operand(name).layout.unit_axis == 0 else t for name, t in values.items()
    }


def values(desc: Any, element: tp.ElementKind, kind: Kind) -> Values:
    g = torch.Generator().manual_seed(0)
    read = [o.name for o in desc.operands() if o.is_tensor and not o.is_written]
    return _laid(desc, {name: draw(desc.operand(name).shape, element, kind, 1, g) for name in read})


def problem(op: str, n: int, element: tp.ElementKind, kind: Kind, turned: bool = False) -> Rows:
    desc = described(op, max(n // TURNED, 16) if turned else n, element, turned)
    return Elements(desc, partial(values, desc, element, kind))


for _op in OPS:
    joins(_op, {"turned": False}, {"turned": True})(partial(problem, _op))
