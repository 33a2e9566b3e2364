"""Convolutions for the proofs: contributions are the channels that a pixel sums, or the images that a weight does.

Of a depthwise convolution, or of few channels, a pixel sums the taps of one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from proofs import Drawn, Kind, Values, Variant, draw, joins

HEIGHT, WIDTH, KERNEL = 4, 5, (2, 2)
#: Images of what sums channels, and channels and filters of a group of what sums images or is not summed.
IMAGES, FEW, FILTERS = 3, 3, 5
#: Channels of a depthwise convolution that are read in blocks.
BLOCK = 32
LAST = tp.Layout.strided(unit_axis=1, alignment=16, stride_multiple=8)
#: Operands with an axis of images.
OF_IMAGES = ("x", "dout", "out", "dx")


class Convolution(Drawn):
    def parts(self) -> Iterator[Variant]:
        """Other images: one, fewer in another order, more. What sums images has no batch."""
        for kept in ([IMAGES - 1], [2, 0], [1, 2, 0, 0, 1]):
            yield self._variant(dict.fromkeys(OF_IMAGES, (0, torch.tensor(kept))), batch=len(kept))

    def reordered(self) -> Variant:
        return self._variant(channel_orders(self.desc, shuffled(summed(self.desc))))

    def _variant(self, order: dict[str, tuple[int, Tensor]], **fields: Any) -> Variant:
        def taken(values: Any) -> Values:
            found = {name: t.index_select(*order[name]) if name in order else t for name, t in values.items()}
            return laid(self.desc, found)

        (name,) = (o.name for o in self.desc.operands() if o.is_written)
        other = Convolution(self.desc.replace(**fields), lambda: taken(self.values))
        return Variant(other, lambda out: out[name], lambda out: taken(out)[name] if fields else out[name])


def laid(desc: tp.Descriptor, values: Values) -> Values:
    """``values`` in the layouts of ``desc``: channels last, or first."""
    last = torch.channels_last if desc.layouts else torch.contiguous_format
    return {name: t.contiguous(memory_format=last) if t.dim() == 4 else t for name, t in values.items()}


def summed(desc: Any) -> int:
    """Images, or channels or filters of a group, or taps."""
    if sums_taps(desc):
        return int(desc.kernel[1])
    return int({"conv2d": desc.channels, "conv2d_backward_input": desc.filters}.get(desc.op, desc.batch))


def sums_taps(desc: Any) -> bool:
    """Whether what is written is one pixel, and what is shuffled the taps of a row."""
    return bool(desc.kernel[0] == 1 < desc.kernel[1])


def shuffled(n: int) -> Tensor:
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    return order if n > 2 else torch.arange(n).flip(0)


def channel_orders(desc: Any, order: Tensor) -> dict[str, tuple[int, Tensor]]:
    """By operand: the axis that is summed, and its order where that of a group is ``order``."""
    if sums_taps(desc) and desc.op == "conv2d":
        return {"weight": (3, order), "x": (3, order)}
    if sums_taps(desc):
        return {"weight": (3, order), "dout": (3, len(order) - 1 - order.flip(0))}
    whole = torch.cat([g * len(order) + order for g in range(desc.groups)])
    if desc.op == "conv2d":
        return {"x": (1, whole), "weight": (1, order)}
    if desc.op == "conv2d_backward_input":
        return {"dout": (1, whole), "weight": (0, whole)}
    return {"x": (0, order), "dout": (0, order)}


def values(desc: Any, kind: Kind, n: int) -> Values:
    """Numbers of a kind; of cancelling ones the second half of what is summed opposes the first, all shuffled."""
    g = torch.Generator().manual_seed(0)
    inputs = [o for o in desc.operands() if not o.is_written]
    found = {o.name: draw(o.shape, desc.element, kind, n, g) for o in inputs}
    if kind == "huge" and desc.element is tp.ElementKind.F64:
        # The oracle's range is no wider: what overflows in it depends on the order.
        found = {name: t * 2.0**-520 for name, t in found.items()}
    if kind == "cancelling":
        half = torch.arange(summed(desc)) % (summed(desc) // 2)
        sign = torch.arange(summed(desc)) < summed(desc) // 2
        order = shuffled(summed(desc))
        for i, (name, (axis, at)) in enumerate(channel_orders(desc, half[order]).items()):
            found[name] = found[name].index_select(axis, at)
            if i == 0:
                signs = (sign[order].repeat(len(at) // len(order)) * 2 - 1).to(found[name].dtype)
                found[name] = found[name] * signs.view([-1 if a == axis else 1 for a in range(4)])
        if "bias" in found:
            found["bias"] = found["bias"] * 2.0**-10  # small beside what is rounded off
    return laid(desc, found)


def problem(
    op: str,
    n: int,
    element: tp.ElementKind,
    kind: Kind,
    depthwise: bool = False,
    eights: bool = False,
    last: bool = False,
    narrow: bool = False,
    tf32: bool = False,
    pointwise: bool = False,
    **fields: Any,
) -> Convolution:
    unit = 8 if eights else 2  # TMA moves 8 channels
    even = max(n // (2 if n < 64 else 4), 2 * unit) // unit * unit  # 12 would be padded to one step of wgmma
    groups = fields.get("groups", 1)
    few, filters = (8, 16) if eights else (FEW, FILTERS)
    sizes: dict[str, Any] = {"batch": IMAGES, "in_channels": few * groups, "out_channels": filters * groups}
    sizes |= {"height": HEIGHT, "width": WIDTH, "kernel": KERNEL}
    if depthwise:
        own = BLOCK if last else FEW
        sizes |= {"in_channels": own, "out_channels": own, "groups": own}
    if op == "conv2d_backward_weight":
        sizes["batch"] = even
    elif (
        depthwise or narrow
    ):  # each image of x, or of dout, is a row of one pixel for each tap; what is written is one pixel
        back = op == "conv2d_backward_input"
        sizes |= {"height": 1, "width": 1 if back else even, "kernel": (1, even)}
        sizes["padding"] = (0, 0, even - 1, even - 1) if back else (0,) * 4
    else:
        sizes["in_channels" if op == "conv2d" else "out_channels"] = even * groups
    if op != "conv2d":
        fields.pop("has_bias", None)
    cls: Any = tp.descriptor_types()[op]
    desc = cls(**{**sizes, **fields}, element=element)
    if tf32 and element is tp.ElementKind.F32:
        desc = desc.replace(math="tf32")
    if pointwise:
        order = tp.Layout.strided(order=(0, 2, 3, 1))
        desc = desc.replace(kernel=(1, 1), layouts={o.name: order for o in desc.operands() if o.name in OF_IMAGES})
    if last:
        promised = (o.name for o in desc.operands() if len(o.shape) == 4 and o.shape[1] % LAST.stride_multiple == 0)
        desc = desc.replace(layouts=dict.fromkeys(promised, LAST))
    return Convolution(desc, partial(values, desc, kind, n))


for _op in ("conv2d", "conv2d_backward_input", "conv2d_backward_weight"):
    joins(
        _op,
        {"has_bias": True},
        {"groups": 2, "stride": (2, 1), "padding": (1, 0, 1, 1), "dilation": (1, 2)},
        {"depthwise": True},
        {"eights": True},
        {"eights": True, "last": True, "stride": (1, 2), "padding": (1, 0, 1, 1)},
        *([{"pointwise": True}] if _op != "conv2d_backward_weight" else []),
        *([{"eights": True, "last": True, "narrow": True}] if _op == "conv2d" else []),
        *([{"tf32": True}, {"depthwise": True, "last": True}] if _op == "conv2d_backward_weight" else []),
    )(partial(problem, _op))
