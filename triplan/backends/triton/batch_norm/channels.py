"""Kernel ``channels``: sums over parts of each channel, merged in a fixed order, and a pass that writes the result.

Forward in training x is read twice, backward x and dout are; with running statistics x is read once. Of relu's result
the backward reads where it is 0, twice too; with a residual once, whose gradient is then what is read again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from triplan.backends.runtime.launch import Arg, Float, Int, Launch, Scalar, Scratch, power_of_two_in
from triplan.backends.table import kernel
from triplan.backends.triton.batch_norm import channels_kernels as kernels, merge_kernels
from triplan.backends.triton.common import bounds, card
from triplan.backends.triton.common.offsets import TL, ceil_power, layout, padded_bytes, values
from triplan.backends.triton.common.strides import count, moving_strides, row_tile
from triplan.backends.triton.common.tiles import again_us, fits_grid
from triplan.descriptors import BatchNormBackwardDescriptor, BatchNormDescriptor, Operand
from triplan.descriptors.batch_norm import BatchNormProblem, ImagesProblem
from triplan.sku import PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact

ELEMENTS = ("f16", "bf16", "f32", "f64")
#: Extents are counted in 32 bits.
MOST = 2**30
#: Bytes of an operand that a program holds at a time: 32 for each of its threads. Untuned.
TILE_BYTES, WARPS = 8192, 8
#: Bytes of neighbouring channels of a tile, where they are adjacent: chosen on an H200, by runs that are not published.
#: And where all elements of several pixels are (see ``joined``): untuned.
CHANNEL_BYTES, JOINED_BYTES = 128, 256
#: Programs that sum: for each multiprocessor of an H200 as many as its registers hold, four forward and three backward,
#: where a program has numbers of many channels, so that all run at once. One number for all targets: tolerances depend
#: on it.
PROGRAMS_FORWARD, PROGRAMS_BACKWARD = 528, 396
#: Whole tiles hold at most 1/HELD more rows, those behind the last image included, than tiles of the best height do. Of
#: such heights the largest is taken. Chosen on an H200, by runs that are not published.
HELD = 8
#: Programs at most that share one block of columns. Untuned.
MOST_PARTS = 512
#: Warps of a program that writes results of many channels: a thread reads their numbers for 64 bytes of an operand.
#: Chosen in the same runs as CHANNEL_BYTES.
APPLY_WARPS = 4
#: Bytes of a row of ``in_vectors`` at least. Untuned.
VECTOR_BYTES = 8
#: Idle lanes at most, as a part of all, where several pixels of all channels are one row (see ``joined``); and the
#: smallest part of a block that channels must fill for it: of fewer, partial sums are many. Untuned.
JOINED_IDLE, JOINED_LEAST = 0.1, 1 / 3
#: Partial sums and channels that a program merges at a time, and warps. Of more partial sums as many as MOST_MERGED, of
#: fewer channels: each time, a program waits for the L2 cache. Untuned.
MERGE_PARTS, MERGE_CHANNELS, MERGE_WARPS = 256, 16, 8
MOST_MERGED = 1024
#: torch's default.
MOMENTUM = 0.1


class Geometry(NamedTuple):
    """How images are divided among programs.

    Attributes:
        last: whether columns are channels, which are adjacent then, and rows the pixels of all images; otherwise
            columns are pixels of a channel, and rows images.
        rows, height, block, warps: rows in all, rows and columns of a tile, and warps of its program.
        blocks, across: blocks of columns in all, and of one channel (1 with ``last``).
        groups: tiles along the rows.
        each, parts: tiles that a summing program walks, and how many such share a block of columns.
        pixels: how many pixels are one row, whose columns are the elements of all their channels; else 1. ``across`` is
            that number, too: each of these pixels has partial sums of its own.
        vector: how many neighbouring pixels of a channel are one row, which are those of all images then; else 1.
    """

    last: bool
    rows: int
    height: int
    block: int
    warps: int
    blocks: int
    across: int
    groups: int
    each: int
    parts: int
    pixels: int = 1
    vector: int = 1

    @property
    def partials(self) -> int:
        """Partial sums of a channel."""
        return self.parts * self.across

    @property
    def merging(self) -> tuple[int, int, int]:
        """Partial sums and channels that a merging program holds at a time, and its warps."""
        parts, size = min(ceil_power(self.partials), MOST_MERGED), MERGE_PARTS * MERGE_CHANNELS
        channels = min(size // parts, MERGE_CHANNELS)
        return parts, channels, max(parts * channels * MERGE_WARPS // size, 1)

    @property
    def depth(self) -> int:
        """Additions on the path of a term of a sum: of a place, within a thread and between threads, of a merge."""
        parts, channels, warps = self.merging
        tile = self.height * self.block // (32 * self.warps) + 12
        each = self.each + (self.pixels > 1)
        return each + tile + -(-self.partials // parts) + parts * channels // (32 * warps) + 12


@fact
def geometry(desc: ImagesProblem) -> Geometry:
    size = TILE_BYTES // desc.element.itemsize
    # Of images that lie differently a tile has both axes: in every one neighbours are moved by the same program.
    adjacent = [not o.layout.packed and o.layout.unit_axis == 1 for o in desc.operands() if len(o.shape) == 3]
    last = desc.pixels == 1 or any(adjacent)
    rows = desc.batch * desc.pixels if last else desc.batch
    if last:
        block = min(ceil_power(desc.channels), CHANNEL_BYTES // desc.element.itemsize)
        height = size // block
    else:
        height, block = row_tile(size, rows, desc.pixels)
    height = min(height, ceil_power(rows))
    warps = max(height * block * WARPS // size, 1)
    across = 1 if last else -(-desc.pixels // block)
    blocks = -(-desc.channels // block) if last else desc.channels * across
    groups = -(-rows // height)
    each, parts = divided(desc, groups, blocks)
    return Geometry(last, rows, height, block, warps, blocks, across, groups, each, parts)


def in_full_tiles(desc: ImagesProblem, found: Geometry) -> Geometry:
    """``found``, but tiles of pixels have fewer rows, down to a quarter of TILE_BYTES, if images leave many empty."""
    size = TILE_BYTES // desc.element.itemsize

    def held(height: int) -> int:
        return -(-found.rows // height) * height

    heights = [n for n in (found.height // 2, found.height // 4) if 4 * n * found.block >= size]
    heights = [found.height, *heights]
    height = max(n for n in heights if HELD * held(n) <= (HELD + 1) * min(map(held, heights)))
    if found.last or height == found.height:
        return found
    groups = -(-found.rows // height)
    each, parts = divided(desc, groups, found.blocks)
    warps = max(height * found.block * WARPS // size, 1)
    return found._replace(height=height, warps=warps, groups=groups, each=each, parts=parts)


def divided(desc: ImagesProblem, groups: int, blocks: int, few: bool = False) -> tuple[int, int]:
    """(tiles that a summing program walks, programs that share a block of columns); ``few``: of its registers."""
    programs = PROGRAMS_FORWARD if few or isinstance(desc, BatchNormDescriptor) else PROGRAMS_BACKWARD
    each = -(-groups // min(max(programs // max(blocks, 1), 1), MOST_PARTS))
    return each, -(-groups // each)


def in_vectors(desc: ImagesProblem, found: Geometry) -> Geometry:
    """``found``, of packed images whose pixels are adjacent; but rows are vectors of a channel's pixels, if they fill
    such. Then few lanes are idle, whatever the number of pixels."""
    most = min(16, *(o.alignment for o in desc.operands() if len(o.shape) == 3)) // desc.element.itemsize
    vector = min(max(most, 1), power_of_two_in(desc.pixels))
    rows = desc.batch * desc.pixels // vector
    if vector == 1 or vector * desc.element.itemsize < VECTOR_BYTES or rows >= MOST:
        return found
    size = TILE_BYTES // desc.element.itemsize
    height = min(size // vector, ceil_power(rows))
    groups = -(-rows // height)
    each, parts = divided(desc, groups, desc.channels, few=True)
    warps = max(height * vector * WARPS // size, 1)
    return Geometry(False, rows, height, vector, warps, desc.channels, 1, groups, each, parts, vector=vector)


def joined(desc: BatchNormProblem, found: Geometry) -> Geometry:
    """``found``, of packed images whose channels are adjacent; but several pixels are one row where channels do not
    fill whole vectors.

    A row of images [rows, channels] may then begin between two vectors; those of [rows / pixels, pixels * channels]
    begin at one.
    """
    aligned = min(16, *(o.alignment for o in desc.operands() if len(o.shape) == 3)) // desc.element.itemsize
    vector = max(aligned // power_of_two_in(max(desc.channels, 1)), 1)
    width = JOINED_BYTES // desc.element.itemsize
    few = desc.channels < max(JOINED_LEAST * width, 2)
    if vector == 1 or few:
        return found

    def blocks(pixels: int) -> int:
        return -(-pixels * desc.channels // width)

    pixels = vector
    while pixels * desc.channels < (1 - JOINED_IDLE) * blocks(pixels) * width:
        pixels += vector
    rows, height = found.rows // pixels, TILE_BYTES // desc.element.itemsize // width
    groups = -(-rows // height)
    if groups < 2 or pixels * desc.channels >= MOST:
        return found
    each, parts = divided(desc, groups, blocks(pixels))
    if each < 2:  # few rows are already many programs'
        return found
    return Geometry(True, rows, height, width, WARPS, blocks(pixels), pixels, groups, each, parts, pixels)


@fact
def divided_images(desc: BatchNormProblem) -> Geometry:
    """How ``channels`` divides images: rows of packed ones are whole vectors, where that is possible."""
    found = in_full_tiles(desc, geometry(desc))
    if not all(o.layout.packed for o in desc.operands() if len(o.shape) == 3):
        return found
    return in_vectors(desc, found) if desc.pixels > 1 else joined(desc, found)


def supports(desc: BatchNormProblem, target: Target) -> Support:
    for o in desc.operands():
        if len(o.shape) == 1 and not o.layout.packed:
            return Support.no(f"{o.name} is strided: one number a channel must be packed")
    largest = max(geometry(desc).rows, desc.channels, desc.pixels)
    if largest >= MOST:
        return Support.no(f"an extent of {largest}; it counts fewer than {MOST}")
    return fits_grid(geometry(desc).blocks * geometry(desc).groups)


def sector_bytes(o: Operand, found: Geometry) -> float:
    """Bytes of the sectors that one pass over the images ``o`` accesses: those of each run of adjacent elements, of
    which a tile has a part where channels are adjacent. It begins anywhere between two sectors, as far as strides tell.
    (More than 16 bytes are never promised: these count as a sector.)
    """
    size, (_, channels, pixels), layout = o.element.itemsize, o.shape, o.layout
    row, run = pixels, pixels if layout.packed or layout.unit_axis == 2 else 1
    if found.last and (pixels == 1 if layout.packed else layout.unit_axis == 1):
        row = found.pixels * channels
        run = min(found.block, row)
    begins = min(o.alignment, (power_of_two_in(row) if layout.packed else layout.stride_multiple) * size)
    between = card.SECTOR - begins if begins < 16 else 0
    nbytes = max(run * size, 1)
    return o.nbytes * max(nbytes + between, card.SECTOR) / nbytes


def rank(desc: BatchNormProblem, target: Target) -> float:
    """Estimated microseconds."""
    found = divided_images(desc)
    moved = {o.name: sector_bytes(o, found) for o in desc.operands() if len(o.shape) == 3}
    us = card.LAUNCH_US * (3 if desc.sums else 1) + sum(moved.values()) / card.BYTES_PER_US
    read = [moved[o.name] for o in desc.operands() if o.name in moved and not o.is_written]
    return us + (again_us(sum(read)) if desc.sums else 0.0)


def array(desc: ImagesProblem, found: Geometry) -> int:
    """Bytes of the partial sums of one kind."""
    return padded_bytes(found.partials * desc.channels * desc.element.compute.itemsize)


def workspace(desc: BatchNormProblem, target: Target) -> int:
    if not desc.sums or not desc.channels:
        return 0
    means = isinstance(desc, BatchNormBackwardDescriptor) and desc.training
    width = padded_bytes(desc.channels * desc.element.compute.itemsize)
    return 2 * (array(desc, divided_images(desc)) + (width if means else 0))


def guarantee(desc: BatchNormProblem) -> Mapping[str, PrecisionGuarantee]:
    """*Statistics* (Chan, Golub and LeVeque, 1983): the mean of each place is rounded four times an element, squares
    are of deviations from those; both are merged by their depth. *Sums*: one rounding an addition. Products, quotients
    and the root come once. Without sums an element depends on its channel's numbers alone.
    """
    return channels_guarantee(desc, divided_images(desc).depth)


def channels_guarantee(desc: BatchNormProblem, depth: int) -> Mapping[str, PrecisionGuarantee]:
    """The guarantee of sums that are ``depth`` deep."""
    compute, alone = desc.element.compute, not desc.sums
    each = 16 if alone else 8 * depth + 48 if isinstance(desc, BatchNormDescriptor) else depth + 32
    each += desc.residual
    return {
        o.name: PrecisionGuarantee.exact(o.element)
        if o.name == "dresidual"
        else bounds.rounded(o.element, compute, 8, each, batch=alone, order=alone)
        for o in desc.operands()
        if o.is_written
    }


def numerics(desc: BatchNormProblem) -> str | None:
    """Of elements that depend on their channel's numbers alone; no tile changes them."""
    if desc.sums:
        return None
    found = f"{desc.op}.channels.v1.{desc.element}.{desc.parameter_element or desc.element}.{desc.weight}.{desc.bias}"
    found += ".relu" * desc.relu + ".residual" * desc.residual
    return f"{found}.{desc.eps!r}" if isinstance(desc, BatchNormDescriptor) else found


