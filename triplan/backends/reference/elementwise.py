"""Elementwise ops in plain torch, in float64, and their running errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from triplan.backends.reference.expressions.evaluate import evaluated
from triplan.backends.table import CheckRules, reference
from triplan.backends.triton.elementwise.entries import OPS
from triplan.backends.triton.elementwise.guarantees import guarantee
from triplan.descriptors.elementwise.problems import ElementwiseDescriptor
from triplan.sku import ElementKind


def compute(desc: ElementwiseDescriptor, given: Mapping[str, Any]) -> Mapping[str, Tensor]:
    names = [o.name for o in desc.operands() if o.is_written]
    return {name: value for name, (value, _) in zip(names, evaluated(desc, given, False), strict=True)}


def running(desc: ElementwiseDescriptor, given: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """The running error of each result, in units of roundoff of its compute element; infinite where it is unbounded."""
    outputs = [o for o in desc.operands() if o.is_written]
    found = {}
    for o, (at, _), (_, bound) in zip(outputs, desc.tree.results, evaluated(desc, given, True), strict=True):
        assert bound is not None
        found[o.name] = bound / (desc.tree.types[at].element.compute.unit_roundoff or ElementKind.F32.unit_roundoff)
    return found


for _op, _elements in OPS.items():
    reference(op=_op, elements=_elements, guarantee=guarantee, checks=CheckRules(terms=running, signed=True))(compute)
