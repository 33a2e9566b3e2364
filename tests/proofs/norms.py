"""Norms for the proofs: ``n`` rows of LENGTH elements, and Σ|terms| of each op."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from proofs import Kind, Outputs, draw, joins
from proofs.rows import Rows, size


def rms_norm_terms(desc: Any, x: Mapping[str, Any]) -> Outputs:
    """All terms of the mean square are positive: errors are relative to the results."""
    zeros = torch.zeros(desc.input_shape, dtype=torch.float64)
    return {"out": zeros, "rstd": zeros[..., 0], "norm": zeros[..., 0], "summed": zeros}


def layer_norm_terms(desc: Any, x: Mapping[str, Any]) -> Outputs:
    """Deviations have errors of a standard deviation's size, whatever their mean; then come weight and bias."""
    ones = torch.ones(desc.input_shape, dtype=torch.float64)
    out = ones if x.get("weight") is None else ones * (x["weight"] + desc.weight_offset)
    out = out if x.get("bias") is None else out + x["bias"]
    v = x["x"] + x["residual"] if desc.residual else x["x"]
    return {"out": out, "mean": v.mean(-1), "rstd": 0 * v.mean(-1), "summed": 0 * v}


def norm_backward_terms(desc: Any, x: Mapping[str, Any]) -> Outputs:
    dy, rstd = x["dout"], x["rstd"].unsqueeze(-1)
    centred = desc.op.startswith("layer_norm")
    hat = (x["x"] + (x["mean"].unsqueeze(-1) if centred else 0)) * rstd
    g = dy if x.get("weight") is None else dy * (x["weight"] + desc.weight_offset)
    dx = g + hat * (g * hat).mean(-1, keepdim=True) + (g.mean(-1, keepdim=True) if centred else 0)
    rows = tuple(range(dy.dim() - 1))
    return {
        "dx": dx * rstd + (x["dsummed"] if desc.residual else 0),
        "dweight": (dy * hat).sum(rows),
        "dbias": dy.sum(rows),
    }


def l2_norm_backward_terms(desc: Any, x: Mapping[str, Any]) -> Outputs:
    length = x["norm"].clamp(min=desc.eps).unsqueeze(-1)
    hat = x["x"] / length
    return {"dx": (x["dout"] + hat * (x["dout"] * hat).sum(-1, keepdim=True)) / length}


TERMS: dict[str, Callable[[Any, Mapping[str, Any]], Outputs]] = {
    "l2_norm": rms_norm_terms,
    "l2_norm_backward": l2_norm_backward_terms,
    "rms_norm": rms_norm_terms,
    "layer_norm": layer_norm_terms,
    "rms_norm_backward": norm_backward_terms,
    "layer_norm_backward": norm_backward_terms,
}


def norm_values(desc: Any, kind: Kind) -> dict[str, Tensor]:
    """Rows whose squares stay within f32; for the backward, with what the norm gave."""
    g = torch.Generator().manual_seed(0)
    (n, length), dtype, half = desc.input_shape, desc.element.torch, desc.input_shape[1] // 2
    narrow = desc.element == "f16"
    x = torch.randn(n, length, generator=g, dtype=torch.float64)
    if kind in ("subnormal", "equal") or (kind == "huge" and narrow):
        x = draw((n, length), desc.element, kind, length, g).double()
    elif kind == "huge":
        compute = torch.finfo(desc.element.compute.torch)
        x = (x.sign() + x.clamp(-3, 3) / 4) * math.sqrt(compute.max / (8 * length))
    elif kind == "wide":
        x *= 2.0 ** torch.randint(-8 if narrow else -40, 9 if narrow else 41, x.shape, generator=g)
    elif kind == "cancelling" and desc.op in ("l2_norm", "rms_norm"):
        # Squares of narrow values add up exactly unless their exponents differ, and a root hides half of what is lost.
        x *= 2.0 ** torch.randint(-6, 7, x.shape, generator=g)
    weight, residual = getattr(desc, "weight", False), getattr(desc, "residual", False)
    backward = desc.op.endswith("_backward")
    if residual and not backward:
        x = x / 2
    found = {"x": x.to(dtype)}
    if weight:
        found["weight"] = torch.randn(length, generator=g, dtype=torch.float64).to(dtype)
    if not backward:
        if getattr(desc, "bias", False):
            found["bias"] = torch.randn(length, generator=g, dtype=torch.float64).to(dtype)
        if residual:
            found["residual"] = x.flip(1).to(dtype)
        return found
    dout = torch.randn(n, length, generator=g, dtype=torch.float64)
    dout *= 2.0 ** torch.randint(-6, 7, dout.shape, generator=g)
    if kind == "cancelling":
        # Equal and opposite terms, and a place where the rounding of their sum alone is the gradient.
        found["x"][:, half : 2 * half] = found["x"][:, :half]
        if weight:
            found["weight"][half : 2 * half] = found["weight"][:half]
        dout[:, half : 2 * half] = -dout[:, :half]
        dout[:, 0], dout[:, half] = 0, 0
        found["x"][:, [0, half]] = 1
        if desc.op.startswith("l2"):
            found["x"] *= 2.0 ** -round(math.log2(length) / 2)  # rows of length 1, or f16 could not hold the rounding
    found["dout"] = dout.to(dtype)
    if residual:
        found["dsummed"] = torch.zeros_like(found["dout"]) if kind == "cancelling" else found["dout"].flip(0)
    centred, v = desc.op.startswith("layer_norm"), found["x"].double()
    if desc.op == "l2_norm_backward":
        found["norm"] = v.square().sum(1).sqrt().to(desc.element.compute.torch)
        return found
    if centred:
        found["mean"] = v.mean(1).to(desc.element.compute.torch)
        v = v - v.mean(1, keepdim=True)
    found["rstd"] = (1 / (v.square().mean(1) + 1e-5).sqrt()).to(desc.element.compute.torch)
    return found


def norm_problem(op: str, n: int, element: tp.ElementKind, kind: Kind, long: bool = False, **options: Any) -> Rows:
    n, length = size(n, long)
    desc = tp.descriptor_types()[op](input_shape=(n, length), element=element, **options)
    return Rows(desc, partial(norm_values, desc, kind))


for _op, _terms in TERMS.items():
    _bare = {"weight": False, **({"bias": False} if _op.startswith("layer_norm") else {})}
    _others = ({}, _bare, {"residual": True, "weight_offset": 1}, {"long": True}, {"long": True, **_bare})
    _options = ({}, {"long": True}) if _op.startswith("l2") else _others
    joins(_op, *_options, magnitude=_terms)(partial(norm_problem, _op))
