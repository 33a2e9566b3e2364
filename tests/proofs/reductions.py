"""Reductions for the proofs: ``n`` rows, short ones and some that are divided into chunks."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from samples import REDUCTIONS

import triplan as tp
from proofs import Kind, Variant, draw, joins
from proofs.rows import Rows, picked, size
from triplan.descriptors.reductions import SUMS

#: Ops of squares and exponentials, which would leave the range.
NARROW = ("var", "std", "vector_norm", "logsumexp")


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


for _op in REDUCTIONS:
    joins(_op, {}, {"long": True})(partial(problem, _op))
