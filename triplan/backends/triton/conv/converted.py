"""Kernel ``converted``: copies operands from channels first to channels last, and runs ``tiles`` on the copies.

``entries`` makes such a kernel of any other.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType
from typing import Any

from triplan.backends.runtime.launch import (
    Arg,
    Copy,
    Int,
    Launch,
    Ptr,
    Scratch,
    Stride,
    TensorMap,
    power_of_two_in,
)
from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import bits, ceil_power, padded_bytes
from triplan.backends.triton.common.strides import count
from triplan.backends.triton.conv import converted_kernels as kernels, shared, tiles
from triplan.descriptors import Layout, Operand
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku import Support, Target
from triplan.sku.facts import fact

#: Pixels (or channels) of a tile at most, and elements of one. Untuned.
SIDE = 64
AREA = 4096


def _moved(desc: Conv2dProblem) -> tuple[Operand, ...]:
    """Operands that are copied: dweight is small, and written by the fold as it lies. What is empty needs no copy."""
    return tuple(o for o in shared.channels_apart(desc) if o.layout.packed and o.name != "dweight" and o.numel)


@fact
def _inner(desc: Conv2dProblem) -> Conv2dProblem:
    """The problem with channels last."""

    def last(o: Operand) -> Layout:
        return Layout.strided(unit_axis=1, alignment=16, stride_multiple=min(power_of_two_in(o.shape[1]), 16))

    return desc.replace(layouts={**dict(desc.layouts), **{o.name: last(o) for o in _moved(desc)}})


@fact
def _offsets(desc: Conv2dProblem) -> tuple[dict[str, int], int]:
    """Where each copy lies in the workspace, and where they end."""
    found, end = {}, 0
    for o in _moved(desc):
        found[o.name] = end
        end += padded_bytes(o.nbytes)
    return found, end


# --- launches ---


def _sizes(o: Operand) -> tuple[int, int, int, int]:
    """Channels and pixels of an image, and of a tile."""
    channels, pixels = o.shape[1], math.prod(o.shape[2:])
    across = min(SIDE, ceil_power(pixels))
    return channels, pixels, min(AREA // across, ceil_power(channels), 4 * SIDE), across


def _programs(o: Operand) -> int:
    channels, pixels, block_c, block_p = _sizes(o)
    return o.shape[0] * -(-channels // block_c) * -(-pixels // block_p)


def _copy(o: Operand, offset: int) -> Launch:
    """Of an input into the workspace, or of an output out of it."""
    channels, pixels, block_c, block_p = _sizes(o)
    own, copy = bits(o), Scratch(offset, o.element.bits)
    args: dict[str, Arg] = {
        "source": copy if o.is_written else own,
        "out": own if o.is_written else copy,
        "channels": count(channels),
        "pixels": count(pixels),
        "tiles_channels": Int(-(-channels // block_c)),
        "tiles_pixels": Int(-(-pixels // block_p)),
    }
    constants = {"BLOCK_C": block_c, "BLOCK_P": block_p, "LAST": not o.is_written}
    return Launch(kernels.conv2d_order_kernel, _programs(o), args, constants, num_warps=4)


def _strides(o: Operand) -> tuple[int, ...]:
    """Of a copy with channels last."""
    _, channels, rows, columns = o.shape
    return channels * rows * columns, 1, columns * channels, channels


def _with_copies(desc: Conv2dProblem, arg: Arg) -> Arg:
    """An argument of the inner kernel with copies in place of operands; its own scratch follows the copies."""
    offsets, end = _offsets(desc)
    if isinstance(arg, tuple):
        return tuple(_with_copies(desc, a) for a in arg)
    if isinstance(arg, Scratch):
        return replace(arg, offset=arg.offset + end)
    if isinstance(arg, Ptr) and arg.operand in offsets:
        return Scratch(offsets[arg.operand], arg.element)
    if isinstance(arg, (Stride, TensorMap)) and arg.operand in offsets:
        o = desc.operand(arg.operand)
        if isinstance(arg, TensorMap):
            return replace(arg, copy=Copy(offsets[o.name], o.shape, _strides(o)))
        step = _strides(o)[arg.axis]
        return Int(step, True, power_of_two_in(step))
    return arg


def entries(inner: ModuleType, name: str, **entry: Any) -> None:
    """Register ``inner``, a kernel of this family, over copies with channels last; its bits are those of ``inner``."""

    def supports(desc: Conv2dProblem, target: Target) -> Support:
        if not _moved(desc):
            return Support.no("no operand is packed with channels first and has more than one pixel and channel")
        if any(_programs(o) >= 2**31 for o in _moved(desc)):
            return Support.no("2**31 programs of a copy; a grid holds fewer")
        return inner.supports(_inner(desc), target)  # type: ignore[no-any-return]

    def rank(desc: Conv2dProblem, target: Target) -> float:
        """Estimated microseconds."""
        copies = (card.LAUNCH_US + 2 * o.nbytes / card.BYTES_PER_US for o in _moved(desc))
        return inner.rank(_inner(desc), target) + sum(copies)  # type: ignore[no-any-return]

    def workspace(desc: Conv2dProblem, target: Target) -> int:
        return _offsets(desc)[1] + inner.workspace(_inner(desc), target)  # type: ignore[no-any-return]

    def build(desc: Conv2dProblem, target: Target) -> list[Launch]:
        main = (inner.build_weight if shared.of_weight(desc) else inner.build)(_inner(desc), target)
        if not main:
            return []
        offsets, _ = _offsets(desc)
        first = [_copy(o, offsets[o.name]) for o in _moved(desc) if not o.is_written and o.numel]
        last = [_copy(o, offsets[o.name]) for o in _moved(desc) if o.is_written]
        found = [replace(x, args={k: _with_copies(desc, a) for k, a in x.args.items()}) for x in main]
        return [*first, *found, *last]

    shared.register(
        build,
        build,
        name=name,
        supports=supports,
        rank=rank,
        workspace=workspace,
        guarantee=inner.guarantee,
        numerics=inner.numerics,
        **entry,
    )


entries(tiles, "converted", priority=1)  # as tiles, whose bits it has
