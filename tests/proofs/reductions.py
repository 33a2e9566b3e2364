"""Reductions for the proofs: ``n`` rows, short ones and some that are divided into chunks."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from samples import REDUCED_EXPRESSIONS, REDUCTIONS

import triplan as tp
from proofs import Kind, Variant, draw, joins
from proofs.rows import Rows, picked, size
from triplan.descriptors.reductions import SUMS

#: Ops of squares and exponentials, which would leave the range.
NARROW = ("var", "std", "vector_norm", "logsumexp", "var_mean")


class Lines(Rows):
    """Another order is one within the rows."""

    def reordered(self) -> Variant:
        n, length = self._shape
        order = torch.randperm(length, generator=torch.Generator().manual_seed(1))
        return Variant(self._with(torch.arange(n), order), picked, picked)


def values(desc: Any, n: int, length: int, element: tp.ElementKind, kind: Kind) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = draw((n, length), element, kind, length, g)
    if desc.op in NARROW and element.is_floating_point:
        x = torch.randn((n, length), generator=g, dtype=torch.float64)
        if desc.op == "logsumexp":  # shows the order of a sum only if that is near 1
            x -= math.log(length) + 1
            x[:, 0] = 0
        x = x.to(element.torch)
    elif kind == "cancelling" and element.is_floating_point:
        x[:, length // 2 : length // 2 * 2] = -x[:, : length // 2]
    return {"x": x}


def problem(op: str, n: int, element: tp.ElementKind, kind: Kind, long: bool = False) -> Lines:
    n, length = size(n, long)
    cls: Any = tp.descriptor_types()[op]
    desc = cls(op=op, input_shape=(n, length), reduce_axes=(1,), element=element)
    if kind == "cancelling" and element.is_floating_point and op in SUMS:  # a narrow result would show no order
        desc = desc.replace(out_element=element.compute)
    return Lines(desc, partial(values, desc, n, length, element, kind))


# --- of expressions ---

a, b = tp.expr.operand("a"), tp.expr.operand("b")


class Values(Lines):
    """Lines of the values of an expression, whose shapes stand in ``inputs``."""

    def _with(self, rows: torch.Tensor, order: torch.Tensor | None = None) -> Rows:
        found = {name: self.taken(name, t, rows, order).clone() for name, t in self.values.items()}
        desc: Any = self.desc
        made = described(desc.op, (len(rows), desc.input_shape[1]), desc.element, desc.out_element)
        return Values(made, lambda: found)


def described(
    op: str,
    shape: tuple[int, ...],
    element: tp.ElementKind,
    out: tp.ElementKind | None = None,
    axes: tuple[int, ...] = (1,),
) -> Any:
    """The reduction of a * b, which cancels where one of the factors does."""
    return tp.ExpressionReductionDescriptor.of(op, a * b, axes, out, a=(element, shape), b=(element, shape))


def factors(n: int, length: int, element: tp.ElementKind, kind: Kind) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x, y = (draw((n, length), element, kind, length, g) for _ in range(2))
    if kind == "cancelling" and element.is_floating_point:
        half = length // 2
        y = (0.5 + torch.rand((n, length), generator=g, dtype=torch.float64)).to(element.torch)
        x[:, half : 2 * half], y[:, half : 2 * half] = -x[:, :half], y[:, :half]
    return {"a": x, "b": y}


def of_expression(op: str, n: int, element: tp.ElementKind, kind: Kind, long: bool = False) -> Values:
    n, length = size(n, long)
    wide = kind == "cancelling" and element.is_floating_point and op == "sum_expression"
    desc = described(op, (n, length), element, element.compute if wide else None)
    return Values(desc, partial(factors, n, length, element, kind))


for _op in REDUCED_EXPRESSIONS:
    joins(_op, {}, {"long": True})(partial(of_expression, _op))

for _op in REDUCTIONS:
    joins(_op, {}, {"long": True})(partial(problem, _op))
