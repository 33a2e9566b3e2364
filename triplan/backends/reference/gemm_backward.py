"""The adjoint of a matrix product in plain torch, from the definition. Shares nothing with the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from triplan.backends.reference.gemm import tolerance
from triplan.backends.table import reference
from triplan.descriptors import GemmBackwardDescriptor
from triplan.sku import MathPrecision, PrecisionGuarantee

Tensor = torch.Tensor
ELEMENTS = ("f16", "bf16", "f32", "f64")


def _guarantee(desc: GemmBackwardDescriptor) -> Mapping[str, PrecisionGuarantee]:
    compute = desc.element.compute
    terms = {"da": desc.n, "db": desc.m, "dbias": desc.m}
    return {
        name: PrecisionGuarantee(
            math_precision=MathPrecision(compute.value),
            accumulator=compute,
            deterministic=True,
            # The library behind torch.matmul may divide a sum by the number of threads.
            bit_stable_on_same_hardware=False,
            batch_invariant=False,
            order_invariant=False,
            tolerance=tolerance(desc.element, desc.out, count),
        )
        for name, count in terms.items()
        if getattr(desc, f"wants_{name}")
    }


@reference(op="gemm_backward", elements=ELEMENTS, guarantee=_guarantee)
def gemm_backward(desc: GemmBackwardDescriptor, x: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """da = alpha * dc @ b.T; db = alpha * a.T @ dc; dbias = the sum of the rows of dc."""
    alpha = 1.0 if x.get("alpha") is None else x["alpha"]
    found: dict[str, Tensor] = {}
    if desc.wants_da:
        found["da"] = alpha * (x["dc"] @ x["b"].t())
    if desc.wants_db:
        found["db"] = alpha * (x["a"].t() @ x["dc"])
    if desc.wants_dbias:
        found["dbias"] = x["dc"].sum(0)
    return found
