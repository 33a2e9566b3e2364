"""The rowwise family in plain torch, from the definitions. Shares nothing with the kernels but the descriptors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch

from triplan.backends.table import Compute, reference
from triplan.sku import ElementKind, MathPrecision, PrecisionGuarantee, Tolerance

Tensor = torch.Tensor
Outputs = Mapping[str, Tensor]
FLOATS = ("f16", "bf16", "f32", "f64")
#: The largest exponent of which an exponential is not yet 0: its relative error is so many times that of its argument.
EXPONENT = {ElementKind.F32: 104.0, ElementKind.F64: 746.0}


@lru_cache(maxsize=1024)
def _guarantee(element: ElementKind, additions: int, exponential: bool) -> PrecisionGuarantee:
    """Roundings: ``additions`` of a sum, a dozen of other operations, and those of an exponential's argument."""
    compute = element.compute
    u, final = compute.unit_roundoff, element.unit_roundoff
    roundings = additions + 12 + (3 * EXPONENT[compute] if exponential else 0)
    error = math.expm1(roundings * u)
    info, small = torch.finfo(element.torch), torch.finfo(compute.torch)
    return PrecisionGuarantee(
        math_precision=MathPrecision(compute.value),
        accumulator=compute,
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=False,  # torch's sums may be blocked by the batch
        order_invariant=False,
        tolerance=Tolerance(
            rtol=error + (final if compute is not element else 0.0),
            ctol=error * (1 + final),
            underflow=float(info.smallest_normal * info.eps + (additions + 12) * small.smallest_normal),
        ),
    )


def _rows(exponential: bool) -> Callable[[Any], Mapping[str, PrecisionGuarantee]]:
    def guarantee(desc: Any) -> Mapping[str, PrecisionGuarantee]:
        outputs = [o for o in desc.operands() if o.is_written]
        terms = desc.input_shape[desc.softmax_axis]
        return {o.name: _guarantee(desc.element, terms, exponential) for o in outputs}

    return guarantee


def _declare(op: str, exponential: bool) -> Callable[[Compute], Compute]:
    return reference(op=op, elements=FLOATS, guarantee=_rows(exponential))


def _shifted(x: Tensor, axis: int) -> Tensor:
    """``x`` less its rows' maxima; the definition is the same without, but overflows."""
    if x.numel() == 0:
        return x
    return x - x.max(axis, keepdim=True).values


@_declare("softmax", exponential=True)
def softmax(desc: Any, x: Mapping[str, Any]) -> Outputs:
    e = _shifted(x["x"], desc.softmax_axis).exp()
    return {"out": e / e.sum(desc.softmax_axis, keepdim=True)}


@_declare("log_softmax", exponential=True)
def log_softmax(desc: Any, x: Mapping[str, Any]) -> Outputs:
    v = _shifted(x["x"], desc.softmax_axis)
    return {"out": v - v.exp().sum(desc.softmax_axis, keepdim=True).log()}


@_declare("softmax_backward", exponential=False)
def softmax_backward(desc: Any, x: Mapping[str, Any]) -> Outputs:
    dout, out = x["dout"], x["out"]
    return {"dx": out * (dout - (dout * out).sum(desc.softmax_axis, keepdim=True))}


@_declare("log_softmax_backward", exponential=True)
def log_softmax_backward(desc: Any, x: Mapping[str, Any]) -> Outputs:
    dout, out = x["dout"], x["out"]
    return {"dx": dout - out.exp() * dout.sum(desc.softmax_axis, keepdim=True)}
