"""Norms for the proofs: ``n`` rows of LENGTH elements."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from proofs import Kind, draw, follows, joins
from proofs.rows import Rows, size

OPS = ("l2_norm", "l2_norm_backward", "rms_norm", "layer_norm", "rms_norm_backward", "layer_norm_backward")


def norm_values(desc: Any, kind: Kind) -> dict[str, Tensor]:
    """Rows whose squares stay within f32; for the backward, with what the norm gave."""
    g = torch.Generator().manual_seed(0)
    (n, length), dtype, half = desc.input_shape, desc.element.torch, desc.input_shape[1] // 2
    narrow = desc.element == "f16"
    x = torch.randn(n, length, generator=g, dtype=torch.float64)
    if kind in ("subnormal", "equal") or (kind == "huge" and narrow):
        x = draw((n, length), desc.element, kind, length, g).double()
    elif kind == "huge":
        compute = torch.finfo((getattr(desc, "branch_element", None) or desc.element).compute.torch)
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
        return {name: t.to(desc.operand(name).element.torch) for name, t in found.items()}
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
    found["dout"] = found["dout"].to(desc.operand("dout").element.torch)
    return found | follows(desc, found)


def norm_problem(op: str, n: int, element: tp.ElementKind, kind: Kind, long: bool = False, **options: Any) -> Rows:
    n, length = size(n, long, element)
    desc = tp.descriptor_types()[op](input_shape=(n, length), element=element, **options)
    return Rows(desc, partial(norm_values, desc, kind))


for _op in OPS:
    _bare = {"weight": False, **({"bias": False} if _op.startswith("layer_norm") else {})}
    _branch = {"residual": True, "branch_element": "bf16"}
    _branch |= {"branch_gradient": True} if _op.endswith("_backward") else {}
    _others = ({}, _bare, {"residual": True, "weight_offset": 1}, {"long": True}, {"long": True, **_bare}, _branch)
    _options = ({}, {"long": True}) if _op.startswith("l2") else _others
    joins(_op, *_options)(partial(norm_problem, _op))
