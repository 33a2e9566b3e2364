"""Draws of attention and of its backward: lengths, shared heads, widths, causal masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import triplan as tp
from bench.anywhere.drawing import HEADS, Draw, Peer, Tensors, described, streamed_us
from bench.anywhere.gemm import TFLOPS
from bench.gemm.run import ROOFS
from triplan.testing.placing import write

WIDTHS = (64, 80, 96, 128, 192, 256)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
#: Microseconds of the longest problems.
LONGEST_US = 15_000.0
FOLLOWING = ("out", "lse")


def draw(op: str, d: Draw) -> tp.Descriptor:
    element = d.element(op)
    tensors = 2 if op.endswith("_backward") else 1
    most = d.bytes // (5 * tensors * element.itemsize)
    width = d.extent(8, min(256, max(most, 8)), WIDTHS)
    heads = d.extent(1, max(min(64, most // width), 1), HEADS)
    group = d.one_of([g for g in (1, 1, 4, 8) if heads % g == 0])
    each = tensors * 2 * (heads + heads // group) * width * element.itemsize + 4 * heads
    tokens = max(d.bytes // each, 2)
    # torch's kernel of f32 multiplies in parts of tf32.
    math = "tf32x3" if element is tp.ElementKind.F32 and d.chance(0.5) else None
    while True:
        # Of one key, gradients of q and k are nothing but roundings.
        length = d.extent(2, min(tokens, 1 << 15), LENGTHS)
        options: dict[str, Any] = {"causal": d.chance(0.5), "align": "start", "batch": max(tokens // length, 1)}
        fields: dict[str, Any] = {"heads": heads, "key_heads": heads // group, "head_dim": width, "element": element}
        fields["math"] = math
        found = described(op, queries=length, keys=length, **options, **fields)
        if floor_us(found) <= LONGEST_US:
            return found


def floor_us(desc: Any) -> float:
    """The longer of streaming the operands and multiplying."""
    products = 5 if desc.op.endswith("_backward") else 2
    scores = desc.batch * desc.heads * desc.queries * desc.keys / (1 + desc.causal)
    flops: float = 2.0 * products * scores * desc.head_dim
    return max(streamed_us(desc), flops / TFLOPS.get(str(desc.multiplicands), ROOFS[1]) / 1e6)


def _aligned(t: Tensor) -> Tensor:
    """``t``, or a packed copy if a row begins at no multiple of 16 bytes: on such, torch's backward kernels fault."""
    steps = (t.storage_offset(), *(n for n in t.stride() if n != 1))
    return t if all(n * t.element_size() % 16 == 0 for n in steps) else t.contiguous().clone()


def _torchs(desc: Any, *operands: Tensor) -> Tensor:
    q, k, v = (_aligned(t).transpose(1, 2) for t in operands)
    out = scaled_dot_product_attention(q, k, v, is_causal=desc.causal, enable_gqa=desc.group > 1)
    return out.transpose(1, 2)


def complete(desc: Any, t: Tensors) -> None:
    """``out`` and ``lse`` of the backward op are what the forward op wrote."""
    if desc.op.endswith("_backward"):
        out, lse = torch.empty_like(t["out"]), torch.empty_like(t["lse"])
        names = {name: getattr(desc, name) for name in ("causal", "align")}
        args = tp.AttentionArgs(q=t["q"], k=t["k"], v=t["v"], out=out, lse=lse)
        device = t["q"].device
        plan = tp.plan(tp.AttentionDescriptor.from_args(args, **names), target=tp.Target.of(device))
        plan.run(args, tp.Workspace.allocate(plan, device))
        write(t["out"], out)
        write(t["lse"], lse)


def peers(desc: Any) -> dict[str, Peer]:
    def backward(t: Tensors) -> Tensors:
        with torch.enable_grad():
            leaves = [t[name].detach().requires_grad_() for name in "qkv"]
            grads = torch.autograd.grad(_torchs(desc, *leaves), leaves, _aligned(t["dout"]))
        return dict(zip(("dq", "dk", "dv"), grads, strict=True))

    if desc.op.endswith("_backward"):
        return {"torch": backward}
    return {"torch": lambda t: {"out": _torchs(desc, t["q"], t["k"], t["v"])}}
