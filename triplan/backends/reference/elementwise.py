"""Elementwise ops in plain torch, from their definitions: shares no computation with the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from triplan.backends.table import CheckRules, reference
from triplan.backends.triton.common import bounds
from triplan.descriptors import UnaryBackwardDescriptor, UnaryDescriptor
from triplan.sku import PrecisionGuarantee

Tensor = torch.Tensor
FLOATS = ("f16", "bf16", "f32", "f64")
RULES = CheckRules(terms=CheckRules.no_terms)
#: f(x) of each op, and its roundings.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "relu_squared": (lambda x: torch.where(x < 0, 0, x) ** 2, 1),
}
#: dout * f'(x) of each op, and its roundings.
GRADIENTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "relu_squared_backward": (lambda dout, x: torch.where(x <= 0, 0, 2 * dout * x), 1),
}


def _guarantee(desc: UnaryDescriptor | UnaryBackwardDescriptor) -> Mapping[str, PrecisionGuarantee]:
    compute = desc.element.compute
    _, own = {**FUNCTIONS, **GRADIENTS}[desc.op]
    roundings = 2 * own  # the float64 oracle has as many
    error = bounds.compounded(roundings * compute.unit_roundoff)
    tolerance = bounds.tolerance(
        desc.element, compute, relative=error, lost=(roundings * bounds.smallest_subnormal(compute),)
    )
    return bounds.of_outputs(desc, bounds.guarantee(compute, tolerance, batch=True, order=True))


for _op, (_function, _) in FUNCTIONS.items():

    @reference(op=_op, elements=FLOATS, guarantee=_guarantee, checks=RULES)
    def _forward(
        desc: UnaryDescriptor, x: Mapping[str, Any], function: Callable[[Tensor], Tensor] = _function
    ) -> Mapping[str, Tensor]:
        return {"out": function(x["x"])}


for _op, (_gradient, _) in GRADIENTS.items():

    @reference(op=_op, elements=FLOATS, guarantee=_guarantee, checks=RULES)
    def _backward(
        desc: UnaryBackwardDescriptor, x: Mapping[str, Any], gradient: Callable[[Tensor, Tensor], Tensor] = _gradient
    ) -> Mapping[str, Tensor]:
        return {"dx": gradient(x["dout"], x["x"])}
