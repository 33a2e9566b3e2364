"""Draws of convolutions and of their gradients: kernels, strides, dilation, groups; channels last in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from bench.anywhere.drawing import Draw, Peer, described, streamed_us
from bench.anywhere.gemm import TFLOPS
from bench.gemm.run import ROOFS

#: The order of axes in memory: channels last, the layout that models are trained in.
ORDER = (0, 2, 3, 1)
CHANNELS = (3, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
SIDES = (7, 8, 14, 16, 28, 32, 56, 64, 112, 128, 224, 256)
KERNELS = {(3, 3): 6, (1, 1): 4, (5, 5): 1, (7, 7): 1, (1, 5): 1, (2, 2): 1}
#: Microseconds of the longest problems.
LONGEST_US = 15_000.0
#: Microseconds of the least time up to which cuDNN times its algorithms: with 7x7 weights some take a thousand times as
#: long, and each is called several times. Untuned.
SEARCHED_US = 1000.0


def draw(op: str, d: Draw) -> tp.Descriptor:
    element = d.element(op)
    numel = d.bytes // element.itemsize
    while True:
        kernel, stride, dilation = d.weighed(KERNELS), d.weighed({1: 6, 2: 2}), d.weighed({1: 8, 2: 1})
        reach = [dilation * (r - 1) for r in kernel]
        padding = tuple(r // 2 if r % 2 == 0 else 0 for r in reach for _ in range(2)) if d.chance(0.8) else (0,) * 4
        most = max(math.isqrt(numel // (2 * math.prod(kernel))), 1)
        channels, filters = (d.extent(1, min(2048, most), CHANNELS) for _ in range(2))
        groups = 1
        if d.chance(0.2):  # each channel by itself, or in few groups
            groups = d.one_of([g for g in (2, 4, channels) if channels % g == 0])
            filters = channels if groups == channels else -(-filters // groups) * groups
        widest = math.isqrt(numel // (channels + filters))
        least = max(1 + reach[0], 1 + reach[1])
        if widest < least:
            continue
        side = d.extent(least, min(512, widest), SIDES)
        options: dict[str, Any] = {"kernel": kernel, "padding": padding}
        options |= {"stride": (stride,) * 2, "dilation": (dilation,) * 2}
        sizes = {"in_channels": channels, "height": side, "width": side, "out_channels": filters, "groups": groups}
        if element is tp.ElementKind.F32:
            options["math"] = d.weighed({None: 1, "tf32": 3})
        if op == "conv2d":
            options["has_bias"] = d.chance(0.3)
        one: Any = described(op, batch=1, element=element, **sizes, **options)
        weight = filters * one.channels * one.taps
        each = channels * side * side + filters * math.prod(one.out_extents)
        found: tp.Descriptor = one.replace(batch=max((numel - weight) // each, 1))
        nbytes = sum(o.nbytes for o in found.operands())
        if 0.6 * d.bytes <= nbytes <= 1.2 * d.bytes and floor_us(found) <= LONGEST_US:
            return found


def floor_us(desc: Any) -> float:
    """The longer of streaming the operands and multiplying."""
    results = desc.batch * desc.out_channels * math.prod(desc.out_extents)
    flops: float = 2.0 * results * desc.channels * desc.taps
    return max(streamed_us(desc), flops / TFLOPS.get(desc.multiplicands.value, ROOFS[1]) / 1e6)


def _aligned(t: Tensor) -> Tensor:
    """``t``, or a copy if it begins at no multiple of 16 bytes: on such, torch's depthwise kernel faults, and a kernel
    that cuDNN tries for the gradient of weight of f32."""
    return t if t.storage_offset() * t.element_size() % 16 == 0 else t.clone()


def peers(desc: Any) -> dict[str, Peer]:
    how = (list(desc.stride), list(desc.padding[::2]), list(desc.dilation))

    def backward(dout: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]) -> Any:
        return torch.ops.aten.convolution_backward(
            dout, x, weight, None, *how, False, [0, 0], desc.groups, [*wanted, False]
        )

    faults = desc.channels == desc.filters == 1
    faults |= desc.op == "conv2d_backward_weight" and desc.element is tp.ElementKind.F32
    image: Callable[[Tensor], Tensor] = _aligned if faults else lambda x: x
    # A gradient's own memory stands for the operand that only gives its shape.
    calls: dict[str, Peer] = {
        "conv2d": lambda t: {"out": torch.conv2d(image(t["x"]), t["weight"], t.get("bias"), *how, desc.groups)},
        "conv2d_backward_input": lambda t: {"dx": backward(t["dout"], t["dx"], t["weight"], [True, False])[0]},
        "conv2d_backward_weight": lambda t: {
            "dweight": backward(image(t["dout"]), image(t["x"]), t["dweight"], [False, True])[1]
        },
    }
    return {"torch": calls[desc.op]}