def arguments(desc: ImagesProblem, found: Geometry) -> dict[str, Arg]:
    """What the kernels take of operands and geometry."""
    compute, own = desc.element.compute, {o.name: o for o in desc.operands()}
    columns = found.pixels * desc.channels
    rest = desc.batch % found.pixels
    given: dict[str, Arg] = {
        "rows": Int(found.rows),
        "channels": count(columns),
        "own": Int(desc.channels) if found.pixels > 1 else None,
        "rest": Int(rest * desc.channels) if rest else None,
        "full": Int(found.rows),
        "more": Int(rest) if found.pixels > 1 else None,
        "pixels": count(1 if found.last else found.vector if found.vector > 1 else desc.pixels),
        "inner": Int(desc.pixels // found.vector) if desc.pixels > 1 and (found.last or found.vector > 1) else None,
        "blocks": Int(found.blocks),
        "held": Int(found.each * found.height),
        "width": Int(1 if found.last else found.block),
        "across": Int(found.across) if found.across > 1 else None,
        "parts": Int(found.partials),
        "eps": Float(getattr(desc, "eps", 0.0), compute),
        "momentum": Scalar("momentum", compute, MOMENTUM) if "momentum" in own else None,
    }
    for o in desc.operands():
        if o.is_tensor:
            given[o.name] = values(o)
            strides = moving_strides(o)
            if found.pixels > 1 and len(o.shape) == 3:
                strides = (Int(columns, True, power_of_two_in(columns)), *strides[1:])
            elif found.vector > 1 and len(o.shape) == 3:
                strides = (*strides[:2], count(found.vector))
            given[f"{o.name}_strides"] = strides
    return given


def launch(which: Any, programs: int, given: Mapping[str, Arg], warps: int, **constants: Any) -> Launch:
    """A launch of a kernel that takes some of ``given`` and of ``constants``."""
    args = {name: given.get(name) for name in which.arg_names if not name.isupper()}
    taken = {name: constants[name] for name in which.arg_names if name in constants}
    # fuses=False: lanes that hold one sum must round it alike, and so must tiles that a mask cuts.
    return replace(Launch(which, programs, args, taken, warps, fuses=False), overlaps=True)


def summing(desc: ImagesProblem, found: Geometry, which: Any, merge: Any, given: Mapping[str, Arg]) -> list[Launch]:
    """The launches that sum parts of each channel and merge them."""
    acc = TL[desc.element.compute]
    parts, channels, warps = found.merging
    alone = {"rows": Int(desc.batch), "channels": count(desc.channels)} if found.pixels > 1 else {}
    own = {**given, "each": Int(found.each)}
    tile = {"LAST": found.last, "COMPUTE": acc, "ROWS": found.height, "BLOCK": found.block}
    # A second tile fits the registers where its elements are not widened and no residual is read beside it.
    several = found.each > 1 and isinstance(desc, BatchNormBackwardDescriptor) and not desc.residual
    tile["AHEAD"] = several and desc.element is desc.element.compute
    merging = {"COMPUTE": acc, "PARTS": parts, "BLOCK": channels}
    return [
        launch(which, found.blocks * found.parts, own, found.warps, **tile),
        launch(merge, -(-desc.channels // channels), {**given, **alone}, warps, **merging),
    ]


def build(desc: BatchNormProblem, target: Target) -> list[Launch]:
    if desc.channels == 0:
        return []
    found, compute = divided_images(desc), desc.element.compute
    given = arguments(desc, found)
    back = isinstance(desc, BatchNormBackwardDescriptor)
    launches = []
    if desc.sums:
        stored = ("totals", "projections") if back else ("means", "squares")
        given |= {name: Scratch(i * array(desc, found), compute) for i, name in enumerate(stored)}
        if back and desc.training:
            width = padded_bytes(desc.channels * compute.itemsize)
            means = ("total", "projection")
            given |= {name: Scratch(2 * array(desc, found) + i * width, compute) for i, name in enumerate(means)}
        which = kernels.batch_norm_sums_kernel if back else kernels.batch_norm_statistics_kernel
        merge = merge_kernels.batch_norm_fold_kernel if back else merge_kernels.batch_norm_merge_kernel
        launches = summing(desc, found, which, merge, given)
        # The merge has written what running statistics would give.
        given |= {"running_mean": None, "running_var": None}
        if desc.residual and back:  # dout, as it is passed on, lies there
            given |= {"dout": given["dresidual"], "dout_strides": given["dresidual_strides"], "out": None}
    last = kernels.batch_norm_gradient_kernel if back else kernels.batch_norm_apply_kernel
    tile = {"LAST": found.last, "COMPUTE": TL[compute], "ROWS": found.height, "BLOCK": found.block, "RELU": desc.relu}
    tile["EARLY"] = desc.sums and not (desc.residual and back)
    warps = min(found.warps, APPLY_WARPS) if found.last else found.warps
    return [*launches, launch(last, found.blocks * found.groups, given, warps, **tile)]


for _cls in (BatchNormDescriptor, BatchNormBackwardDescriptor):
    for _op in _cls.ops():
        kernel(
            op=_op,
            name="channels",
            elements=ELEMENTS,
            supports=supports,
            rank=rank,
            guarantee=guarantee,
            numerics=numerics,
            workspace=workspace,
            version=5,  # merges of more parts at a time
            layout=layout,
        )(build)
