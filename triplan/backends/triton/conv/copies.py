"""Copies of operands in the workspace, channels last, which kernels read and write in place of the operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from triplan.backends.runtime.launch import Arg, Copy, Int, Launch, Scratch, power_of_two_in
from triplan.backends.triton.common import card
from triplan.backends.triton.common.copied import on_copies
from triplan.backends.triton.common.offsets import bits, ceil_power, padded_bytes
from triplan.backends.triton.common.strides import axis_strides, count
from triplan.backends.triton.conv.copies_kernels import conv2d_copy_kernel
from triplan.descriptors import Layout, Operand
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku import SUPPORTED, Support

#: Elements of 16 bytes, the widest vectors and the smallest unit that TMA moves, if an element has two bytes.
VECTOR = 8
#: Elements of a tile if there are so many: on an H200 smaller tiles took longer, even if fewer of their elements were
#: outside.
AREA = 4096
#: Channels of a tile if there are more columns. Where channels are adjacent in the operand too, a tile has all of them
#: if possible: most rows begin within a sector; two tiles of a row would both read or write that in which they meet.
SIDE, WHOLE_SIDE = 64, 128
#: Channels of a tile at most, and how many columns more than there are tiles may have before narrower ones are
#: considered. Untuned.
MOST_CHANNELS, IDLE = 256, 1.2
#: Elements of a copy from which on it has more large tiles than multiprocessors; of fewer, each image has small tiles
#: of its own. Untuned. Columns of a row at most: they are counted in 32 bits.
JOINED, MOST_COLUMNS = 2**20, 2**30
#: Microseconds of the launch of a copy, which reads, and then writes: if launches begin while the ones ahead of them
#: end, and if not. From drawn problems on an H200.
COPY_US = {True: 0.7, False: 1.1}
#: Microseconds of a copy's program, however little it moves, and programs that a multiprocessor runs at a time. From a
#: drawn problem on an H200 of which each row of 8 columns has a program.
PROGRAM_US, RESIDENT = 3.0, 16


class Padded(NamedTuple):
    """A copy (image or filter, row, column, channel) of an operand: from which byte on, and its extents.

    ``left``: columns of zeros before those of the operand. ``axis``: that of the operand's channels; 0 if filters and
    channels change places. ``taps``: what each tap of a row reads, side by side, (image, row, tap, channel, column),
    with ``step`` columns from one to the next and ``dilation`` from tap to tap, in the first ``filled`` columns, and 0
    in the others; ``taps`` of 0: there are none.
    """

    operand: Operand
    offset: int
    channels: int
    columns: int
    left: int = 0
    axis: int = 1
    taps: int = 0
    step: int = 1
    dilation: int = 1
    filled: int = 0

    @property
    def images(self) -> int:
        return self.operand.shape[1 - self.axis]

    @property
    def layout(self) -> Layout:
        """What is promised of the copy."""
        return Layout.strided(unit_axis=self.axis, alignment=16, stride_multiple=VECTOR)

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.columns * self.channels * max(self.taps, 1)

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """By the axes of the operand."""
        if self.taps:
            return self.operand.shape[2] * self.width, self.columns, self.width, 1
        first, second = (self.operand.shape[2] * self.width, 1)[:: 1 if self.axis else -1]
        return first, second, self.width, self.channels

    @property
    def nbytes(self) -> int:
        o = self.operand
        return padded_bytes(self.images * o.shape[2] * self.width * o.element.itemsize)

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def tensor(self) -> Copy:
        """Without the columns that were added; of an output, without the channels."""
        shape = list(self.operand.shape)
        if not self.operand.is_written:
            shape[self.axis] = self.channels
        return Copy(self.offset, tuple(shape), self.strides)


def padded_channels(n: int) -> int:
    return -(-n // VECTOR) * VECTOR


def plain(
    operands: Mapping[Operand, int], start: int = 0, channels: Mapping[str, int] = MappingProxyType({})
) -> tuple[Padded, ...]:
    """Copies of operands, by the axes of their channels, with as many columns and channels, or a few more channels.

    ``channels``: those of copies, by operands, that have more.
    """
    found: list[Padded] = []
    for o, axis in operands.items():
        wide = channels.get(o.name, padded_channels(o.shape[axis]))
        found.append(Padded(o, start, wide, o.shape[3], axis=axis))
        start = found[-1].end
    return tuple(found)


def whole(desc: Conv2dProblem, copies: Sequence[Padded]) -> dict[str, int]:
    """Fields of ``desc`` with which kernels that write whole vectors of channels fill the copies."""
    fields = {"out": "out_channels", "dx": "in_channels"}
    return {fields[c.operand.name]: c.channels for c in copies if c.operand.is_written}


def with_features(launches: list[Launch], features: int) -> list[Launch]:
    """``launches`` that read a bias of so many features."""
    return [
        replace(x, args={**x.args, **({"features": Int(features)} if "features" in x.args else {})}) for x in launches
    ]


def rank(copies: Sequence[Padded], early: bool) -> float:
    """Estimated microseconds; ``early``: the launches between them begin while the ones ahead of them end."""
    return sum(COPY_US[early] + _busy_us(c) for c in copies)


def _busy_us(c: Padded) -> float:
    moved = (c.operand.nbytes + c.nbytes) / card.BYTES_PER_US
    return max(moved, _programs(c) / (RESIDENT * card.SMS) * PROGRAM_US)


def counted(copies: Sequence[Padded]) -> Support:
    if any(_programs(c) >= 2**31 or max(c.operand.shape) * c.columns >= 2**31 for c in copies):
        return Support.no("2**31 programs or columns of a copy; a grid holds fewer")
    return SUPPORTED


class Lines(NamedTuple):
    """How a copy is divided: images, their rows, and columns of these, of the copy and of the operand."""

    images: int
    rows: int
    columns: int
    source: int


def _lines(c: Padded) -> Lines:
    """What follows each other with one stride, on both sides, is one row: images of one pixel, packed images, and many
    images whose channels are last without gaps."""
    (height, width), same = c.operand.shape[2:], c.columns == c.operand.shape[3] and c.left == c.taps == 0
    if same and height * width == 1:
        return Lines(1, 1, c.images, c.images)
    if _joined(c):
        return Lines(1, 1, c.images * height * width, c.images * height * width)
    if same and c.operand.layout.packed:
        return Lines(c.images, 1, height * width, height * width)
    return Lines(c.images, height, c.columns, width)


def _joined(c: Padded) -> bool:
    """Whether the columns of all images have one stride in the operand, as they have in the copy."""
    shape, same = c.operand.shape, c.columns == c.operand.shape[3] and c.left == c.taps == 0
    pixels = c.images * shape[2] * shape[3]
    large = pixels * c.channels >= JOINED and pixels < MOST_COLUMNS
    return large and same and shape[3] > 1 and c.operand.layout.order == (1 - c.axis, 2, 3, c.axis)


def _adjacent(c: Padded) -> bool:
    """Whether the channels of the copy are adjacent in the operand too."""
    o = c.operand
    if o.layout.packed:
        return c.axis == 1 and o.shape[2] == o.shape[3] == 1
    return o.layout.unit_axis == c.axis


def _tile(c: Padded) -> tuple[int, int]:
    """Channels and columns of a tile: the most columns, or half of them if many would be outside."""
    columns, channels = _lines(c).columns, ceil_power(c.channels)
    wide = min(AREA // min(WHOLE_SIDE if _adjacent(c) else SIDE, channels), ceil_power(columns))

    def covered(width: int) -> int:
        return -(-columns // width) * width

    if covered(wide) > IDLE * columns and covered(wide // 2) < covered(wide):
        wide //= 2
    return min(AREA // wide, channels, MOST_CHANNELS), wide


def _tiles(c: Padded) -> tuple[int, int]:
    """Tiles of the channels and columns of a row."""
    channels, wide = _tile(c)
    return -(-c.channels // channels), -(-_lines(c).columns // wide)


def _programs(c: Padded) -> int:
    lines, tiles = _lines(c), _tiles(c)
    return lines.images * lines.rows * tiles[0] * tiles[1] * max(c.taps, 1)


def launch(c: Padded) -> Launch:
    """Copies an input into the workspace, or an output out of it."""
    o, lines = c.operand, _lines(c)

    def known(stride: int) -> Arg:
        return None if stride == 1 else Int(stride, True, power_of_two_in(stride))

    own, copy = axis_strides(o), tuple(known(stride) for stride in c.strides)
    if c.axis == 0:
        own, copy = (own[1], own[0], *own[2:]), (copy[1], copy[0], *copy[2:])
    if lines.images != c.images and not _joined(c):
        own, copy = (Int(0), own[1], Int(0), own[0]), (Int(0), copy[1], Int(0), copy[0])
    lies, copied = (bits(o), own, count(o.shape[c.axis])), (Scratch(c.offset, o.element.bits), copy, count(c.channels))
    (source, source_strides, read), (out, out_strides, written) = (copied, lies) if o.is_written else (lies, copied)
    (tiles_channels, tiles_columns), (channels, wide) = _tiles(c), _tile(c)
    args: dict[str, Arg] = {
        "source": source,
        "out": out,
        "source_strides": source_strides,
        "out_strides": out_strides,
        "source_channels": read,
        "channels": written,
        "rows": Int(lines.rows),
        "source_columns": count(lines.source),
        "columns": count(lines.columns),
        "left": Int(c.left) if c.left or c.taps else None,
        "step": Int(c.step) if c.taps else None,
        "dilation": Int(c.dilation) if c.taps else None,
        "taps": Int(c.taps) if c.taps else None,
        "tap_stride": known(c.columns * c.channels) if c.taps else None,
        "filled": count(c.filled) if c.taps else None,
        "tiles_channels": Int(tiles_channels),
        "tiles_columns": Int(tiles_columns),
    }
    return Launch(conv2d_copy_kernel, _programs(c), args, {"BLOCK_C": channels, "BLOCK_P": wide}, num_warps=4)


def around(copies: Sequence[Padded], launches: list[Launch], tensors: Mapping[str, Copy], end: int) -> list[Launch]:
    """``launches`` on ``tensors`` in place of operands, between the copies; their scratch begins at ``end``."""
    overlaps = all(x.overlaps for x in launches)
    before, after = (
        [replace(launch(c), overlaps=overlaps) for c in copies if c.operand.is_written is written]
        for written in (False, True)
    )
    return [*before, *on_copies(launches, tensors, end), *after]
