"""Matrix products in plain torch, from the definition."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from triplan.backends.table import CheckRules, reference
from triplan.backends.triton.common import bounds
from triplan.descriptors import GemmBackwardDescriptor
from triplan.descriptors.gemm import MatrixProductDescriptor, MultiplyingDescriptor
from triplan.sku import ElementKind, MathPrecision, PrecisionGuarantee, Tolerance
from triplan.sku.facts import fact

Tensor = torch.Tensor
ELEMENTS = ("f16", "bf16", "f32", "f64")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": lambda x: torch.where(x < 0, torch.zeros_like(x), x),  # NaN stays NaN
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x * math.sqrt(0.5))),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}
#: The steepest slope of an activation (1.129, of gelu): how much it amplifies the error of its argument.
ACTIVATION_SLOPE = 1.13
#: Roundings within an activation.
ACTIVATION_ROUNDINGS = 16
#: Roundings by alpha, beta, bias and their additions.
EPILOGUE_ROUNDINGS = 8
#: Largest |alpha| and |beta| for which the tolerance covers underflow: both scale the absolute loss.
MAX_SCALE = 4
#: Below it a multiplicand of tf32x3 has a subnormal second part: it is 22 bits below the first.
TF32X3_LEAST = 2.0**-116
#: The least number of tf32: what is smaller may become 0, and NaN where it meets an infinity.
TF32_SMALLEST = 2.0**-136


@fact
def _tolerance(element: ElementKind, out: ElementKind, k: int, activated: bool) -> Tolerance:
    """k products accumulated in any order, then alpha, beta, bias and an activation (relu has no error of its own)."""
    compute = element.compute
    roundings = k + EPILOGUE_ROUNDINGS
    accumulated = bounds.compounded(roundings * math.log1p(compute.unit_roundoff))
    if compute is ElementKind.F64:
        accumulated *= 2  # the oracle is no more precise: its own error
    slope, roundings_within = (ACTIVATION_SLOPE, ACTIVATION_ROUNDINGS) if activated else (1.0, 0)
    amplified = slope * accumulated * (1 + bounds.narrowing(out, compute))
    return bounds.tolerance(
        out,
        compute,
        per_term=amplified + roundings_within * compute.unit_roundoff,
        last=0.0,  # ``amplified`` includes the rounding of the result
        lost=(MAX_SCALE * roundings * bounds.smallest_subnormal(compute),),
    )


@fact
def _product_guarantee(element: ElementKind, out: ElementKind, k: int, activated: bool = False) -> PrecisionGuarantee:
    # The library behind torch.matmul may cut k into as many pieces as there are threads.
    return bounds.guarantee(element.compute, _tolerance(element, out, k, activated), bit_stable=False)


def _guarantee(desc: MatrixProductDescriptor) -> Mapping[str, PrecisionGuarantee]:
    if not desc.element.is_floating_point:
        return bounds.of_outputs(desc, PrecisionGuarantee.exact(desc.sums))
    activated = desc.activation in ("gelu", "silu")
    return bounds.of_outputs(desc, _product_guarantee(desc.element, desc.out, desc.k, activated))


# --- what checks must know: sum|terms|, from absolute values; infinite where the bare product leaves its range ---


def factors(desc: MultiplyingDescriptor, x: Mapping[str, Any], *names: str) -> list[Tensor]:
    """Magnitudes of what is multiplied: tensor cores align products before they are normalised, so that a subnormal
    number of f16 or bf16 counts for as much as the smallest normal one. So it does in tf32, whose steps are no finer
    there, and in tf32x3 whatever has a subnormal second part."""
    tiny = torch.finfo(desc.element.torch).tiny
    of_f32 = {MathPrecision.TF32: tiny, MathPrecision.TF32X3: TF32X3_LEAST}
    least = tiny if desc.element.itemsize == 2 else of_f32.get(desc.multiplicands, 0.0)
    return [torch.where(x[name] > 0, x[name].clamp(min=least), x[name]) for name in names]


def _reach(desc: MultiplyingDescriptor) -> float:
    return torch.finfo(desc.element.compute.torch).max / 2


def _terms(desc: MatrixProductDescriptor, x: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Before the activation. Integers are exact."""
    if not desc.element.is_floating_point:
        return {}
    alpha, beta = (1.0 if x.get(name) is None else x[name] for name in ("alpha", "beta"))
    a, b = factors(desc, x, "a", "b")
    product = a @ b
    found = alpha * product
    if desc.reads_c0:
        found = found + beta * x["c0"]
    if desc.has_bias:
        found = found + x["bias"]
    return dict.fromkeys(desc.written, torch.where(product > _reach(desc), torch.inf, found))


