"""Elementwise ops for the proofs: ``n`` elements, each a problem of its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

import triplan as tp
from proofs import Kind, Outputs, Values, draw, joins
from proofs.rows import Rows

OPS = (*tp.UnaryDescriptor.ops(), *tp.UnaryBackwardDescriptor.ops())


def values(desc: tp.Descriptor, n: int, element: tp.ElementKind, kind: Kind) -> Values:
    g = torch.Generator().manual_seed(0)
    return {o.name: draw((n,), element, kind, 1, g) for o in desc.operands() if not o.is_written}


def problem(op: str, n: int, element: tp.ElementKind, kind: Kind) -> Rows:
    desc = tp.descriptor_types()[op](op=op, input_shape=(n,), element=element)
    return Rows(desc, partial(values, desc, n, element, kind))


def no_terms(desc: Any, x: Mapping[str, Any]) -> Outputs:
    """Nothing is summed: the error is relative to the result."""
    (name,) = (o.name for o in desc.operands() if o.is_written)
    return {name: torch.zeros(desc.input_shape, dtype=torch.float64)}


for _op in OPS:
    joins(_op, magnitude=no_terms)(partial(problem, _op))
