"""Matrix products in plain torch, from the definition. Shares nothing with the kernels but the descriptors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch

from triplan.backends.table import reference
from triplan.descriptors import GemmBackwardDescriptor, MatrixProductDescriptor
from triplan.sku import ElementKind, MathPrecision, PrecisionGuarantee, Tolerance

Tensor = torch.Tensor
ELEMENTS = ("f16", "bf16", "f32", "f64")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": lambda x: torch.where(x < 0, torch.zeros_like(x), x),  # NaN stays
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x * math.sqrt(0.5))),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


@lru_cache(maxsize=256)
def tolerance(element: ElementKind, out: ElementKind, k: int) -> Tolerance:
    """k products and additions in any order, alpha, beta, bias, then an activation of slope at most 1.13."""
    compute = element.compute
    info, smallest = torch.finfo(compute.torch), torch.finfo(out.torch)
    roundings = math.expm1(min((k + 8) * math.log1p(compute.unit_roundoff), 700.0))
    final = out.unit_roundoff if out is not compute else 0.0
    lost = float(info.smallest_normal * info.eps)
    return Tolerance(
        rtol=final,
        # The float64 oracle, where it is no wider, is off by as much.
        ctol=1.13 * roundings * (1 + final) * (2 if compute is ElementKind.F64 else 1) + 16 * compute.unit_roundoff,
        underflow=4 * (k + 8) * lost + float(smallest.smallest_normal * smallest.eps),
    )


def _guarantee(desc: MatrixProductDescriptor) -> Mapping[str, PrecisionGuarantee]:
    compute = desc.element.compute
    if not compute.is_floating_point:
        return dict.fromkeys(desc.written, PrecisionGuarantee.exact(desc.sums))
    found = PrecisionGuarantee(
        math_precision=MathPrecision(compute.value),
        accumulator=compute,
        deterministic=True,
        # The library behind torch.matmul may divide k by the number of threads.
        bit_stable_on_same_hardware=False,
        batch_invariant=False,
        order_invariant=False,
        tolerance=tolerance(desc.element, desc.out, desc.k),
    )
    return dict.fromkeys(desc.written, found)


@reference(op="gemm", elements=(*ELEMENTS, "i8"), guarantee=_guarantee)
@reference(op="batched_gemm", elements=(*ELEMENTS, "i8"), guarantee=_guarantee)
def gemm(desc: MatrixProductDescriptor, x: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """c = act(pre) and pre = alpha * a @ b + beta * c0 + bias; with beta = 0, c0 is not read. Integers are taken modulo
    2**32."""
    integer = not desc.element.is_floating_point
    if integer:
        x = {name: v.long() if isinstance(v, Tensor) else v for name, v in x.items()}
    one = 1 if integer else 1.0
    alpha, beta = (one if x.get(name) is None else x[name] for name in ("alpha", "beta"))
    found = alpha * (x["a"] @ x["b"])
    if desc.reads_c0 and beta != 0:
        found = found + beta * x["c0"]
    if desc.has_bias:
        found = found + x["bias"]
    if integer:
        found = found.to(torch.int32)
    return {"c": ACTIVATIONS[desc.activation](found), **({"pre": found} if desc.saves_pre else {})}


def _backward_guarantee(desc: GemmBackwardDescriptor) -> Mapping[str, PrecisionGuarantee]:
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


@reference(op="gemm_backward", elements=ELEMENTS, guarantee=_backward_guarantee)
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