def _backward_terms(desc: GemmBackwardDescriptor, x: Mapping[str, Any]) -> Mapping[str, Tensor]:
    alpha = 1.0 if x.get("alpha") is None else x["alpha"]
    found = {}
    if desc.wants_da:
        dc, b = factors(desc, x, "dc", "b")
        found["da"] = dc @ b.t()
    if desc.wants_db:
        a, dc = factors(desc, x, "a", "dc")
        found["db"] = a.t() @ dc
    found = {name: torch.where(t > _reach(desc), torch.inf, alpha * t) for name, t in found.items()}
    if desc.wants_dbias:
        found["dbias"] = x["dc"].sum(0)
    return found


def _inputs(desc: MultiplyingDescriptor, x: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Beside infinities, 0 for what tf32 may take for 0: infinity times it would be NaN, or not. What is promised to be
    symmetric is so."""
    follows = _symmetric(desc, x) if isinstance(desc, MatrixProductDescriptor) and desc.symmetric else {}
    found = {name: {**x, **follows}[name] for name in ("a", "b", "dc") if isinstance(x.get(name), Tensor)}
    tf32 = desc.multiplicands in (MathPrecision.TF32, MathPrecision.TF32X3)
    if not tf32 or all(bool(t.isfinite().all()) for t in found.values()):
        return follows
    return {**follows, **{name: torch.where(t.abs() < TF32_SMALLEST, 0.0, t) for name, t in found.items()}}


def _symmetric(desc: MatrixProductDescriptor, x: Mapping[str, Any]) -> dict[str, Tensor]:
    """A matrix, its transpose and a symmetric c0; ones where an axis has a stride of 0."""
    given = {name: x[name] for name in ("a", "b", "c0") if isinstance(x.get(name), Tensor)}
    if any(o.layout.zero_axes for o in desc.operands()):
        return {name: torch.ones_like(t) for name, t in given.items()}
    found = {"b": given["a"].mT}
    return found | ({"c0": given["c0"].tril() + given["c0"].tril(-1).mT} if "c0" in given else {})


_RULES = CheckRules(_terms, _inputs, integers=lambda desc: desc.activation in ("identity", "relu"))
_BACKWARD_RULES = CheckRules(_backward_terms, _inputs, integers=lambda desc: True)


# --- ops ---


@reference(op="gemm", elements=(*ELEMENTS, "i8"), guarantee=_guarantee, checks=_RULES)
@reference(op="batched_gemm", elements=(*ELEMENTS, "i8"), guarantee=_guarantee, checks=_RULES)
def gemm(desc: MatrixProductDescriptor, x: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """c = act(pre), pre = alpha * a @ b + beta * c0 + bias.

    With beta = 0, c0 is not read. Integers are reduced modulo 2**32.
    """
    integer = not desc.element.is_floating_point
    if integer:
        x = {name: v.long() if isinstance(v, Tensor) else v for name, v in x.items()}
    one = 1 if integer else 1.0
    alpha, beta = (one if x.get(name) is None else x[name] for name in ("alpha", "beta"))
    pre = alpha * (x["a"] @ x["b"])
    if desc.reads_c0 and beta != 0:
        pre = pre + beta * x["c0"]
    if desc.has_bias:
        pre = pre + x["bias"]
    if integer:
        pre = pre.to(torch.int32)
    c = ACTIVATIONS[desc.activation](pre)
    return {"c": c, "pre": pre} if desc.saves_pre else {"c": c}


def _backward_guarantee(desc: GemmBackwardDescriptor) -> Mapping[str, PrecisionGuarantee]:
    terms = {"da": desc.n, "db": desc.m, "dbias": desc.m}
    return {o.name: _product_guarantee(desc.element, desc.out, terms[o.name]) for o in desc.operands() if o.is_written}


@reference(op="gemm_backward", elements=ELEMENTS, guarantee=_backward_guarantee, checks=_BACKWARD_RULES)
def gemm_backward(desc: GemmBackwardDescriptor, x: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """da = alpha * dc @ b.T, db = alpha * a.T @ dc, dbias = the sum of dc's rows."""
    alpha = 1.0 if x.get("alpha") is None else x["alpha"]
    found: dict[str, Tensor] = {}
    if desc.wants_da:
        found["da"] = alpha * (x["dc"] @ x["b"].t())
    if desc.wants_db:
        found["db"] = alpha * (x["a"].t() @ x["dc"])
    if desc.wants_dbias:
        found["dbias"] = x["dc"].sum(0)
    return found
