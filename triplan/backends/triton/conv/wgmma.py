"""Kernel ``wgmma``: convolution and its gradients on Hopper by TMA and wgmma, channels last; no atomics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from triplan.backends.runtime.gluon import gl
from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch, TensorMap
from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import values
from triplan.backends.triton.common.strides import axis_strides
from triplan.backends.triton.conv import shared, wgmma_division
from triplan.backends.triton.conv.wgmma_division import (
    MOST_MAPS,
    PIXELS,
    Division,
    end_under,
    row_remainders,
    summed_box,
)
from triplan.backends.triton.conv.wgmma_kernels import conv2d_wgmma_kernel
from triplan.backends.triton.conv.wgmma_rows_kernels import conv2d_rows_wgmma_kernel
from triplan.backends.triton.conv.wgmma_tiles import (
    CHANNELS,
    LATER_US,
    RESULT_US,
    Part,
    Tile,
    depth_of,
    features_of,
    lattice_of,
    launches_of,
    parts_of,
    parts_us,
    reduced,
    tile_of,
    tiles_in,
    width_of,
)
from triplan.backends.triton.conv.wgmma_weight_kernels import conv2d_weight_wgmma_kernel
from triplan.descriptors import Operand
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku import ArchSku, ElementKind, PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact

#: What the entries of kernels by TMA and wgmma have in common.
HALF = ("f16", "bf16")
HOPPER: dict[str, Any] = {
    "archs": (ArchSku.SM90A,),
    "features": ("gluon", "tma"),
    "interpretable": False,
}
_GLUON_ELEMENT = {ElementKind.F16: gl.float16, ElementKind.BF16: gl.bfloat16, ElementKind.F32: gl.float32}
#: Rows of tiles that are computed together, for the L2 cache.
GROUP = 8
#: Groups at most: each has a launch of its own. Untuned.
MOST_GROUPS = 8
#: Channels and filters of a group at least: of smaller groups, one launch of ``tiles`` takes less time. Untuned.
LEAST_OF_GROUP = 64
#: Steps from which on tiles of large boxes are stored during the next: of fewer, this took longer on an H200.
HELD_STEPS = 8
#: (blocks of filters, blocks of channels under a tap) of tiles of the gradient of weight.
WEIGHT_TILES = ((2, 4), (2, 2), (1, 8), (1, 4), (1, 2))
#: Microseconds of a step of those of tf32, by the blocks of a tile: mma reads both factors from shared memory once for
#: each product. Larger tiles would spill registers. On an H200.
TF32_STEP_US = {2: 0.9, 4: 1.36}

#: Microseconds that gradients of weight take beside their steps. From drawn problems on an H200.
SUMS_US = 2.0


# --- the gradient of weight ---


def _blocks(desc: Conv2dProblem) -> int:
    """Blocks of channels."""
    return -(-desc.channels // CHANNELS)


def _busy_us(d: Division, tile: Tile, step_us: float, moved: float) -> float:
    """Estimated microseconds of a division that moves so many bytes, with the sum of its pieces."""
    waves = -(-d.shares // card.SMS)
    busy = waves * (d.steps * step_us + d.pieces_of_share * RESULT_US * tile.blocks)
    # Each multiprocessor has its part of the bandwidth.
    return max(busy, moved / card.BYTES_PER_US * max(card.SMS / d.shares, 1.0)) + wgmma_division.fold_us(d)


def _step_us(desc: Conv2dProblem, tile: Tile) -> float:
    half = desc.element.itemsize == 2
    return tile.step_us if half else TF32_STEP_US[tile.rows * tile.features // CHANNELS]


@fact
def division_of(desc: Conv2dProblem) -> tuple[Tile, Division]:
    """Tile and division of the gradient of weight: the cheapest. Bits depend on it, so that it depends on no target."""
    found, moved = [], sum(desc.operand(name).nbytes for name in ("x", "dout"))
    half = desc.element.itemsize == 2
    for rows, columns in (t for t in WEIGHT_TILES if half or math.prod(t) in TF32_STEP_US):
        tile = Tile(summed_box(desc), rows, columns * CHANNELS)
        step_us = _step_us(desc, tile)
        tiles_filters = -(-desc.filters // (rows * CHANNELS))
        tiles = tiles_filters * -(-_blocks(desc) * desc.taps // columns)
        boxes = tile.boxes(lattice_of(desc))[0]
        of_tile = wgmma_division.candidates(rows, columns, tiles, tiles_filters, boxes)
        found += [(_busy_us(d, tile, step_us, moved), tile, d) for d in of_tile]
    _, tile, best = min(found, key=lambda f: f[0])
    return tile, best


def _weight_us(desc: Conv2dProblem) -> float:
    """Estimated microseconds. It says more than what ``division_of`` compares, whose choice decides bits."""
    tile, d = division_of(desc)
    blocks = -(-_blocks(desc) * desc.taps // d.columns) * d.columns / desc.taps
    read = d.rows * _filling(desc.filters, d.rows * d.tiles_filters) + d.columns * _filling(desc.channels, blocks)
    # No two tiles read the same boxes at one time, so that all of these come through the L2 cache.
    cached = min(d.shares, card.SMS) * tile.step_bytes / card.L2_BYTES_PER_US
    step_us = max(_step_us(desc, tile), PIXELS * read / card.TMA_ROWS_PER_US, cached)
    return SUMS_US + _busy_us(d, tile, step_us, shared.moved(desc))


def _filling(n: int, blocks: float) -> float:
    """How many times as long ``blocks`` blocks take as whole ones, if there are ``n`` channels; on average."""
    return 1.0 + (card.TMA_ENDING[1] - 1.0) * (1.0 - n // CHANNELS / blocks)


# --- which problems ---


def channel_axis(desc: Conv2dProblem, o: Operand) -> int:
    """The axis of an operand that must be adjacent: wgmma multiplies tf32 only if what it sums is."""
    return 0 if o.name == "weight" and shared.of_input(desc) and desc.element.itemsize > 2 else 1


def unmappable(o: Operand, axis: int = 1, groups: int = 1) -> str:
    """Why TMA cannot map an operand of four axes of which ``axis`` is the last in memory; empty if it can.

    ``groups``: into how many parts ``axis`` is divided, each with a map of its own.
    """
    what, vector = "filters" if axis == 0 else "channels", 16 // o.element.itemsize
    if groups > 1 and o.shape[axis] // groups % vector:
        return f"{o.name} has {o.shape[axis] // groups} {what} in a group; a multiple of {vector} is needed"
    if o.alignment < 16:
        return f"{o.name} is promised an alignment of {o.alignment} bytes; 16 are needed"
    if o.layout.packed:
        if math.prod(o.shape[2:]) > 1 or o.shape[1] % vector or axis == 0:
            return f"{o.name} is packed with {what} first; they must be last, and the strides multiples of {vector}"
        return ""
    if o.layout.unit_axis != axis:
        return f"{o.name} is promised no unit stride along its {what}"
    if any(o.shape[axis] > 1 for axis in o.layout.zero_axes):
        return f"{o.name} has a stride of 0"
    if o.layout.stride_multiple % vector:
        return f"{o.name} is promised stride_multiple={o.layout.stride_multiple}; a multiple of {vector} is needed"
    if o.is_written and o.shape[1] % vector:
        return f"{o.name} has {o.shape[1]} channels; TMA writes multiples of {vector}"
    return ""


def groups_along(desc: Conv2dProblem, o: Operand, axis: int) -> int:
    """Into how many groups ``axis`` of an operand is divided: filters of the weight are, its channels are of one."""
    return desc.groups if (o.name != "weight") == (axis == 1) else 1


def unmapped(desc: Conv2dProblem) -> dict[Operand, int]:
    """What TMA would move but cannot map, and the axis that must be adjacent."""
    mapped = ((o, channel_axis(desc, o)) for o in desc.operands() if len(o.shape) == 4 and o.name != "dweight")
    return {o: axis for o, axis in mapped if unmappable(o, axis, groups_along(desc, o, axis))}


def supports(desc: Conv2dProblem, target: Target) -> Support:
    if desc.element is ElementKind.F32 and desc.math is None:
        return Support.no("f32 is multiplied as f32; it multiplies as tf32")
    if desc.groups > (most := 1 if shared.of_weight(desc) else MOST_GROUPS):
        return Support.no(f"{desc.groups} groups; it takes up to {most}, a launch each")
    if desc.groups > 1 and min(desc.channels, desc.filters) < LEAST_OF_GROUP:
        sizes = f"{desc.channels} channels and {desc.filters} filters"
        return Support.no(f"groups of {sizes}; it takes {LEAST_OF_GROUP} or more of each")
    if max(desc.stride) > 2:
        return Support.no(f"strides {desc.stride}; it has 1 and 2")
    if min(n - s for n, s in zip((desc.height, desc.width), desc.stride, strict=True)) < 0:
        return Support.no("a stride is larger than the image")
    if min(desc.batch, desc.in_channels, desc.out_channels) == 0:
        return Support.no("an operand is empty, which TMA cannot map")
    for o, axis in unmapped(desc).items():
        return Support.no(f"reads and writes by TMA: {unmappable(o, axis, groups_along(desc, o, axis))}")
    if any(not o.layout.packed for o in desc.operands() if o.name == "bias"):
        return Support.no("bias is not promised to be packed")
    if shared.of_weight(desc) and (steps := division_of(desc)[1].all_steps) >= 2**31:
        return Support.no(f"{steps} steps; it counts fewer than 2**31")
    return shared.counted(desc, 1)


def rank(desc: Conv2dProblem, target: Target) -> float:
    """Estimated microseconds: waves of tiles, or the bytes of the operands."""
    launches = launches_of(desc)
    moved = shared.moved(desc)
    if shared.of_weight(desc):
        busy = _weight_us(desc)
    else:
        _, parts = parts_of(desc, tile_of(desc), target.sm_count)
        whole = desc.element.itemsize == 2 and features_of(desc) % CHANNELS == 0
        later_us = LATER_US if whole else RESULT_US
        busy = desc.groups * launches * parts_us(desc, parts, target.sm_count, moved <= card.L2_BYTES, later_us)
    launches *= desc.groups
    return shared.launches_us(launches) + max(busy, moved / card.BYTES_PER_US)


def guarantee(desc: Conv2dProblem) -> Mapping[str, PrecisionGuarantee]:
    if shared.of_weight(desc):
        return shared.guaranteed(desc, desc.multiplicands, shared.pixels(desc), division_of(desc)[1].pieces)
    return shared.guaranteed(desc, desc.multiplicands, reduced(desc) * desc.taps, 1)


def numerics(desc: Conv2dProblem) -> str | None:
    """Blocks of channels, and the taps of each, column by column: nothing else decides the bits of a pixel."""
    if shared.of_weight(desc):
        return None
    how = f"{reduced(desc)}.{desc.kernel}.{desc.stride}.{desc.dilation}".replace(" ", "")
    return f"{desc.op}.wgmma.{desc.element}.{how}.{width_of(desc)}.v3"


def workspace(desc: Conv2dProblem, target: Target) -> int:
    return division_of(desc)[1].scratch_bytes if shared.of_weight(desc) else 0


# --- launches ---


@fact
def _map(
    name: str,
    element: ElementKind,
    block: tuple[int, int, int, int],
    first: tuple[int, int] = (0, 0),
    step: tuple[int, int] = (1, 1),
    stop: int | None = None,
    axis: int = 1,
    group: tuple[int, int, int] | None = None,
    lies: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
) -> TensorMap:
    """The map of (image or filter, row, column, channel): of pixels, every ``step``-th from ``first`` on.

    ``stop``: of columns, only those before. ``axis``: that of the channels; 0 if filters change places with them.
    ``group``: (axis, begin, end) of what one group has; None: all. ``lies``: as of ``TensorMap``.

    The first channel of a box must be at a multiple of 16 bytes, whatever the map (Triton's Gluon tutorial 04-tma).
    """
    layout = gl.NVMMASharedLayout.get_default_for(list(block), _GLUON_ELEMENT[element])
    own: dict[int, tuple[int, int]] = {} if group is None else {group[0]: group[1:]}
    outer, inner = ((a, *own.get(a, (0, None)), 1) for a in (1 - axis, axis))
    view = (outer, (2, first[0], None, step[0]), (3, first[1], stop, step[1]), inner)
    return TensorMap(name, element, block, shared=layout, view=view, lies=lies)


def _lies(desc: Conv2dProblem, name: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shape and strides of an operand whose pixels are one row, if they are rows of a matrix."""
    if name == "weight" or not shared.is_matrix(desc):
        return None
    pixels, channels = shared.pixels(desc), desc.operand(name).shape[1]
    return (1, channels, 1, pixels), (pixels * channels, 1, pixels * channels, channels)


def _remainders(desc: Conv2dProblem) -> list[tuple[int, int]]:
    return list(itertools.product(range(desc.stride[0]), range(desc.stride[1])))


def _sources(maps: list[TensorMap], most: int) -> dict[str, Arg]:
    return {f"x{i}": maps[i] if i < len(maps) else None for i in range(most)}


def _by_remainder(desc: Conv2dProblem, block: tuple[int, int, int, int]) -> list[TensorMap]:
    lies = _lies(desc, "x")
    return [_map("x", desc.element, block, first, desc.stride, lies=lies) for first in _remainders(desc)]


def _by_tap(desc: Conv2dProblem, block: tuple[int, int, int, int]) -> list[TensorMap]:
    """For each remainder of the rows that taps read and each tap of a row."""
    found = []
    for row, tap in itertools.product(row_remainders(desc), range(desc.kernel[1])):
        column = (tap * desc.dilation[1] - desc.padding[2]) % desc.stride[1]
        found.append(_map("x", desc.element, block, (row, column), desc.stride, end_under(desc, tap)))
    return found


def _taps(desc: Conv2dProblem, axis: int, remainder: int) -> tuple[int, int, int, int, int]:
    """(first tap, step, number, offset of the first, step of the offset) of those that rows or columns meet.

    The result meets all, at ``stride * p - padding + tap * dilation`` of x. A row ``stride * p + remainder`` of the
    gradient of x meets the taps with which ``remainder + padding - tap * dilation`` is a multiple of the stride.
    """
    stride, dilation, before = desc.stride[axis], desc.dilation[axis], desc.padding[2 * axis]
    if not shared.of_input(desc):
        return 0, 1, desc.kernel[axis], -before, dilation
    met = [t for t in range(desc.kernel[axis]) if (remainder + before - t * dilation) % stride == 0]
    step = stride // math.gcd(stride, dilation)
    first = met[0] if met else 0
    return first, step, len(met), (remainder + before - first * dilation) // stride, -step * dilation // stride


def _ints(*numbers: int) -> tuple[Arg, ...]:
    return tuple(map(Int, numbers))


def _holds(desc: Conv2dProblem, tile: Tile) -> bool:
    """Whether tiles are stored during the products of the next: those that take all accumulators, of enough steps."""
    axes = [{_taps(desc, axis, n)[2] for n in range(desc.stride[axis])} for axis in (0, 1)]
    steps = -(-reduced(desc) // CHANNELS) * min(axes[0]) * min(axes[1])
    largest = tile.width == CHANNELS and tile.pixels * tile.features == 4 * CHANNELS**2
    return desc.element.itemsize == 2 and largest and steps >= (4 if tile.pixels == CHANNELS else HELD_STEPS)


def build(desc: Conv2dProblem, target: Target) -> list[Launch]:
    """The result, or the gradient of x, of each group: with strides launches for each remainder, which has taps of its
    own."""
    _, parts = parts_of(desc, tile_of(desc), target.sm_count)
    remainders = _remainders(desc) if shared.of_input(desc) else [(0, 0)]
    of_groups = itertools.product(range(desc.groups), remainders, parts)
    return [_part(desc, target, part, first, group) for group, first, part in of_groups]


def _part(desc: Conv2dProblem, target: Target, part: Part, first: tuple[int, int], group: int) -> Launch:
    tile, back = part.tile, shared.of_input(desc)
    depth, n = depth_of(desc), tile.features
    pixels, axis = (*tile.box, depth), channel_axis(desc, desc.operand("weight"))
    across = back and axis == 1
    holds = tile.taps == 1 and _holds(desc, tile)
    # Of 64 by 256 results wgmma reads less of shared memory than of 128 by 128, and that bounds these tiles.
    swapped = holds and tile.pixels > CHANNELS
    own = n // 2 if swapped else n

    def mapped(name: str, block: tuple[int, int, int, int], **how: Any) -> TensorMap:
        if desc.groups > 1:
            o = desc.operand(name)
            sliced = 0 if name == "weight" else 1
            each = o.shape[sliced] // desc.groups
            how["group"] = (sliced, group * each, (group + 1) * each)
        return _map(name, desc.element, block, lies=_lies(desc, name), **how)

    weight = mapped("weight", (depth, 1, 1, own) if across else (own, 1, 1, depth), axis=axis)
    bias = next((o for o in desc.operands() if o.name == "bias"), None)
    high, wide = tile.boxes(lattice_of(desc))[1:]
    tiles_n, chunks = -(-features_of(desc) // n), -(-reduced(desc) // depth)
    extent = _ints(part.boxes, high, wide, tiles_n, GROUP, chunks)
    written = (*(_half(tile.box) if swapped else tile.box), min(depth, n))
    source, result = ("dout", "dx") if back else ("x", "out")
    args: dict[str, Arg] = {
        "weight": weight,
        "out": mapped(result, written, first=first, step=desc.stride if back else (1, 1)),
        "bias": None if bias is None else values(bias),
        "bias_first": None if bias is None or desc.groups == 1 else Int(group * desc.filters),
        "features": Int(features_of(desc)),
        "taps": _ints(*(n for axis in (0, 1) for n in _taps(desc, axis, first[axis]))),
    }
    constants: dict[str, object] = {"BACK": across, "CHANNELS": depth, "BLOCK_N": n, "STAGES": tile.stages}
    kernel: Any = conv2d_wgmma_kernel
    if tile.taps > 1:
        kernel = conv2d_rows_wgmma_kernel
        rest = (1, tile.reach, tile.box[2], depth)
        args |= {"x": mapped(source, pixels), "rest": mapped(source, rest)}
        args["extent"] = extent
        constants |= {"HIGH": tile.box[1], "WIDE": tile.box[2], "REACH": tile.reach, "TAPS": tile.taps}
        constants |= {"FLIPPED": back, "BOXES": tile.rows // 2, "HOLDS": desc.element.itemsize == 2}
        constants["BUFFERS"] = min(tile.rows // 2 * n // written[3], 2)  # those of a tile are used in turns
    else:
        starts = [{}] if back else [{"first": f, "step": desc.stride} for f in _remainders(desc)]
        args |= _sources([mapped(source, pixels, **start) for start in starts], 4)
        args["extent"] = (Int(part.first), *extent)
        constants |= {**_box(tile), **_strides(desc, dense=back), "HOLDS": holds, "SWAPPED": swapped}
        constants["BUFFERS"] = min(tile.columns, 2) if tile.pixels == CHANNELS or swapped else 1
    return Launch(kernel, min(tiles_in(desc, part), target.sm_count), args, constants, overlaps=True)


def _half(box: tuple[int, int, int]) -> tuple[int, int, int]:
    """The first half of its pixels."""
    images, high, wide = box
    if images > 1:
        return images // 2, high, wide
    return (1, high // 2, wide) if high > 1 else (1, 1, wide // 2)


def _box(tile: Tile) -> dict[str, Any]:
    return dict(zip(("IMAGES", "HIGH", "WIDE"), tile.box, strict=True))


def _strides(desc: Conv2dProblem, dense: bool) -> dict[str, Any]:
    return dict(zip(("STRIDE_ROWS", "STRIDE_COLUMNS"), (1, 1) if dense else desc.stride, strict=True))


def build_weight(desc: Conv2dProblem, target: Target) -> list[Launch]:
    """The gradient of weight, or its pieces and their sum."""
    if desc.operand("dweight").numel == 0:
        return []
    division = division_of(desc)[1]
    if division.whole:
        out = desc.operand("dweight")
        return [weight_sums(desc, target, values(out), axis_strides(out), True)]
    pieces = Scratch(0, ElementKind.F32)
    main = weight_sums(desc, target, pieces, (None,) * 4, False)
    return [main, wgmma_division.fold(desc, desc, division, pieces)]


def weight_sums(desc: Conv2dProblem, target: Target, out: Arg, out_strides: tuple[Arg, ...], whole: bool) -> Launch:
    """Sums pixels: the gradient of weight if ``whole``, or its pieces.

    It does not overlap with the sum of the pieces: it took longer with those programs waiting beside it (H200).
    """
    tile, division = division_of(desc)
    block, matrix = (*tile.box, 128 // desc.element.itemsize), shared.is_matrix(desc)
    clipped = not matrix and desc.out_extents[1] % tile.box[2] > 0
    maps = (_by_tap if clipped else _by_remainder)(desc, block)
    high, wide = tile.boxes(lattice_of(desc))[1:]
    lanes = division.lanes
    args: dict[str, Arg] = {
        "dout": _map("dout", desc.element, block, lies=_lies(desc, "dout")),
        **_sources(maps, MOST_MAPS),
        "out": out,
        "out_strides": out_strides,
        "sizes": _ints(desc.filters, desc.channels, desc.taps, desc.kernel[1]),
        "extent": (
            _ints(division.tiles, division.shares, lanes, division.boxes),
            *_ints(division.tiles_filters, _blocks(desc), high, wide),
        ),
        "taps": _ints(desc.kernel[1], desc.padding[0], desc.padding[2], *desc.dilation),
    }
    constants = {
        **_box(tile),
        **_strides(desc, dense=False),
        "CLIPPED": len(row_remainders(desc)) if clipped else 0,
        "MAPS": len(maps),
        "FILTERS": tile.rows,
        "COLUMNS": tile.columns,
        "STAGES": tile.stages * 2 // desc.element.itemsize,  # a block of f32 has twice the bytes
        "WHOLE": whole,
        "ONE_TAP": len(maps) > 1 and _blocks(desc) % tile.columns == 0,
    }
    return Launch(conv2d_weight_wgmma_kernel, min(division.shares, target.sm_count), args, constants)


shared.register(
    build,
    build_weight,
    name="wgmma",
    supports=supports,
    rank=rank,
    workspace=workspace,
    guarantee=guarantee,
    numerics=numerics,
    elements=(*HALF, "f32"),
    version=3,
    weight={"version": 4},
    **HOPPER,
)
