"""Draws of batch and group normalisation, and their backward: images of one pixel (channels last), and of many."""

from __future__ import annotations

from typing import Any

import torch

import triplan as tp
from bench.anywhere.drawing import Draw, Peer, Tensors, described, placed
from triplan.testing.placing import write

CHANNELS = (16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048)
PIXELS = (49, 64, 196, 256, 784, 1024, 3136, 12544)
EPS, MOMENTUM = 1e-5, 0.1


def draw(op: str, d: Draw) -> tp.Descriptor:
    element = d.element(op)
    numel = max(d.bytes // (element.itemsize * (3 if op.endswith("_backward") else 2)), 64)
    channels = d.extent(1, min(2048, numel // 8), CHANNELS)
    pixels = 1 if d.chance(0.5) else d.extent(1, min(1 << 16, max(numel // channels // 2, 1)), PIXELS)
    batch = max(numel // (channels * pixels), 2)
    fields: dict[str, Any] = {"weight": d.chance(0.9)}
    fields["bias"] = fields["weight"]
    if op.startswith("batch"):
        fields["training"] = d.chance(0.8)
    else:
        fields["groups"] = d.one_of([g for g in (1, 2, 4, 8, 16, 32, channels) if channels % g == 0])
    return described(op, element=element, batch=batch, channels=channels, pixels=pixels, **fields)


def complete(desc: Any, t: Tensors) -> None:
    """Variances are positive; statistics of the backward are those of normal values, as torch keeps them too."""
    if desc.op.endswith("_backward"):
        write(t["mean"], torch.zeros_like(t["mean"]))
        write(t["rstd"], torch.ones_like(t["rstd"]))
        # torch's statistics of groups, and on the CPU all, are of the element.
        narrow = desc.op.startswith("group") or not t["x"].is_cuda
        for name in ("mean", "rstd"):
            t[f"torch_{name}"] = t[name].to(t["x"].dtype) if narrow else t[name]
    elif "running_var" in t:
        write(t["running_var"], t["running_var"].abs() + 0.5)


def peers(desc: Any) -> dict[str, Peer]:
    return {"torch": placed(lambda t: _torchs(desc, t))}


def _torchs(desc: Any, t: Tensors) -> Tensors:
    aten, x, weight = torch.ops.aten, t["x"], t.get("weight")
    if desc.op.startswith("group"):
        # As torch's autograd gives inputs to these two. Results are ``placed``: what is in them is not read.
        written = {o.name for o in desc.operands() if o.is_written}
        t = {name: v.contiguous() for name, v in t.items() if name not in written}
        x, weight = t["x"], t.get("weight")
        sizes = (desc.batch, desc.channels, desc.pixels, desc.groups)
        if desc.op == "group_norm":
            found = aten.native_group_norm(x, weight, t.get("bias"), *sizes, EPS)
            return dict(zip(("out", "mean", "rstd"), found, strict=True))
        mask = [True, desc.weight, desc.bias]
        found = aten.native_group_norm_backward(t["dout"], x, t["torch_mean"], t["torch_rstd"], weight, *sizes, mask)
        named = zip(("dx", "dweight", "dbias"), found, mask, strict=True)
        return {name: g for name, g, wanted in named if wanted}
    if desc.op.endswith("_backward"):
        running: tuple[Any, Any]
        mask, running = [True, desc.weight, desc.bias], (None, None)
        mean, rstd = t["torch_mean"], t["torch_rstd"]
        if not desc.training:  # torch computes rstd from the variance
            running = (mean.to(x.dtype), torch.full_like(mean, 1 - EPS).to(x.dtype))
        dx, dweight, dbias = aten.native_batch_norm_backward(
            t["dout"], x, weight, *running, mean, rstd, desc.training, EPS, mask
        )
        found = {"dx": dx, "dweight": dweight, "dbias": dbias}
        mask[0] = not (desc.training and desc.pixels == 1 and t["dout"].stride(0) == 0)  # else dx is rounding alone
        return {name: found[name] for name, wanted in zip(found, mask, strict=True) if wanted}
    mean, var = t["running_mean"], t["running_var"]
    if not desc.training:
        out, *_ = aten.native_batch_norm(x, weight, t.get("bias"), mean, var, False, MOMENTUM, EPS)
        wide = (s.to(desc.element.compute.torch) for s in (mean, var))
        return {"out": out, "mean": next(wide), "rstd": (next(wide) + EPS).rsqrt()}
    # It updates them in place.
    mean, var = mean.clone(), var.clone()
    out, own, rstd = aten.native_batch_norm(x, weight, t.get("bias"), mean, var, True, MOMENTUM, EPS)
    return {"out": out, "mean": own, "rstd": rstd, "next_mean": mean, "next_var": var}
