"""Sorting for the proofs: short rows, with ties; and longer ones where a GPU sorts them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import triplan as tp
from proofs import Drawn, Kind, Values, Variant, bits, draw, follows, joins
from triplan.sku import interpreting

#: Elements of a row, no multiple of a vector; the interpreter takes 0.1 s for a sort of 64.
LENGTH = 37
LONG = 9001 if torch.cuda.is_available() and not interpreting() else 83


class SortedRows(Drawn):
    def parts(self) -> Iterator[Variant]:
        """Fewer rows, from other places."""
        n = self.desc.rows  # type: ignore[attr-defined]
        for rows in (slice(n - 1, n), slice(0, n // 2), slice(n // 3, n)):
            yield Variant(self._of(rows), picked, partial(picked, rows=rows))

    def reordered(self) -> Variant:
        """The rows from the last elements to the first: equal elements have other positions."""
        values = {name: t.flip(1).contiguous() for name, t in self.values.items()}
        if "sequence" in values:
            values["sequence"] = self.values["sequence"]
        return Variant(SortedRows(self.desc, lambda: values), picked, picked)

    def _of(self, rows: slice) -> SortedRows:
        values = {name: t[rows].contiguous() for name, t in self.values.items()}
        return SortedRows(self.desc.replace(rows=rows.stop - rows.start), lambda: values)


def picked(out: Any, rows: slice = slice(None)) -> torch.Tensor:
    return torch.cat([bits(out[name][rows]).flatten() for name in sorted(out)])


def values(desc: Any, kind: Kind) -> Values:
    g = torch.Generator().manual_seed(0)

    def drawn(n: int) -> torch.Tensor:
        return draw((desc.rows, n), desc.element, kind, 1, g)

    if desc.op == "searchsorted":
        found = {"sequence": drawn(desc.n), "x": drawn(desc.m)}
        found["x"][:, : desc.n // 2] = found["sequence"][:, : desc.n // 2]
        return {**found, **follows(desc, found)}
    x = drawn(desc.n)
    x[:, desc.n // 2 : desc.n // 2 * 2] = x[:, : desc.n // 2]  # ties
    return {"x": x}


def problem(op: str, n: int, element: tp.ElementKind, kind: Kind, length: int = LENGTH, **options: Any) -> SortedRows:
    cls: Any = tp.descriptor_types()[op]
    desc = cls(op=op, element=element, rows=max(n // 40, 4), n=length, **options)
    return SortedRows(desc, partial(values, desc, kind))


for _op, _options in {
    "topk": ({"k": 4}, {"k": 10, "largest": False, "length": LONG}),
    "kthvalue": ({"k": 5}, {"k": 20, "length": LONG}),
    "sort": ({}, {"descending": True, "length": LONG}),
    "argsort": ({"descending": True}, {"length": LONG}),
    "searchsorted": ({"m": 37}, {"m": 50, "right": True, "sorter": True, "out_int32": True}),
}.items():
    joins(_op, *_options)(partial(problem, _op))
