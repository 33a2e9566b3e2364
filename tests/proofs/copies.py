"""Copies for the proofs: matrices of a batch, along which nothing moves; numbers that fill a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import triplan as tp
from proofs import Drawn, Kind, Problem, Values, Variant, draw, joins
from proofs.rows import Rows, picked

#: What each op does along the axes of matrices (n, ROWS, COLUMNS).
ROWS, COLUMNS = 5, 40
AMOUNTS = {"copy": (), "roll": (0, 2, 33), "tril": (3,), "pad": (0, 0, 1, -2, 3, 5)}
TURNED = {"x": tp.Layout.strided(unit_axis=1)}
#: An element that is rounded to another in the proofs of ``copy``.
ROUNDED = {"f64": "f16", "f32": "bf16", "f16": "f32", "bf16": "f16", "i64": "bf16"}


class Batch(Rows):
    """The batch is reordered, what lies within its matrices is not."""

    def reordered(self) -> Variant:
        order = torch.randperm(self._shape[0], generator=torch.Generator().manual_seed(1))
        return Variant(self._with(order), picked, partial(picked, rows=order))

    def _with(self, rows: torch.Tensor, order: torch.Tensor | None = None) -> Rows:
        kept = _laid(self.desc, {name: t[rows] for name, t in self.values.items() if name == "x"})
        shape = (len(rows), ROWS, COLUMNS)
        return Batch(self.desc.replace(input_shape=shape), lambda: {**self.values, **kept})


def _laid(desc: tp.Descriptor, values: Values) -> Values:
    turned = desc.operand("x").layout.unit_axis == 1
    return {name: t.mT.contiguous().mT if turned and name == "x" else t.clone() for name, t in values.items()}


def moved(op: str, n: int, element: tp.ElementKind, kind: Kind, turned: bool = False) -> Problem:
    cls: Any = tp.descriptor_types()[op]
    shape = (max(n // 100, 3), ROWS, COLUMNS)
    desc = cls(op=op, element=element, input_shape=shape, amounts=AMOUNTS[op], layouts=TURNED if turned else {})
    if op == "copy" and turned and element in ROUNDED:
        desc = desc.replace(out_element=ROUNDED[element])

    def values() -> Values:
        x = draw(shape, element, kind, 1, torch.Generator().manual_seed(0))
        return {**_laid(desc, {"x": x}), **({"value": 1} if op == "pad" else {})}

    return Batch(desc, values)


for _op in AMOUNTS:
    joins(_op, {"turned": False}, {"turned": True})(partial(moved, _op))


class Numbers(Drawn):
    """Each element is a problem of its own."""

    def parts(self) -> Iterator[Variant]:
        """The first elements of more or fewer."""
        n = self.desc.operand("out").numel
        for count in (1, n // 3, n // 2):
            size: Any = {"count": count} if self.desc.op == "arange" else {"out_shape": (count,)}
            part = Numbers(self.desc.replace(**size), lambda: self.values)
            yield Variant(part, picked, partial(picked, rows=torch.arange(count)))

    def reordered(self) -> Variant:
        return Variant(self, picked, picked)


@joins("fill")
def filled(n: int, element: tp.ElementKind, kind: Kind) -> Problem:
    value = 0.1 if element.is_floating_point else 1
    return Numbers(tp.FillDescriptor(element=element, out_shape=(n,)), lambda: {"value": value})


@joins("arange")
def counted(n: int, element: tp.ElementKind, kind: Kind) -> Problem:
    start, step = (0.5, 0.1) if element.is_floating_point else (-3, 7)
    return Numbers(tp.ArangeDescriptor(element=element, count=n), lambda: {"start": start, "step": step})


class Joined(Rows):
    """The batch is of rows."""

    @property
    def _shape(self) -> tuple[int, ...]:
        return (self.desc.rows,)  # type: ignore[attr-defined]

    def _with(self, rows: torch.Tensor, order: torch.Tensor | None = None) -> Rows:
        kept = {name: t[rows] for name, t in self.values.items()}
        return Joined(self.desc.replace(rows=len(rows)), lambda: kept)


@joins("join", {"vectors": False}, {"vectors": True})
def joined(n: int, element: tp.ElementKind, kind: Kind, vectors: bool) -> Problem:
    widths = (40, 16, 320) if vectors else (40, 1, 333)  # one kernel reads vectors of each tensor, one single elements
    desc = tp.JoinDescriptor(element=element, rows=max(n // 100, 3), widths=widths)
    g = torch.Generator().manual_seed(0)
    return Joined(desc, lambda: {f"x{i}": draw((desc.rows, w), element, kind, 1, g) for i, w in enumerate(widths)})
