"""Kernel ``windowed``: ``wgmma`` for images of few channels, such as RGB: the taps of a row are its channels.

The image is copied with padded columns and channels. Then what a row of taps reads for one result, its window, is
adjacent in memory, and windows are the pixels of a tensor map whose strides let them overlap. So the copy is about as
large as the image, and a step sums a row of taps where ``wgmma`` would sum one tap of few channels. In the channels
that are added both factors are 0, so that they change no sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from triplan.backends.runtime.launch import Copy, Launch, Scratch
from triplan.backends.table import kernel
from triplan.backends.triton.conv import copies, shared, wgmma, wgmma_division
from triplan.backends.triton.conv.copies import VECTOR, Padded
from triplan.backends.triton.conv.wgmma_tiles import CHANNELS
from triplan.descriptors import Conv2dBackwardWeightDescriptor, Conv2dDescriptor
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku import PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact


def _channels(desc: Conv2dProblem) -> int:
    """Channels of a copy: TMA moves windows whose distance is a multiple of VECTOR elements."""
    unit = VECTOR // math.gcd(VECTOR, desc.stride[1])
    return -(-desc.in_channels // unit) * unit


@fact
def _copies(desc: Conv2dProblem) -> tuple[Padded, ...]:
    """Of x, of the weight, and of the result or its gradient if TMA cannot map it."""
    channels = _channels(desc)
    unit = VECTOR // math.gcd(VECTOR, channels)  # columns: strides are multiples of VECTOR elements
    columns = (desc.out_extents[1] - 1) * desc.stride[1] + desc.kernel[1]
    found = [Padded(desc.operand("x"), 0, channels, -(-columns // unit) * unit, desc.padding[2])]
    if not shared.of_weight(desc):
        columns = -(-desc.kernel[1] // unit) * unit
        found.append(Padded(desc.operand("weight"), found[0].end, channels, columns))
    others = {o: axis for o, axis in wgmma.unmapped(desc).items() if o.name in ("out", "dout")}
    return (*found, *copies.plain(others, found[-1].end))


@fact
def _inner(desc: Conv2dProblem) -> Conv2dProblem:
    """The problem of windows."""
    layouts = {name: layout for name, layout in dict(desc.layouts).items() if name != "dweight"}
    return desc.replace(
        in_channels=desc.kernel[1] * _channels(desc),
        width=desc.out_extents[1],
        kernel=(desc.kernel[0], 1),
        stride=(desc.stride[0], 1),
        padding=(*desc.padding[:2], 0, 0),
        layouts={**layouts, **{c.operand.name: c.layout for c in _copies(desc)}},
        **copies.whole(desc, _copies(desc)),
    )


def supports(desc: Conv2dProblem, target: Target) -> Support:
    if not 0 < desc.in_channels <= CHANNELS:
        return Support.no(f"{desc.in_channels} channels; it takes 1 to {CHANNELS}")
    if desc.groups > 1:
        return Support.no(f"{desc.groups} groups; it has one")
    if desc.dilation[1] > 1:
        return Support.no(f"dilation {desc.dilation}; the taps of a row must be adjacent")
    return copies.counted(_copies(desc)) and wgmma.supports(_inner(desc), target)


def rank(desc: Conv2dProblem, target: Target) -> float:
    """Estimated microseconds."""
    return wgmma.rank(_inner(desc), target) + copies.rank(_copies(desc), not shared.of_weight(desc))


def guarantee(desc: Conv2dProblem) -> Mapping[str, PrecisionGuarantee]:
    return wgmma.guarantee(_inner(desc))


def numerics(desc: Conv2dProblem) -> str | None:
    return wgmma.numerics(_inner(desc))


def workspace(desc: Conv2dProblem, target: Target) -> int:
    end = _copies(desc)[-1].end
    if not shared.of_weight(desc):
        return end
    division = wgmma.division_of(_inner(desc))[1]
    return end + division.slots * division.slot_bytes


# --- launches ---


def _windows(desc: Conv2dProblem) -> dict[str, Copy]:
    """Copies as ``wgmma`` reads and writes them."""
    found = {c.operand.name: c.tensor for c in _copies(desc)}
    for c in _copies(desc):
        if (name := c.operand.name) in ("x", "weight"):
            step = desc.stride[1] * c.channels if name == "x" else c.width
            found[name] = Copy(c.offset, _inner(desc).operand(name).shape, (*c.strides[:3], step))
    return found


def build(desc: Conv2dProblem, target: Target) -> list[Launch]:
    found = _copies(desc)
    main = copies.with_features(wgmma.build(_inner(desc), target), desc.out_channels)
    return copies.around(found, main, _windows(desc), found[-1].end)


def build_weight(desc: Conv2dProblem, target: Target) -> list[Launch]:
    """The gradient of the weight of windows, in pieces, then their sum without the channels that were added."""
    if desc.operand("dweight").numel == 0:
        return []
    inner, found = _inner(desc), _copies(desc)
    pieces = Scratch(0, desc.element.compute)
    main = wgmma.weight_sums(inner, target, pieces, (None,) * 4, False)
    fold = wgmma_division.fold(desc, inner, wgmma.division_of(inner)[1], pieces, _channels(desc))
    return copies.around(found, [main, fold], _windows(desc), found[-1].end)


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
        elements=wgmma.HALF,
        version=2,
        **wgmma.HOPPER,
    )(_build)
