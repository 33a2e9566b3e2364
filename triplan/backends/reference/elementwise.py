"""Elementwise ops in plain torch, from their definitions: shares no computation with the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from triplan.backends.table import reference
from triplan.backends.triton.common import bounds
from triplan.descriptors import UnaryBackwardDescriptor, UnaryDescriptor
from triplan.sku import PrecisionGuarantee

Tensor = torch.Tensor
FLOATS = ("f16", "bf16", "f32", "f64")
#: f(x) of each op.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu_squared": lambda x: torch.where(x < 0, 0, x) ** 2,
}
#: dout * f'(x) of each op.
GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu_squared_backward": lambda dout, x: torch.where(x <= 0, 0, 2 * dout * x),
}
#: Roundings per result: one in each function above, and one in the float64 oracle.
ROUNDINGS = 2


def _guarantee(desc: UnaryDescriptor | UnaryBackwardDescriptor) -> Mapping[str, PrecisionGuarantee]:
    compute = desc.element.compute
    error = bounds.compounded(ROUNDINGS * compute.unit_roundoff)
    tolerance = bounds.tolerance(
        desc.element, compute, relative=error, lost=(ROUNDINGS * bounds.smallest_subnormal(compute),)
    )
    return bounds.of_outputs(desc, bounds.guarantee(compute, tolerance, batch=True, order=True))


for _op, _function in FUNCTIONS.items():

    @reference(op=_op, elements=FLOATS, guarantee=_guarantee)
    def _forward(
        desc: UnaryDescriptor, x: Mapping[str, Any], function: Callable[[Tensor], Tensor] = _function
    ) -> Mapping[str, Tensor]:
        return {"out": function(x["x"])}


for _op, _gradient in GRADIENTS.items():

    @reference(op=_op, elements=FLOATS, guarantee=_guarantee)
    def _backward(
        desc: UnaryBackwardDescriptor, x: Mapping[str, Any], gradient: Callable[[Tensor, Tensor], Tensor] = _gradient
    ) -> Mapping[str, Tensor]:
        return {"dx": gradient(x["dout"], x["x"])}
