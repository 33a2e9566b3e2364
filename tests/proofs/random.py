"""Random numbers for the proofs: rows of a tensor, each of which a part of it draws again where it stands."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import triplan as tp
from proofs import Drawn, Kind, Values, Variant, draw, joins
from triplan.descriptors.random import PARAMETERS, READING

#: Columns of a tensor, and of one that it is a block of.
COLUMNS, WHOLE = 37, 50
#: Of floats and of integers; the first element's index is no multiple of what one counter serves.
NUMBERS = {"low": (-0.75, -9), "high": (0.5, 100), "mean": (0.25,), "std": (1.5,), "lambd": (3.0,), "p": (0.375,)}
FIRST = 2**33 + 3


class Elements(Drawn):
    @property
    def _stride(self) -> int:
        return COLUMNS if self.desc.global_shape is None else WHOLE  # type: ignore[attr-defined]

    def parts(self) -> Iterator[Variant]:
        """Consecutive rows from other places; of a block, some columns of some."""
        n, columns = self.desc.out_shape  # type: ignore[attr-defined]
        for rows in (slice(n - 1, n), slice(0, n // 2), slice(n // 3, n)):
            yield self._part(rows, slice(0, columns))
        if self._stride != columns:
            yield self._part(slice(1, n), slice(5, 26))

    def reordered(self) -> Variant:
        """The rows of x upside down. Where nothing is read: what stands in one row in the next."""
        values = dict(self.values)
        if "x" in values:
            values["x"] = values["x"].flip(0).contiguous()
            return Variant(Elements(self.desc, lambda: values), lambda out: out["out"].flip(0), lambda out: out["out"])
        return Variant(
            Elements(self.desc, lambda: {**values, "first": FIRST + self._stride}),
            lambda out: out["out"][0],
            lambda out: out["out"][0],
        )

    def _part(self, rows: slice, columns: slice) -> Variant:
        desc, values = self.desc, dict(self.values)
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        values["first"] = FIRST + rows.start * self._stride + columns.start
        if "x" in values:
            values["x"] = values["x"][rows, columns].contiguous()
        part = Elements(desc.replace(out_shape=shape), lambda: values)
        return Variant(part, lambda out: out["out"], lambda out: out["out"][rows, columns].contiguous())


def values(desc: Any, kind: Kind) -> Values:
    g = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {n: NUMBERS[n][-1 if desc.op == "randint" else 0] for n in PARAMETERS[desc.op]}
    if desc.element == "bool" and desc.op == "randint":
        found = {"low": 0, "high": 2}
    if desc.op in READING:
        x = draw(desc.out_shape, desc.element, kind, 1, g)
        found["x"] = x.double().abs().fmod(1).to(x.dtype) if desc.op == "bernoulli" else x
    return {**found, "state": torch.tensor([-(2**62) - 5, 2**40 + 8]), "offset": 2**33 + 5, "first": FIRST}


def problem(op: str, n: int, element: tp.ElementKind, kind: Kind, block: bool = False) -> Elements:
    shape = (max(n // COLUMNS, 6), COLUMNS)
    whole = (shape[0], WHOLE) if block else None
    desc = tp.RandomDescriptor(op=op, element=element, out_shape=shape, global_shape=whole, state="device")
    return Elements(desc, partial(values, desc, kind))


for _op in tp.RandomDescriptor.ops():
    joins(_op, {"block": False}, {"block": True})(partial(problem, _op))
