"""Elementwise ops in plain torch, in float64, and their running errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from triplan.backends.reference.expressions.evaluate import running, values
from triplan.backends.table import CheckRules, reference
from triplan.backends.triton.elementwise.entries import OPS, guarantee
from triplan.descriptors.elementwise.problems import ElementwiseDescriptor


def _names(desc: ElementwiseDescriptor) -> list[str]:
    return [o.name for o in desc.operands() if o.is_written]


def compute(desc: ElementwiseDescriptor, given: Mapping[str, Any]) -> Mapping[str, Tensor]:
    return values(desc, given, _names(desc))


def errors(desc: ElementwiseDescriptor, given: Mapping[str, Any]) -> Mapping[str, Tensor]:
    return running(desc, given, _names(desc))


for _op, _elements in OPS.items():
    reference(op=_op, elements=_elements, guarantee=guarantee, checks=CheckRules(terms=errors, signed=True))(compute)
