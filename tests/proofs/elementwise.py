"""Elementwise ops for the proofs: ``n`` elements, each a problem of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

import triplan as tp
from proofs import Drawn, Kind, Outputs, Values, Variant, draw, joins

OPS = (*tp.UnaryDescriptor.ops(), *tp.UnaryBackwardDescriptor.ops())


class Elementwise(Drawn):
    def _taken(self, at: torch.Tensor) -> Variant:
        values = {name: t[at].clone() for name, t in self.values.items()}
        part = Elementwise(self.desc.replace(input_shape=(len(at),)), lambda: values)
        return Variant(part, _only, lambda out: _only(out)[at])

    def parts(self) -> Iterator[Variant]:
        n = self.desc.input_shape[0]  # type: ignore[attr-defined]
        for at in (torch.tensor([n - 1]), torch.arange(0, n, 2), torch.arange(n // 3 + 1) + n // 2):
            yield self._taken(at)

    def reordered(self) -> Variant:
        n = self.desc.input_shape[0]  # type: ignore[attr-defined]
        return self._taken(torch.randperm(n, generator=torch.Generator().manual_seed(1)))


def _only(out: Outputs) -> torch.Tensor:
    (found,) = out.values()
    return found


def values(desc: tp.Descriptor, n: int, element: tp.ElementKind, kind: Kind) -> Values:
    g = torch.Generator().manual_seed(0)
    return {o.name: draw((n,), element, kind, 1, g) for o in desc.operands() if not o.is_written}


def problem(op: str, n: int, element: tp.ElementKind, kind: Kind) -> Elementwise:
    desc = tp.descriptor_types()[op](op=op, input_shape=(n,), element=element)
    return Elementwise(desc, partial(values, desc, n, element, kind))


def no_terms(desc: Any, x: Mapping[str, Any]) -> Outputs:
    """Nothing is summed: the error is relative to the result."""
    (name,) = (o.name for o in desc.operands() if o.is_written)
    return {name: torch.zeros(desc.input_shape, dtype=torch.float64)}


for _op in OPS:
    joins(_op, magnitude=no_terms)(partial(problem, _op))
