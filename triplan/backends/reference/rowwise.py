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
def _guarantee(
    element: ElementKind, compute: ElementKind, additions: int, exponential: bool, squares: int
) -> PrecisionGuarantee:
    """Roundings: ``additions`` of a sum, a dozen of other operations, and those of an exponential's argument. A root of
    so many ``squares`` is without those that vanish."""
    u, final = compute.unit_roundoff, element.unit_roundoff
    roundings = additions + 12 + (3 * EXPONENT[compute] if exponential else 0)
    error = math.expm1(min(roundings * u, 700.0))
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
            underflow=float(
                info.smallest_normal * info.eps
                + (additions + 12) * small.smallest_normal
                + math.sqrt(squares * small.smallest_normal)
            ),
        ),
    )


def _rows(exponential: bool) -> Callable[[Any], Mapping[str, PrecisionGuarantee]]:
    def guarantee(desc: Any) -> Mapping[str, PrecisionGuarantee]:
        outputs = [o for o in desc.operands() if o.is_written]
        # Of a row, and for parameters of all rows.
        terms = max(desc.input_shape) if hasattr(desc, "softmax_axis") else math.prod(desc.input_shape)
        squares = desc.input_shape[-1]
        return {
            o.name: _guarantee(o.element, desc.element.compute, terms, exponential, squares if o.name == "norm" else 0)
            for o in outputs
        }

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


# --- norms ---


def _weight(desc: Any, x: Mapping[str, Any]) -> Any:
    return 1 if x.get("weight") is None else x["weight"] + desc.weight_offset


def _read(desc: Any, x: Mapping[str, Any]) -> tuple[Tensor, Outputs]:
    """What is normalised, and it once more if it is to be written."""
    if not desc.residual:
        return x["x"], {}
    v = x["x"] + x["residual"]
    return v, {"summed": v}


def _mean(v: Tensor) -> Tensor:
    return v.mean(-1, keepdim=True)


@_declare("rms_norm", exponential=False)
def rms_norm(desc: Any, x: Mapping[str, Any]) -> Outputs:
    v, summed = _read(desc, x)
    rstd = 1 / (_mean(v**2) + desc.eps).sqrt()
    return {"out": v * rstd * _weight(desc, x), "rstd": rstd.squeeze(-1), **summed}


@_declare("layer_norm", exponential=False)
def layer_norm(desc: Any, x: Mapping[str, Any]) -> Outputs:
    v, summed = _read(desc, x)
    # Centred twice: the first mean is rounded, and rows far from zero would show it.
    first = _mean(v)
    rest = _mean(v - first)
    v = (v - first) - rest
    rstd = 1 / (_mean(v**2) + desc.eps).sqrt()
    out = v * rstd * _weight(desc, x)
    out = out if x.get("bias") is None else out + x["bias"]
    return {"out": out, "mean": (first + rest).squeeze(-1), "rstd": rstd.squeeze(-1), **summed}


def _norm_backward(desc: Any, x: Mapping[str, Any], hat: Tensor, centred: bool) -> Outputs:
    dout, rows = x["dout"], tuple(range(len(desc.input_shape) - 1))
    g = dout * _weight(desc, x)
    d = g - hat * _mean(g * hat)
    d = d - _mean(g) if centred else d
    found = {"dx": d * x["rstd"].unsqueeze(-1) + (x["dsummed"] if desc.residual else 0)}
    if any(o.name == "dweight" for o in desc.operands()):
        found["dweight"] = (dout * hat).sum(rows)
    if any(o.name == "dbias" for o in desc.operands()):
        found["dbias"] = dout.sum(rows)
    return found


@_declare("rms_norm_backward", exponential=False)
def rms_norm_backward(desc: Any, x: Mapping[str, Any]) -> Outputs:
    return _norm_backward(desc, x, x["x"] * x["rstd"].unsqueeze(-1), centred=False)


@_declare("layer_norm_backward", exponential=False)
def layer_norm_backward(desc: Any, x: Mapping[str, Any]) -> Outputs:
    hat = (x["x"] - x["mean"].unsqueeze(-1)) * x["rstd"].unsqueeze(-1)
    return _norm_backward(desc, x, hat, centred=True)


@_declare("l2_norm", exponential=False)
def l2_norm(desc: Any, x: Mapping[str, Any]) -> Outputs:
    norm = (x["x"] ** 2).sum(-1).sqrt()
    return {"out": x["x"] / norm.clamp(min=desc.eps).unsqueeze(-1), "norm": norm}


@_declare("l2_norm_backward", exponential=False)
def l2_norm_backward(desc: Any, x: Mapping[str, Any]) -> Outputs:
    norm = x["norm"].unsqueeze(-1)
    length = norm.clamp(min=desc.eps)
    hat = x["x"] / length
    along = (x["dout"] * hat).sum(-1, keepdim=True)
    return {"dx": (x["dout"] - hat * torch.where(norm < desc.eps, 0.0, along)) / length}
