"""Kernel ``pointwise``: filters of one tap over up to 128 channels (256 of few features), last without gaps.

Such pixels are the rows of a matrix that lies in one piece. Where TMA cannot map them, ``converted_wgmma`` reads and
writes them twice, for copies with whole vectors of channels; where it can, ``wgmma`` takes as long for a part of a
block of channels as for all of it. Of so few channels the products take less time than the memory: so tiles are read
through pointers, element by element where rows begin anywhere, by programs that have few instructions for each, and
that read their weights once for several tiles.
"""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.runtime.launch import Arg, Int, Launch
from triplan.backends.table import kernel
from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import I32_LIMIT, ceil_power, values
from triplan.backends.triton.common.strides import axis_strides, count, known_strides
from triplan.backends.triton.conv import shared, wgmma
from triplan.backends.triton.conv.copies import VECTOR
from triplan.backends.triton.conv.pointwise_kernels import conv2d_pointwise_kernel
from triplan.backends.triton.conv.wgmma_tiles import features_of, reduced
from triplan.descriptors import Conv2dBackwardInputDescriptor, Conv2dDescriptor, Operand
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku import PrecisionGuarantee, Support, Target

#: Pixels of a tile, its features at most, and elements of both factors, which registers hold. Untuned.
BLOCK_M, BLOCK_N, MOST_ELEMENTS = 64, 128, (64 + 128) * 128
WARPS = 8
#: Tiles of a program at most, of about as many as the others have. On an H200 one wave of programs was the fastest with
#: up to 12, and not with 32 and more, by a run that is not published.
MOST_TILES = 12
#: Programs of a multiprocessor that read elements. Untuned.
BUSY = 8
#: Slots of vectors of pixels, the tiles that are read at one time: as many as leave memory for two programs. Untuned.
STAGES, MOST_STAGED = 3, 128
#: Bytes that a multiprocessor must read ahead, about its part of an H200's bandwidth for the time of a read. Untuned.
AHEAD_BYTES = 48 << 10
#: Microseconds of a multiprocessor for a vector of a tile of BLOCK_M pixels, read or written, if pixels are read in
#: vectors, by least squares over 18 problems; and for an element, of those that are read as such. From times on an H200
#: that are not published.
VECTOR_US, ELEMENT_US = 4e-4, 8.5e-5
#: Microseconds of a program that waits for what it reads, from drawn problems on an H200.
WAIT_US = 0.3
#: How much of the bandwidth of memory reads of elements leave unused. Untuned.
SLOWER = 1.3


def _images(desc: Conv2dProblem) -> tuple[Operand, Operand]:
    """What is read, and what is written."""
    names = ("dout", "dx") if shared.of_input(desc) else ("x", "out")
    return desc.operand(names[0]), desc.operand(names[1])


