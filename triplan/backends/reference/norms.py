"""rms_norm, layer_norm and l2_norm in plain torch, from their definitions: shares no computation with the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from triplan.backends.table import CheckRules, Compute, reference
from triplan.backends.triton.common import bounds
from triplan.descriptors import (
    L2NormBackwardDescriptor,
    L2NormDescriptor,
    LayerNormBackwardDescriptor,
    LayerNormDescriptor,
    RmsNormBackwardDescriptor,
    RmsNormDescriptor,
)
from triplan.descriptors.norms import NormDescriptor, ScaledNormDescriptor
from triplan.sku import PrecisionGuarantee

FLOATS = ("f16", "bf16", "f32", "f64")
#: Of the statistics that backward ops are checked with.
EPS = 1e-5
Tensors = Mapping[str, Tensor]


def _guarantee(desc: NormDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """One rounding per addition, along a row or (gradients of weight and bias) over all rows, and 12 for all else.

    *rms_norm, l2_norm*: all terms of the mean square are positive. Its n + 5 roundings are halved by the root; six more
    follow. *layer_norm*: a deviation has two roundings of its own. The error of the second mean, n + 2 roundings of a
    standard deviation, is the same for a whole row, so that it changes the variance in second order only. (That of the
    first is of no consequence while the mean is less than 2**18 standard deviations; with a residual, whose sum is
    rounded, ten.) *backward*: of the terms of dx, those of the mean of g * hat pass through most roundings: g and hat
    (4), their product, n, hat (2), its product, and the four operations to the end.

    (torch keeps several partial sums, so that a term passes through fewer than n / 2 + 2 additions. This makes room for
    the deviations in layer_norm's mean, which are up to twice the values.)

    Never batch-invariant: torch may divide sums into blocks that depend on the batch.
    """
    compute, n = desc.element.compute, desc.input_shape[-1]
    vanished = math.sqrt(n * bounds.smallest_normal(compute))  # sqrt(sum of n squares), if all squares are flushed
    found = {}
    for o in desc.operands():
        if o.is_written:
            over_rows = o.name in ("dweight", "dbias")
            roundings = 12 + (math.prod(desc.input_shape[:-1]) if over_rows else n)
            found[o.name] = bounds.rounded(
                o.element,
                compute,
                relative=roundings,
                per_term=roundings,
                flushes=roundings,
                lost=vanished if o.name == "norm" else 0.0,
            )
    return found


# --- what checks must know: statistics, and sum|terms| from absolute values ---


def _statistics(desc: NormDescriptor, x: Tensors) -> Tensors:
    """What the forward op gives of ``x``: a backward op is checked with no other statistics."""
    v, found = x["x"].double(), {}
    if isinstance(desc, L2NormBackwardDescriptor):
        found["norm"] = v.square().sum(-1).sqrt()
    else:
        deviations = v
        if isinstance(desc, LayerNormBackwardDescriptor):
            found["mean"], deviations = v.mean(-1), v - _mean(v)
        found["rstd"] = 1 / (deviations.square().mean(-1) + EPS).sqrt()
    return {name: t.to(desc.operand(name).element.torch) for name, t in found.items()}


def _layer_norm_terms(desc: LayerNormDescriptor, x: Tensors) -> Tensors:
    """Deviations have errors of a standard deviation's size, whatever their mean; then come weight and bias."""
    out = torch.ones_like(x["x"]) * _weight(desc, x)
    out = out if x.get("bias") is None else out + x["bias"]
    return {"out": out, "mean": _read(desc, x)[0].mean(-1)}


def _backward_terms(desc: ScaledNormDescriptor, x: Tensors) -> Tensors:
    dy, rstd, rows = x["dout"], x["rstd"].unsqueeze(-1), tuple(range(len(desc.input_shape) - 1))
    centred = isinstance(desc, LayerNormBackwardDescriptor)
    hat = (x["x"] + (x["mean"].unsqueeze(-1) if centred else 0)) * rstd
    g = dy * _weight(desc, x)
    dx = g + hat * _mean(g * hat) + (_mean(g) if centred else 0)
    dx = dx * rstd + (x["dsummed"] if desc.residual else 0)
    return {"dx": dx, "dbranch": dx, "dweight": (dy * hat).sum(rows), "dbias": dy.sum(rows)}


def _l2_norm_backward_terms(desc: L2NormBackwardDescriptor, x: Tensors) -> Tensors:
    length = x["norm"].clamp(min=desc.eps).unsqueeze(-1)
    hat = x["x"] / length
    return {"dx": (x["dout"] + hat * (x["dout"] * hat).sum(-1, keepdim=True)) / length}


#: sum|terms|. Where all terms of a mean square are positive, errors are relative to the results.
TERMS: dict[str, Callable[[Any, Tensors], Tensors]] = {
    "rms_norm": CheckRules.no_terms,
    "l2_norm": CheckRules.no_terms,
    "layer_norm": _layer_norm_terms,
    "rms_norm_backward": _backward_terms,
    "layer_norm_backward": _backward_terms,
    "l2_norm_backward": _l2_norm_backward_terms,
}


# --- ops ---


def _declare(op: str) -> Callable[[Compute], Compute]:
    # Squares and products of wide values would leave the range of f32.
    rules = CheckRules(TERMS[op], _statistics if op.endswith("_backward") else None, ("unit",))
    return reference(op=op, elements=FLOATS, guarantee=_guarantee, checks=rules)


def _weight(desc: ScaledNormDescriptor, x: Tensors) -> Tensor | int:
    return 1 if x.get("weight") is None else x["weight"] + desc.weight_offset


def _read(desc: RmsNormDescriptor | LayerNormDescriptor, x: Tensors) -> tuple[Tensor, Tensors]:
    """(what is normalised, the output ``summed`` if there is a residual)."""
    if not desc.residual:
        return x["x"], {}
    v = x["x"] + x["residual"]
    return v, {"summed": v}


def _mean(v: Tensor) -> Tensor:
    return v.mean(-1, keepdim=True)


@_declare("rms_norm")
def rms_norm(desc: RmsNormDescriptor, x: Tensors) -> Tensors:
    v, summed = _read(desc, x)
    rstd = 1 / (_mean(v**2) + desc.eps).sqrt()
    return {"out": v * rstd * _weight(desc, x), "rstd": rstd.squeeze(-1), **summed}


@_declare("layer_norm")
def layer_norm(desc: LayerNormDescriptor, x: Tensors) -> Tensors:
    v, summed = _read(desc, x)
    # Centred twice: in rows far from zero the rounding of the first mean would dominate the deviations.
    first = _mean(v)
    rest = _mean(v - first)
    v = (v - first) - rest
    rstd = 1 / (_mean(v**2) + desc.eps).sqrt()
    out = v * rstd * _weight(desc, x)
    out = out if x.get("bias") is None else out + x["bias"]
    return {"out": out, "mean": (first + rest).squeeze(-1), "rstd": rstd.squeeze(-1), **summed}


def _norm_backward(desc: ScaledNormDescriptor, x: Tensors, hat: Tensor, centred: bool) -> Tensors:
    # That of a branch may be narrower than what all is computed in.
    dout, rows = x["dout"].to(x["x"].dtype), tuple(range(len(desc.input_shape) - 1))
    g = dout * _weight(desc, x)
    d = g - hat * _mean(g * hat)
    d = d - _mean(g) if centred else d
    found = {"dx": d * x["rstd"].unsqueeze(-1) + (x["dsummed"] if desc.residual else 0)}
    found |= {"dbranch": found["dx"]} if any(o.name == "dbranch" for o in desc.operands()) else {}
    if any(o.name == "dweight" for o in desc.operands()):
        found["dweight"] = (dout * hat).sum(rows)
    if any(o.name == "dbias" for o in desc.operands()):
        found["dbias"] = dout.sum(rows)
    return found


@_declare("rms_norm_backward")
def rms_norm_backward(desc: RmsNormBackwardDescriptor, x: Tensors) -> Tensors:
    return _norm_backward(desc, x, x["x"] * x["rstd"].unsqueeze(-1), centred=False)


@_declare("layer_norm_backward")
def layer_norm_backward(desc: LayerNormBackwardDescriptor, x: Tensors) -> Tensors:
    hat = (x["x"] - x["mean"].unsqueeze(-1)) * x["rstd"].unsqueeze(-1)
    return _norm_backward(desc, x, hat, centred=True)


@_declare("l2_norm")
def l2_norm(desc: L2NormDescriptor, x: Tensors) -> Tensors:
    norm = (x["x"] ** 2).sum(-1).sqrt()
    return {"out": x["x"] / norm.clamp(min=desc.eps).unsqueeze(-1), "norm": norm}


@_declare("l2_norm_backward")
def l2_norm_backward(desc: L2NormBackwardDescriptor, x: Tensors) -> Tensors:
    norm = x["norm"].unsqueeze(-1)
    length = norm.clamp(min=desc.eps)
    hat = x["x"] / length
    along = (x["dout"] * hat).sum(-1, keepdim=True)
    return {"dx": (x["dout"] - hat * torch.where(norm < desc.eps, 0.0, along)) / length}
