"""rms_norm, layer_norm and l2_norm in plain torch, from the definitions. The kernels share no code with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from triplan.backends.reference.rows import Outputs, Tensor
from triplan.backends.reference.rows import rows_reference as _declare


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