def _tiles(desc: Conv2dProblem) -> tuple[int, int]:
    return -(-shared.pixels(desc) // BLOCK_M), -(-features_of(desc) // _wide(desc))


def _wide(desc: Conv2dProblem) -> int:
    """Features of a tile."""
    return max(min(BLOCK_N, ceil_power(features_of(desc))), 16)


def _deep(desc: Conv2dProblem) -> int:
    """Channels of a step."""
    return max(ceil_power(reduced(desc)), 16)


def _stages(desc: Conv2dProblem) -> int:
    """Stages of the loop over tiles: several read vectors ahead while a tile is multiplied and written.

    Without vectors they would copy words of 4 bytes, an instruction each.
    """
    if not shared.in_vectors(_images(desc)[0]):
        return 1
    return STAGES if _deep(desc) <= MOST_STAGED else 2


def _held(desc: Conv2dProblem) -> int:
    """Programs of a multiprocessor at one time: those that read enough ahead, or that its registers hold."""
    stages = _stages(desc)
    if stages == 1:
        return BUSY
    # Accumulators, an eighth of the tile's features for each thread, and what stores and a bias need for them.
    eighths = 4 if any(o.name == "bias" for o in desc.operands()) else 3
    registers = -(-(30 + eighths * _wide(desc) // 8) // 8) * 8
    ahead = (stages - 1) * BLOCK_M * _deep(desc) * desc.element.itemsize
    return min(card.SM_REGISTERS // (32 * WARPS * registers), -(-AHEAD_BYTES // ahead))


def _each(desc: Conv2dProblem, target: Target) -> int:
    """Tiles of a program: those of a few whole waves, so that all read weights once and end together.

    No bits depend on it.
    """
    high, wide = _tiles(desc)
    slots = _held(desc) * target.sm_count
    waves = -(-high * wide // (slots * MOST_TILES))
    return max(-(-high // max(slots * waves // wide, 1)), 1)


def _programs(desc: Conv2dProblem, target: Target) -> int:
    high, wide = _tiles(desc)
    return -(-high // _each(desc, target)) * wide


def supports(desc: Conv2dProblem, target: Target) -> Support:
    if not shared.is_matrix(desc) or desc.groups > 1:
        return Support.no(
            "it takes one group, kernels of one tap, strides of 1, no padding, channels last without gaps"
        )
    most = MOST_ELEMENTS // (BLOCK_M + _wide(desc))
    if reduced(desc) == 0 or _deep(desc) > most:
        return Support.no(
            f"{reduced(desc)} channels to sum; it takes 1 to {1 << most.bit_length() - 1} of so many features"
        )
    if BLOCK_M * features_of(desc) >= I32_LIMIT:
        return Support.no(f"{features_of(desc)} features; 32 bits count the elements of {BLOCK_M} pixels")
    return shared.counted(desc, _programs(desc, target))


def rank(desc: Conv2dProblem, target: Target) -> float:
    """Estimated microseconds: the memory, or instructions for each vector or element of the tiles."""
    high, wide = _tiles(desc)
    moved = sum(o.nbytes for o in desc.operands()) / card.BYTES_PER_US
    if shared.in_vectors(_images(desc)[0]):
        element_us = VECTOR_US / VECTOR
    else:
        element_us, moved = ELEMENT_US, moved * SLOWER
    busy = high * wide / target.sm_count * BLOCK_M * (_deep(desc) + _wide(desc)) * element_us
    return shared.launch_us(_programs(desc, target), target) + WAIT_US + max(moved, busy)


def guarantee(desc: Conv2dProblem) -> Mapping[str, PrecisionGuarantee]:
    return shared.guaranteed(desc, desc.multiplicands, reduced(desc), 1)


def numerics(desc: Conv2dProblem) -> str:
    return f"{desc.op}.pointwise.{desc.element}.{reduced(desc)}.{_wide(desc)}x{_deep(desc)}.v1"


def _strides(o: Operand) -> tuple[Arg, Arg]:
    """Of the weight's filters and channels: known ones have 32 bits, so that offsets take half the registers."""
    found = zip(known_strides(o, 4), axis_strides(o), strict=True)
    first, second, *_ = (count(n) if isinstance(n, int) and n != 1 else arg for n, arg in found)
    return first, second


def build(desc: Conv2dProblem, target: Target) -> list[Launch]:
    programs, (source, out) = _programs(desc, target), _images(desc)
    if programs == 0:
        return []
    weight, bias = desc.operand("weight"), next((o for o in desc.operands() if o.name == "bias"), None)
    filters, channels = _strides(weight)
    feature_stride, channel_stride = (channels, filters) if shared.of_input(desc) else (filters, channels)
    args: dict[str, Arg] = {
        "source": values(source),
        "weight": values(weight),
        "bias": None if bias is None else values(bias),
        "out": values(out),
        "feature_stride": feature_stride,
        "channel_stride": channel_stride,
        "bias_stride": None if bias is None else axis_strides(bias)[0],
        "pixels": Int(shared.pixels(desc)),
        "features": count(features_of(desc)),
        "channels": count(reduced(desc)),
        "each": Int(_each(desc, target)),
        "tiles_n": Int(_tiles(desc)[1]),
    }
    constants = {"BLOCK_M": BLOCK_M, "BLOCK_N": _wide(desc), "BLOCK_K": _deep(desc)}
    launch = Launch(
        conv2d_pointwise_kernel,
        programs,
        args,
        constants,
        num_warps=WARPS,
        num_stages=_stages(desc),
        overlaps=shared.begins_early(programs, target),
    )
    return [launch]


for _descriptor in (Conv2dDescriptor, Conv2dBackwardInputDescriptor):
    kernel(
        op=_descriptor.ops()[0],
        name="pointwise",
        elements=wgmma.HALF,
        layout=shared.layout,
        supports=supports,
        rank=rank,
        guarantee=guarantee,
        numerics=numerics,
        priority=3,
    )(build)
