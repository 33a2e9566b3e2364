"""Optimizer steps and clipping for the proofs: an empty tensor, one of one element, others that make chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from proofs import Drawn, Kind, Outputs, Values, Variant, draw, follows, joins
from triplan.backends.triton.common.tables import CHUNK


class Lists(Drawn):
    def parts(self) -> Iterator[Variant]:
        """Some of the tensors, in another order; the last alone."""
        count = len(self.desc.sizes)  # type: ignore[attr-defined]
        yield self._variant([count - 1])
        yield self._variant(list(range(count))[::-2])

    def reordered(self) -> Variant:
        """Elements in another order, also between tensors, whose steps are equal."""
        total = sum(self.desc.sizes)  # type: ignore[attr-defined]
        order = torch.randperm(total, generator=torch.Generator().manual_seed(1))
        if self.desc.op == "total_norm":
            order = torch.arange(total).flip(0)
        streams = self.desc.streams  # type: ignore[attr-defined]

        def permuted(values: Any) -> Values:
            return {name: t[order] if name in streams else t for name, t in values.items()}

        return Variant(Lists(self.desc, lambda: permuted(self.values)), joined, lambda out: joined(permuted(out)))

    def _variant(self, kept: list[int]) -> Variant:
        desc: Any = self.desc

        def taken(values: Any) -> dict[str, Tensor]:
            def some(name: str, t: Tensor) -> Tensor:
                parts = t.split(list(desc.sizes)) if name in desc.streams else t.split(1) if name == "steps" else ()
                return torch.cat([parts[i] for i in kept]) if parts else t

            return {name: some(name, t) for name, t in values.items()}

        fewer = desc.replace(sizes=tuple(desc.sizes[i] for i in kept))
        return Variant(Lists(fewer, lambda: taken(self.values)), joined, lambda out: joined(taken(out)))


def joined(out: Outputs) -> Tensor:
    return torch.cat([t.double() for _, t in sorted(out.items())])


def values(desc: Any, kind: Kind) -> Values:
    g = torch.Generator().manual_seed(0)
    found = {
        o.name: draw(o.shape, o.element, kind, 1, g)
        if o.name in desc.streams
        else torch.zeros(o.shape).to(o.element.torch)
        for o in desc.operands()
        if o.role != "output"
    }
    found |= follows(desc, found)
    if kind == "cancelling" and math.isfinite(getattr(desc, "order", math.inf)):
        # In f64 most orders of drawn terms give the same sum. Here a large term is followed by small ones, of 0.4 of
        # its ulp: those of its lane, or its part of the reference's sum, are lost one by one. Before it they are not.
        large = 64.0 if desc.order == 2 else 1.0
        x = torch.full((sum(desc.sizes),), large * (0.4 * 2.0**-52) ** (1 / desc.order), dtype=torch.float64)
        x[1] = large
        found["x"] = x.to(desc.element.torch)
    # The second update; a norm and a limit by which most elements change.
    known = {"steps": torch.full(found["steps"].shape, 2.0)} if "steps" in found else {"limit": 0.3}
    return found | known | ({"norm": torch.tensor([3.7], dtype=torch.float64)} if "norm" in found else {})


def problem(name: str, n: int, element: tp.ElementKind, kind: Kind, **fields: Any) -> Lists:
    cls: Any = tp.descriptor_types()[name]
    n = CHUNK if name == "total_norm" else n
    fields |= {"stochastic": element == "bf16"} if "stochastic" in fields else {}
    desc = cls(**{"op": name, "element": element, "sizes": (0, 1, n, 3 * n + 7), **fields})
    return Lists(desc, partial(values, desc, kind))


def expressions(n: int, element: tp.ElementKind, kind: Kind) -> Lists:
    x, y, s = (tp.expr.operand(name) for name in "xys")
    root = x * (tp.expr.sigmoid(y) if element.is_floating_point else y) + x
    lists: Any = {"x": (element, "list"), "y": (element, "list"), "s": ("f32", "one")}
    desc = tp.ListExpressionDescriptor.of({"x": root, "z": y * s}, (0, 1, n, 3 * n + 7), **lists)

    def values() -> Values:
        g = torch.Generator().manual_seed(0)
        return {name: draw(desc.shape, element, kind, 1, g) for name in "xy"} | {"s": torch.tensor(0.7)}

    return Lists(desc, values)


joins("list_expression")(expressions)

WIDE = {"grad_element": "f32", "state_element": "bf16"}
for _op, _options in {
    "adam": ({"amsgrad": True, "decoupled": False}, {"maximize": True, "scaled": True, "copy_element": "bf16"}, WIDE),
    "sgd": ({"nesterov": True}, {"momentum": False, "scaled": True}, WIDE),
    "lion": ({}, {"scaled": True, "stochastic": True}, WIDE),
    "total_norm": ({}, {"order": 3.0}, {"order": math.inf}, {"each": True}),
    "clip_norm": ({}, {"op": "clip_value"}),
}.items():
    joins(_op, *_options)(partial(problem, _op))
