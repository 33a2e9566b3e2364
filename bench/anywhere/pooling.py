"""Draws of pooling, resizing and their gradients: as models have them, channels last in memory."""

from __future__ import annotations

from typing import Any

import torch

import triplan as tp
from bench.anywhere.drawing import Draw, Peer, Tensors, described
from triplan.testing.placing import write

#: The order of axes in memory: channels last, the layout that models are trained in.
ORDER = (0, 2, 3, 1)
CHANNELS = (16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048)
SIDES = (7, 8, 14, 16, 28, 32, 56, 64, 112)
#: (kernel, stride), and how often.
WINDOWS = {(2, 2): 6, (3, 2): 6, (3, 1): 2, (5, 3): 1, (7, 1): 1}
#: Pixels of a resized side for one of the image, and how often.
FACTORS = {2.0: 6, 4.0: 1, 0.5: 2, 1.5: 1, 1.9: 1}


def draw(op: str, d: Draw) -> tp.Descriptor:
    element = d.element(op)
    numel = max(d.bytes // 12, 64)
    channels = d.extent(1, min(2048, numel // 49), CHANNELS)
    side = d.extent(7, max(min(256, int((numel / channels) ** 0.5)), 7), SIDES)
    how: dict[str, Any]
    if "adaptive" in op:
        how = {"out_size": (d.weighed({1: 4, 7: 2, side: 1}),) * 2}
    elif "upsample" in op:
        how = {"out_size": (max(int(side * d.weighed(FACTORS)), 1),) * 2}
        how |= {"align_corners": d.chance(0.3)} if "bilinear" in op else {"exact": d.chance(0.3)}
    else:
        kernel, stride = d.weighed(WINDOWS)
        how = {"kernel": (kernel,) * 2, "stride": (stride,) * 2, "padding": (kernel // 2 if kernel % 2 else 0,) * 2}
    sizes = {"channels": channels, "height": side, "width": side, **how}
    each = sum(o.nbytes for o in described(op, batch=1, element=element, **sizes).operands())
    return described(op, batch=max(d.bytes // each, 1), element=element, **sizes)


def complete(desc: Any, t: Tensors) -> None:
    """The indices of the backward are what the forward wrote."""
    if desc.op == "max_pool2d_backward":
        how = (desc.kernel, desc.stride, desc.padding, desc.dilation, desc.ceil_mode)
        write(t["indices"], torch.nn.functional.max_pool2d(torch.rand_like(t["dx"]), *how, return_indices=True)[1])


def _planes(x: torch.Tensor) -> torch.Tensor:
    """``x``; if it has one channel, with the stride of images for that of channels: torch's kernel takes this for the
    step from one plane to the next, whatever it is."""
    n, _, *at = x.stride()
    return x.as_strided(x.shape, (n, n, *at), x.storage_offset()) if x.shape[1] == 1 else x


def peers(desc: Any) -> dict[str, Peer]:
    aten: Any = torch.ops.aten
    if "adaptive" in desc.op:
        calls: dict[str, Peer] = {
            "adaptive_avg_pool2d": lambda t: {"out": aten._adaptive_avg_pool2d(_planes(t["x"]), desc.out_size)},
            "adaptive_avg_pool2d_backward": lambda t: {"dx": aten._adaptive_avg_pool2d_backward(t["dout"], t["dx"])},
        }
        return {"torch": calls[desc.op]}
    if "upsample" in desc.op:
        return {"torch": resized(desc)}
    windows = (desc.kernel, desc.stride, desc.padding)

    def largest(t: Tensors) -> Tensors:
        out, indices = aten.max_pool2d_with_indices(t["x"], *windows, desc.dilation, desc.ceil_mode)
        return {"out": out, "indices": indices}

    def averages() -> tuple[Any, ...]:
        return desc.ceil_mode, desc.count_include_pad, desc.divisor or None

    def averages_back(t: Tensors) -> Tensors:
        dout, like = t["dout"], t["dx"]
        if max(desc.padding):  # with channels last torch's CUDA kernel ignores it: pytorch/pytorch#188344
            dout, like = dout.contiguous(), torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return {"dx": aten.avg_pool2d_backward(dout, like, *windows, *averages())}

    # A gradient's own memory stands for the operand that only gives its shape.
    calls = {
        "max_pool2d": largest,
        "max_pool2d_backward": lambda t: {
            "dx": aten.max_pool2d_with_indices_backward(
                t["dout"], t["dx"], *windows, desc.dilation, desc.ceil_mode, t["indices"]
            )
        },
        "avg_pool2d": lambda t: {"out": aten.avg_pool2d(t["x"], *windows, *averages())},
        "avg_pool2d_backward": averages_back,
    }
    return {"torch": calls[desc.op]}


def resized(desc: Any) -> Peer:
    """torch's function for a resized image, or its gradient."""
    aten: Any = torch.ops.aten
    shape = (desc.batch, desc.channels, desc.height, desc.width)
    corners = (desc.align_corners,) if "bilinear" in desc.op else ()
    scales = tuple(f or None for f in desc.scale)
    name = desc.op
    if getattr(desc, "exact", False):
        name = name.replace("upsample_nearest", "_upsample_nearest_exact")
    call = getattr(aten, name)
    if desc.op.endswith("_backward"):
        return lambda t: {"dx": call(t["dout"], desc.out_size, shape, *corners, *scales)}
    return lambda t: {"out": call(t["x"], desc.out_size, *corners, *scales)}
