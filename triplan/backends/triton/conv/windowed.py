"""Kernel ``windowed``: ``wgmma`` for images of few channels, such as RGB: the taps of a row are its channels.

The image is copied with padded columns and channels. Then what a row of taps reads for one result, its window, is
adjacent in memory, and windows are the pixels of a tensor map whose strides let them overlap. So the copy is about as
large as the image, and a step sums a row of taps where ``wgmma`` would sum one tap of few channels. In the channels
that are added both factors are 0, so that they change no sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from triplan.backends.runtime.launch import Arg, Copy, Int, Launch, Scratch, TensorMap
from triplan.backends.table import kernel
from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import bits, ceil_power, padded_bytes
from triplan.backends.triton.common.strides import axis_strides, count
from triplan.backends.triton.conv import shared, wgmma
from triplan.backends.triton.conv.windowed_kernels import conv2d_pad_kernel
from triplan.descriptors import Conv2dBackwardWeightDescriptor, Conv2dDescriptor, Layout, Operand
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku import PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact

#: Elements of a row that a program copies at most. Untuned.
BLOCK = 1024


class Padded(NamedTuple):
    """A copy (image or filter, row, column, channel) of an operand, in the workspace."""

    name: str
    offset: int
    channels: int
    columns: int
    left: int

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.columns * self.channels

    def nbytes(self, o: Operand) -> int:
        return padded_bytes(o.shape[0] * o.shape[2] * self.width * o.element.itemsize)


def _channels(desc: Conv2dProblem) -> int:
    """Channels of a copy: TMA moves windows whose distance is a multiple of VECTOR elements."""
    unit = wgmma.VECTOR // math.gcd(wgmma.VECTOR, desc.stride[1])
    return -(-desc.in_channels // unit) * unit


@fact
def _copies(desc: Conv2dProblem) -> tuple[Padded, ...]:
    """Of x, then of the weight."""
    channels = _channels(desc)
    unit = wgmma.VECTOR // math.gcd(wgmma.VECTOR, channels)  # columns: strides are multiples of VECTOR elements
    columns = (desc.out_extents[1] - 1) * desc.stride[1] + desc.kernel[1]
    x = Padded("x", 0, channels, -(-columns // unit) * unit, desc.padding[2])
    if shared.of_weight(desc):
        return (x,)
    return x, Padded("weight", x.nbytes(desc.operand("x")), channels, -(-desc.kernel[1] // unit) * unit, 0)


@fact
def _inner(desc: Conv2dProblem) -> Conv2dProblem:
    """The problem of windows."""
    mapped = Layout.strided(unit_axis=1, alignment=16, stride_multiple=wgmma.VECTOR)
    layouts = {name: layout for name, layout in dict(desc.layouts).items() if name != "dweight"}
    return desc.replace(
        in_channels=desc.kernel[1] * _channels(desc),
        width=desc.out_extents[1],
        kernel=(desc.kernel[0], 1),
        stride=(desc.stride[0], 1),
        padding=(*desc.padding[:2], 0, 0),
        layouts={**layouts, **{copy.name: mapped for copy in _copies(desc)}},
    )


def _end(desc: Conv2dProblem) -> int:
    """Where the copies end in the workspace."""
    last = _copies(desc)[-1]
    return last.offset + last.nbytes(desc.operand(last.name))


def _programs(o: Operand, copy: Padded) -> tuple[int, int, int]:
    """Programs, blocks of a row, and elements of a block."""
    block = min(ceil_power(copy.width), BLOCK)
    blocks = -(-copy.width // block)
    return o.shape[0] * o.shape[2] * blocks, blocks, block


def supports(desc: Conv2dProblem, target: Target) -> Support:
    if not 0 < desc.in_channels <= wgmma.CHANNELS:
        return Support.no(f"{desc.in_channels} channels; it takes 1 to {wgmma.CHANNELS}")
    if desc.groups > 1:
        return Support.no(f"{desc.groups} groups; it has one")
    if desc.dilation[1] > 1:
        return Support.no(f"dilation {desc.dilation}; the taps of a row must be adjacent")
    if any(_programs(desc.operand(c.name), c)[0] >= 2**31 for c in _copies(desc)):
        return Support.no("2**31 programs of a copy; a grid holds fewer")
    return wgmma.supports(_inner(desc), target)


def rank(desc: Conv2dProblem, target: Target) -> float:
    """Estimated microseconds."""
    found = wgmma.rank(_inner(desc), target)
    for copy in _copies(desc):
        o = desc.operand(copy.name)
        found += card.LAUNCH_US + (o.nbytes + copy.nbytes(o)) / card.BYTES_PER_US
    return found


def guarantee(desc: Conv2dProblem) -> Mapping[str, PrecisionGuarantee]:
    return wgmma.guarantee(_inner(desc))


def numerics(desc: Conv2dProblem) -> str | None:
    return wgmma.numerics(_inner(desc))


def workspace(desc: Conv2dProblem, target: Target) -> int:
    if not shared.of_weight(desc):
        return _end(desc)
    sums = wgmma.parts_of(_inner(desc))[0] * _inner(desc).operand("dweight").numel
    return _end(desc) + sums * desc.element.compute.itemsize


# --- launches ---


def _pad(o: Operand, copy: Padded) -> Launch:
    grid, blocks, block = _programs(o, copy)
    args: dict[str, Arg] = {
        "source": bits(o),
        "out": Scratch(copy.offset, o.element.bits),
        "strides": axis_strides(o),
        "channels": count(o.shape[1]),
        "rows": Int(o.shape[2]),
        "columns": Int(o.shape[3]),
        "left": Int(copy.left),
        "width": count(copy.width),
        "blocks": Int(blocks),
    }
    return Launch(conv2d_pad_kernel, grid, args, {"CHANNELS": copy.channels, "BLOCK": block}, num_warps=4)


def _map(desc: Conv2dProblem, arg: Arg) -> Arg:
    """An argument of ``wgmma``, which reads windows of the copies."""
    if not isinstance(arg, TensorMap) or arg.operand not in (found := {c.name: c for c in _copies(desc)}):
        return arg
    copy, shape = found[arg.operand], _inner(desc).operand(arg.operand).shape
    step = desc.stride[1] * copy.channels if copy.name == "x" else copy.width
    strides = (desc.operand(copy.name).shape[2] * copy.width, 1, copy.width, step)
    return replace(arg, copy=Copy(copy.offset, shape, strides))


def _windowed(desc: Conv2dProblem, launches: list[Launch]) -> list[Launch]:
    pads = [_pad(desc.operand(copy.name), copy) for copy in _copies(desc)]
    return [*pads, *(replace(x, args={k: _map(desc, a) for k, a in x.args.items()}) for x in launches)]


def build(desc: Conv2dProblem, target: Target) -> list[Launch]:
    return _windowed(desc, wgmma.build(_inner(desc), target))


def build_weight(desc: Conv2dProblem, target: Target) -> list[Launch]:
    """The gradient of the weight of windows, in parts, then their sum without the channels that were added."""
    if desc.operand("dweight").numel == 0:
        return []
    inner, sums = _inner(desc), Scratch(_end(desc), desc.element.compute)
    main = wgmma.build_weight(inner, target)[0]
    main = replace(main, args={**main.args, "out": sums, "out_strides": shared.strides_of_parts(inner)})
    fold = shared.folded(desc, wgmma.parts_of(inner)[0], sums, _channels(desc))
    return [*_windowed(desc, [main]), fold]


for _descriptor, _build in ((Conv2dDescriptor, build), (Conv2dBackwardWeightDescriptor, build_weight)):
    kernel(
        op=_descriptor.ops()[0],
        name="windowed",
        layout=shared.layout,
        supports=supports,
        rank=rank,
        workspace=workspace,
        guarantee=guarantee,
        numerics=numerics,
        **wgmma.HOPPER,
    )(_build)
