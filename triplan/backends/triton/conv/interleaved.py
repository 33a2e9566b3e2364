"""Kernel ``interleaved``: the gradient of x of strided convolutions with few channels, all remainders at once.

``wgmma`` computes the pixels of each remainder modulo the strides in a launch of their own, and reads dout for every
tap of each. Here the pixels of all remainders are features of one pixel, so that the gradient is a convolution of dout
with strides of 1, and dout is read once for all of them. Its filters are a copy of the weight, with zeros where a tap
does not reach a remainder. Results are written into the workspace and copied into dx.

A zero times an infinity of dout is NaN, in pixels that dout does not reach. So the copy computes what is not finite
again, from the taps that reach it alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from triplan.backends.runtime.launch import Arg, Copy, Int, Launch, Scratch, TensorMap
from triplan.backends.table import kernel
from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import padded_bytes, values
from triplan.backends.triton.common.strides import axis_strides, count
from triplan.backends.triton.conv import copies, shared, wgmma
from triplan.backends.triton.conv.interleaved_kernels import conv2d_interleave_kernel, conv2d_separate_kernel
from triplan.descriptors import Conv2dBackwardInputDescriptor, Conv2dDescriptor
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku import PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact

#: Elements that a program copies. Untuned.
BLOCK = 1024
#: Features of the convolution of dout at most. From 256 on ``wgmma`` has as wide tiles of each remainder. Untuned.
FEATURES = 128


class Axis(NamedTuple):
    """Of the rows or columns: taps of the convolution of dout, how far the first lies from a result, and padding."""

    taps: int
    first: int
    after: int


def _axis(desc: Conv2dProblem, axis: int) -> Axis:
    """A tap r reaches a row ``i * stride + a`` of x from row ``i + (a + padding - r * dilation) / stride`` of dout."""
    stride, dilation, before = desc.stride[axis], desc.dilation[axis], desc.padding[2 * axis]
    reached = itertools.product(range(stride), range(desc.kernel[axis]))
    found = [n // stride for n in (a + before - r * dilation for a, r in reached) if n % stride == 0]
    taps = max(found) - min(found) + 1
    results = -(-(desc.height, desc.width)[axis] // stride)
    return Axis(taps, min(found), results + taps - 1 - desc.out_extents[axis] + min(found))


@fact
def _inner(desc: Conv2dProblem) -> Conv2dDescriptor | None:
    """The convolution of dout; None if it would have to leave out rows or columns of dout."""
    axes = _axis(desc, 0), _axis(desc, 1)
    if any(a.first > 0 or a.after < 0 for a in axes):
        return None
    features = copies.padded_channels(math.prod(desc.stride) * desc.in_channels)
    last = copies.Padded(desc.operand("dx"), 0, features, 1).layout
    return Conv2dDescriptor(
        element=desc.element,
        batch=desc.batch,
        in_channels=desc.out_channels,
        height=desc.out_extents[0],
        width=desc.out_extents[1],
        out_channels=features,
        kernel=(axes[0].taps, axes[1].taps),
        padding=(-axes[0].first, axes[0].after, -axes[1].first, axes[1].after),
        layouts={"x": desc.operand("dout").layout, "weight": last, "out": last},
    )


class Copied(NamedTuple):
    """The filters and the results of the convolution of dout, in the workspace, channels last; its bytes."""

    weight: Copy
    out: Copy
    end: int


@fact
def _copied(desc: Conv2dProblem) -> Copied:
    inner = _inner(desc)
    assert inner is not None
    found, end = [], 0
    for name in ("weight", "out"):
        shape = inner.operand(name).shape
        _, channels, rows, columns = shape
        found.append(Copy(end, shape, (rows * columns * channels, 1, columns * channels, channels)))
        end += padded_bytes(math.prod(shape) * desc.element.itemsize)
    return Copied(found[0], found[1], end)


def _programs(desc: Conv2dProblem) -> int:
    """Programs of the copy into dx."""
    return desc.batch * desc.height * -(-desc.width * desc.in_channels // BLOCK)


def supports(desc: Conv2dProblem, target: Target) -> Support:
    if desc.stride == (1, 1):
        return Support.no("strides of 1; it takes others")
    if desc.groups > 1:
        return Support.no(f"{desc.groups} groups; it has one")
    if not 0 < math.prod(desc.stride) * desc.in_channels <= FEATURES:
        return Support.no(f"{desc.in_channels} channels; it takes 1 to {FEATURES // math.prod(desc.stride)}")
    if desc.operand("dx").numel == 0:
        return Support.no("an operand is empty")
    inner = _inner(desc)
    if inner is None:
        return Support.no("rows or columns of dout that it would have to leave out")
    if _programs(desc) >= 2**31 or desc.width * desc.in_channels + BLOCK >= 2**31:
        return Support.no("2**31 programs or elements of a row; a grid holds fewer")
    return shared.counted(desc, 1) and wgmma.supports(inner, target)


def rank(desc: Conv2dProblem, target: Target) -> float:
    """Estimated microseconds."""
    inner = _inner(desc)
    assert inner is not None
    copied = inner.operand("out").nbytes + desc.operand("dx").nbytes
    return wgmma.rank(inner, target) + 2 * card.LAUNCH_US + copied / card.BYTES_PER_US


def guarantee(desc: Conv2dProblem) -> Mapping[str, PrecisionGuarantee]:
    inner = _inner(desc)
    assert inner is not None
    return shared.guaranteed(desc, desc.multiplicands, inner.in_channels * inner.taps, 1)


def numerics(desc: Conv2dProblem) -> str:
    """Taps of the convolution of dout, in their order, decide the bits of a pixel."""
    how = f"{desc.out_channels}.{desc.kernel}.{desc.stride}.{desc.dilation}.{_axis(desc, 0)[:2]}.{_axis(desc, 1)[:2]}"
    return f"{desc.op}.interleaved.{desc.element}.{how}.v1".replace(" ", "")


def workspace(desc: Conv2dProblem, target: Target) -> int:
    return _copied(desc).end


def _places(desc: Conv2dProblem) -> dict[str, Arg]:
    """Sizes that both copies take."""
    return {
        "channels": count(desc.in_channels),
        "filters": count(desc.out_channels),
        "kernel_rows": Int(desc.kernel[0]),
        "kernel_columns": Int(desc.kernel[1]),
        "stride_rows": Int(desc.stride[0]),
        "stride_columns": Int(desc.stride[1]),
        "above": Int(desc.padding[0]),
        "left": Int(desc.padding[2]),
        "dilation_rows": Int(desc.dilation[0]),
        "dilation_columns": Int(desc.dilation[1]),
        "weight": values(desc.operand("weight")),
        "weight_strides": axis_strides(desc.operand("weight")),
    }


def _mapped(arg: Arg, copied: Copied) -> Arg:
    """What the kernel of the convolution of dout reads and writes instead of its operands."""
    if not isinstance(arg, TensorMap):
        return arg
    name = {"x": "dout", "out": "dx"}.get(arg.operand, arg.operand)
    return replace(arg, operand=name, copy={"weight": copied.weight, "dx": copied.out}.get(name))


def build(desc: Conv2dProblem, target: Target) -> list[Launch]:
    """The copy of the filters, the convolution of dout, and the copy of its results."""
    inner, copied = _inner(desc), _copied(desc)
    assert inner is not None
    elements, bits = math.prod(copied.weight.shape), desc.element
    filters: dict[str, Arg] = {
        **_places(desc),
        "out": Scratch(copied.weight.offset, bits),
        "elements": count(elements),
        "taps_rows": Int(inner.kernel[0]),
        "taps_columns": Int(inner.kernel[1]),
        "first_row": Int(_axis(desc, 0).first),
        "first_column": Int(_axis(desc, 1).first),
    }
    first = Launch(conv2d_interleave_kernel, -(-elements // BLOCK), filters, {"BLOCK": BLOCK}, overlaps=True)
    main = [
        replace(x, args={name: _mapped(arg, copied) for name, arg in x.args.items()})
        for x in wgmma.build(inner, target)
    ]
    dout, dx = desc.operand("dout"), desc.operand("dx")
    results: dict[str, Arg] = {
        **_places(desc),
        "source": Scratch(copied.out.offset, bits),
        "source_strides": tuple(count(copied.out.strides[axis]) for axis in (0, 2, 3)),
        "dout": values(dout),
        "dout_strides": axis_strides(dout),
        "dout_rows": Int(desc.out_extents[0]),
        "dout_columns": Int(desc.out_extents[1]),
        "dx": values(dx),
        "dx_strides": axis_strides(dx),
        "rows": Int(desc.height),
        "columns": Int(desc.width),
        "tiles": Int(-(-desc.width * desc.in_channels // BLOCK)),
    }
    last = Launch(conv2d_separate_kernel, _programs(desc), results, {"BLOCK": BLOCK}, overlaps=True)
    return [first, *main, last]


kernel(
    op=Conv2dBackwardInputDescriptor.ops()[0],
    name="interleaved",
    layout=shared.layout,
    supports=supports,
    rank=rank,
    workspace=workspace,
    guarantee=guarantee,
    numerics=numerics,
    elements=wgmma.HALF,
    version=2,
    **wgmma.HOPPER,
)(build)
