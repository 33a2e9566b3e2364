"""Elementwise ops for the proofs: ``n`` elements, each a problem of its own."""

from __future__ import annotations

from functools import partial

import torch

import triplan as tp
from proofs import Kind, Values, draw, joins
from proofs.rows import Rows

OPS = (*tp.UnaryDescriptor.ops(), *tp.UnaryBackwardDescriptor.ops())


def values(desc: tp.Descriptor, n: int, element: tp.ElementKind, kind: Kind) -> Values:
    g = torch.Generator().manual_seed(0)
    return {o.name: draw((n,), element, kind, 1, g) for o in desc.operands() if not o.is_written}


def problem(op: str, n: int, element: tp.ElementKind, kind: Kind) -> Rows:
    desc = tp.descriptor_types()[op](op=op, input_shape=(n,), element=element)
    return Rows(desc, partial(values, desc, n, element, kind))


for _op in OPS:
    joins(_op)(partial(problem, _op))
