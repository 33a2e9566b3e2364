"""Draws of matrix products with epilogues, of batches of them, and of their backward op."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

import triplan as tp
from bench.anywhere.drawing import HIDDEN, MLP, Draw, Peer, Tensors, described, streamed_us
from bench.gemm.run import ROOFS

EPILOGUES = {"identity": 8, "bias": 4, "relu": 1, "gelu": 1, "silu": 1, "bias_relu": 1, "bias_gelu": 2, "bias_silu": 1}
#: TFLOP/s by the precision of multiplicands: the power-limited figure of f16, and as much less than the data sheet's
#: for the others; f32 and f64 are not limited by power.
TFLOPS = {"tf32": ROOFS[1] / 2, "tf32x3": ROOFS[1] / 6, "exact": ROOFS[1] * 2, "f32": 67.0, "f64": 67.0}
#: Microseconds of the longest products.
LONGEST_US = 15_000.0


def draw(op: str, d: Draw) -> tp.Descriptor:
    element = d.element(op)
    options: dict[str, Any] = {}
    if element is tp.ElementKind.F32:
        options["math"] = d.weighed({None: 3, "tf32": 3, "tf32x3": 2})
    if op == "gemm_backward":
        wants = d.weighed({(True, True): 6, (True, False): 1, (False, True): 1})
        options |= {"wants_da": wants[0], "wants_db": wants[1], "wants_dbias": d.chance(0.4)}
    elif element is not tp.ElementKind.I8:
        options["epilogue"] = d.weighed(EPILOGUES)
        options["reads_c0"] = d.chance(0.1)
        if element.itemsize == 2 and options["epilogue"] == "identity" and not options["reads_c0"] and d.chance(0.1):
            options["out_element"] = "f32"
    batch = d.extent(1, 512) if op == "batched_gemm" else 0
    extra = {"batch": batch} if batch else {}
    numel = max(d.bytes // (element.itemsize * max(batch, 1)), 3)
    while True:
        m, n, k = _extents(d, numel)
        found = described(op, m=m, n=n, k=k, element=element, **extra, **options)
        if floor_us(found) <= LONGEST_US:
            return found


def _extents(d: Draw, numel: int) -> tuple[int, int, int]:
    """m, n and k of three matrices with nearly ``numel`` elements together: two are drawn, the third follows."""
    reach = min(numel, 1 << 17)
    a, b = (d.extent(1, reach, likely) for likely in (HIDDEN, (*HIDDEN, *MLP)))
    if a * b + a + b > numel:
        b = max((numel - a) // (a + 1), 1)
    c = max((numel - a * b) // (a + b), 1)
    extents = [a, b, d.extent(c * 4 // 5, c)]
    d.random.shuffle(extents)
    m, n, k = extents
    return m, n, k


def floor_us(desc: Any) -> float:
    """The longer of streaming the operands and multiplying."""
    products = desc.wants_da + desc.wants_db if desc.op == "gemm_backward" else getattr(desc, "batch", 1)
    flops: float = 2.0 * desc.m * desc.n * desc.k * products
    return max(streamed_us(desc), flops / (TFLOPS.get(desc.multiplicands.value, ROOFS[1]) * 1e6))


def peers(desc: Any) -> dict[str, Peer]:
    if desc.op == "gemm_backward":
        return {"torch": lambda t: _backward(desc, t)}
    if desc.element is tp.ElementKind.I8:  # torch multiplies no batch of i8
        return {} if desc.lead else {"torch": lambda t: {"c": torch._int_mm(t["a"], t["b"], out=t["c"])}}
    found: dict[str, Peer] = {"torch": lambda t: _forward(desc, t)}
    if desc.op == "gemm" and desc.epilogue == "bias_relu" and not desc.reads_c0:
        found["torch fused"] = lambda t: {"c": torch._addmm_activation(t["bias"], t["a"], t["b"], out=t["c"])}
    return found


def _forward(desc: Any, t: Tensors) -> Tensors:
    a, b, c = t["a"], t["b"], t["c"]
    if desc.out_element is not None:
        if not a.is_cuda:  # torch has out_dtype on a GPU alone
            return {"c": torch.matmul(a.float(), b.float())}
        return {"c": (torch.bmm if desc.lead else torch.mm)(a, b, out_dtype=torch.float32)}
    add = torch.baddbmm if desc.lead else torch.addmm
    if desc.reads_c0 or desc.has_bias:
        add(t["c0"] if desc.reads_c0 else t["bias"].expand(c.shape) if desc.lead else t["bias"], a, b, out=c)
        if desc.reads_c0 and desc.has_bias:
            c.add_(t["bias"])
    else:
        (torch.bmm if desc.lead else torch.mm)(a, b, out=c)
    if desc.activation == "relu":
        c.relu_()
    elif desc.activation == "gelu":
        torch.ops.aten.gelu.out(c, out=c)
    elif desc.activation == "silu":
        functional.silu(c, inplace=True)
    return {"c": c}


def _backward(desc: Any, t: Tensors) -> Tensors:
    found: Tensors = {}
    if desc.wants_da:
        found["da"] = torch.mm(t["dc"], t["b"].t(), out=t["da"])
    if desc.wants_db:
        found["db"] = torch.mm(t["a"].t(), t["dc"], out=t["db"])
    if desc.wants_dbias:
        found["dbias"] = torch.sum(t["dc"], 0, out=t["dbias"])
    return found
