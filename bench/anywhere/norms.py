"""Draws of rms_norm, layer_norm and l2_norm, and of their backward ops."""

from __future__ import annotations

from typing import Any

import torch

import triplan as tp
from bench.anywhere.drawing import Draw, Peer, Tensors, described, placed
from triplan.testing.placing import write


def draw(op: str, d: Draw) -> tp.Descriptor:
    element, fields = d.element(op), tp.descriptor_types()[op].model_fields
    options: dict[str, Any] = {}
    if "weight" in fields:
        options |= {"weight": d.chance(0.9), "residual": d.chance(0.15)}
    if "bias" in fields:
        options |= {"bias": options["weight"]}
    whole = (3 if op.endswith("_backward") else 2) + (2 if options.get("residual") else 0)
    rows, n = d.matrix(d.bytes // (element.itemsize * whole))
    return described(op, input_shape=(*d.folded(rows), n), element=element, **options)


def complete(desc: Any, t: Tensors) -> None:
    """Statistics of a backward op; of normal values the mean is 0, and rstd 1."""
    if desc.op == "l2_norm_backward":
        write(t["norm"], torch.linalg.vector_norm(t["x"], dim=-1, dtype=desc.element.compute.torch))
    elif desc.op.endswith("_backward"):
        write(t["rstd"], torch.ones_like(t["rstd"]))
        if "mean" in t:
            write(t["mean"], torch.zeros_like(t["mean"]))


def peers(desc: Any) -> dict[str, Peer]:
    return {"torch": placed(lambda t: _torchs(desc, t))}


def _torchs(desc: Any, t: Tensors) -> Tensors:
    aten, shape = torch.ops.aten, [desc.input_shape[-1]]
    x, weight = t["x"], t.get("weight")
    if desc.op == "l2_norm":
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return {"out": x / norm.clamp_min(desc.eps), "norm": norm.squeeze(-1)}
    if desc.op == "l2_norm_backward":
        norm = t["norm"].clamp_min(desc.eps).to(x.dtype)[..., None]
        hat = x / norm
        return {"dx": (t["dout"] - hat * (t["dout"] * hat).sum(-1, keepdim=True)) / norm}
    if desc.op.endswith("_backward"):
        dout, rstd = t["dout"], t["rstd"][..., None]
        if desc.op == "layer_norm_backward":
            # On the CPU torch takes statistics in the element alone.
            mean, rstd = (s if x.is_cuda else s.to(x.dtype) for s in (t["mean"][..., None], rstd))
            mask = [True, desc.weight, desc.bias]
            dx, dweight, dbias = aten.native_layer_norm_backward(dout, x, shape, mean, rstd, weight, weight, mask)
        elif x.is_cuda:
            dx, dweight = aten._fused_rms_norm_backward(dout, x, shape, rstd, weight, [True, desc.weight])
            dbias = None
        else:  # torch has it on a GPU alone
            hat = x * rstd.to(x.dtype)
            g = dout if weight is None else dout * weight
            dx = (g - hat * (g * hat).mean(-1, keepdim=True)) * rstd.to(x.dtype)
            dweight, dbias = (dout * hat).flatten(0, -2).sum(0), None
        found = {"dx": dx + t["dsummed"] if desc.residual else dx}
        found |= {"dweight": dweight} if desc.weight else {}
        return found | ({"dbias": dbias} if desc.op == "layer_norm_backward" and desc.bias else {})
    found = {}
    if desc.residual:
        x = found["summed"] = x + t["residual"]
    if desc.op == "layer_norm":
        out, mean, rstd = aten.native_layer_norm(x, shape, weight, t.get("bias"), desc.eps)
        return {**found, "out": out, "mean": mean.squeeze(-1), "rstd": rstd.squeeze(-1)}
    out, rstd = aten._fused_rms_norm(x, shape, weight, desc.eps)
    return {**found, "out": out, "rstd": rstd.squeeze(-1)}
