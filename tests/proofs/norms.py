"""Norms for the proofs: ``n`` rows of LENGTH elements, and Σ|terms| of each op."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from proofs import Drawn, Kind, Outputs, Variant, draw, joins
from proofs.rows import size


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


class Norm(Drawn):
    """A norm along the last axis of (n, LENGTH), or the adjoint of one. ``shared`` operands have one value a column."""

    shared = ("weight", "bias")

    def _with(self, rows: Tensor, order: Tensor | None = None) -> Norm:
        found = {}
        for name, t in self.values.items():
            t = t if name in self.shared else t[rows]
            whole = t.dim() == 2 or name in self.shared
            found[name] = (t if order is None or not whole else t[..., order]).clone()
        shape = tuple(found["x"].shape)
        return Norm(self.desc.replace(input_shape=shape), lambda: found)

    def parts(self) -> Iterator[Variant]:
        n = self.desc.input_shape[0]  # type: ignore[attr-defined]
        for kept in (torch.tensor([n - 1]), torch.arange(0, n, 2), torch.arange(n).flip(0)[: n // 3 + 1]):
            yield Variant(self._with(kept), _of_rows, lambda out, kept=kept: _of_rows(out)[kept])  # type: ignore[misc]

    def reordered(self) -> Variant:
        n, length = self.desc.input_shape  # type: ignore[attr-defined]
        g = torch.Generator().manual_seed(1)
        rows, order = torch.randperm(n, generator=g), torch.randperm(length, generator=g)
        return Variant(self._with(rows, order), _columns, lambda out: _columns(out, rows, order))


def _of_rows(out: Outputs) -> Tensor:
    """What belongs to one row, as one tensor."""
    return torch.cat([t.reshape(len(t), -1).double() for name, t in out.items() if name not in ("dweight", "dbias")], 1)


def _columns(out: Outputs, rows: Tensor | None = None, order: Tensor | None = None) -> Tensor:
    """All outputs as one tensor, their rows and columns in another order."""
    found = []
    for name, t in out.items():
        if rows is not None and order is not None:
            t = t[order] if name in ("dweight", "dbias") else t[rows][:, order] if t.dim() == 2 else t[rows]
        found.append(t.reshape(-1).double())
    return torch.cat(found)


def norm_values(desc: Any, kind: Kind) -> dict[str, Tensor]:
    """Rows whose squares stay within f32; for the adjoints, with what the norm gave."""
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


def norm_problem(op: str, n: int, element: tp.ElementKind, kind: Kind, long: bool = False, **options: Any) -> Norm:
    n, length = size(n, long)
    desc = tp.descriptor_types()[op](input_shape=(n, length), element=element, **options)
    return Norm(desc, partial(norm_values, desc, kind))


for _op, _terms in TERMS.items():
    _bare = {"weight": False, **({"bias": False} if _op.startswith("layer_norm") else {})}
    _others = ({}, _bare, {"residual": True, "weight_offset": 1}, {"long": True}, {"long": True, **_bare})
    _options = ({}, {"long": True}) if _op.startswith("l2") else _others
    joins(_op, *_options, magnitude=_terms)(partial(norm_problem, _op))
