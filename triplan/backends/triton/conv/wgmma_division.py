"""How ``wgmma`` divides the gradient of weight among programs: tiles, their lanes, shares, and pieces.

- A step multiplies one box of pixels for one tile of the gradient.
- A lane is a run of boxes of one tile. The lanes of a tile have equally many boxes, or some have one more.
- A share is the work that a program does at a time. It has one lane. Where there are more lanes than shares, the lanes
  that are left over are cut into equal parts, one for each share.
- A piece is what one share has of one tile. Its sums are written to a slot of the workspace, and another launch adds
  the slots of a tile in a fixed order.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch
from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import ceil_power, values
from triplan.backends.triton.common.strides import axis_strides, count
from triplan.backends.triton.conv import shared, shared_kernels as kernels
from triplan.backends.triton.conv.wgmma_tiles import lattice_of
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku.facts import fact

#: Elements of a block of the gradient, and pixels of a box.
BLOCK, PIXELS = 64 * 64, 64
#: Tensor maps of x that the kernel takes.
MOST_MAPS = 8


@fact
def summed_box(desc: Conv2dProblem) -> tuple[int, int, int]:
    """Of the boxes of PIXELS pixels that end where rows do, and columns if there are no maps that do, the fewest."""
    images, rows, columns = lattice_of(desc)
    matrix = shared.is_matrix(desc)  # there is nothing behind its last row
    powers = [1 << i for i in range(PIXELS.bit_length())]
    found = [
        (PIXELS // high // wide, high, wide)
        for high, wide in itertools.product(powers, repeat=2)
        if high * wide <= PIXELS and rows % high == 0 and (columns % wide == 0 or matrix or _clips(desc))
    ]

    def wasted(box: tuple[int, int, int]) -> tuple[int, int, int, int]:
        boxes = -(-images // box[0]) * (rows // box[1]) * -(-columns // box[2])
        return boxes, columns % box[2], -box[2], -box[1]

    return min(found, key=wasted)


def _clips(desc: Conv2dProblem) -> bool:
    """Whether there can be a map for each remainder of the rows and tap of a row: a few, none of them empty."""
    ends = [end_under(desc, tap) for tap in range(desc.kernel[1])]
    return len(row_remainders(desc)) * len(ends) <= MOST_MAPS and min(ends) >= desc.stride[1]


def row_remainders(desc: Conv2dProblem) -> list[int]:
    """Of the rows of x that taps read, modulo the stride."""
    return sorted({(tap * desc.dilation[0] - desc.padding[0]) % desc.stride[0] for tap in range(desc.kernel[0])})


def end_under(desc: Conv2dProblem, tap: int) -> int:
    """Behind the last column of x that the last column of dout meets under a tap of a row."""
    return (desc.out_extents[1] - 1) * desc.stride[1] + tap * desc.dilation[1] - desc.padding[2] + 1


@dataclass(frozen=True, slots=True)
class Division:
    """``rows`` by ``columns`` blocks of a tile; tiles, those along the filters, and the boxes that each sums; shares.

    There are as many shares as tiles if each is a tile, whose sums are the gradient.
    """

    rows: int
    columns: int
    tiles: int
    tiles_filters: int
    boxes: int
    shares: int

    @property
    def whole(self) -> bool:
        return self.shares == self.tiles

    @property
    def lanes(self) -> int:
        """Of a tile."""
        return -(-self.shares // self.tiles)

    @property
    def left(self) -> int:
        """How many lanes are left over: the last lanes of as many tiles."""
        return self.lanes * self.tiles - self.shares

    @property
    def _left_steps(self) -> int:
        return self.left * (self.boxes // self.lanes)

    @property
    def steps(self) -> int:
        """Of the longest share."""
        return -(-self.boxes // self.lanes) - (-self._left_steps // self.shares)

    @property
    def all_steps(self) -> int:
        """Of all tiles."""
        return self.tiles * self.boxes

    @property
    def pieces(self) -> int:
        """The most pieces of a tile. Of a lane that is left over, one more share than fit may have a part."""
        return self.lanes - 1 + -(-self.shares // self.left) + 1 if self.left else self.lanes

    @property
    def pieces_of_share(self) -> int:
        """At most."""
        return 1 + -(-self.left // self.shares) + (1 if self.shares % self.left else 0) if self.left else 1

    @property
    def slots(self) -> int:
        return self.shares + (self.shares + self.left - 1 if self.left else 0)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a piece, in f32."""
        return 4 * self.rows * self.columns * BLOCK

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the workspace in which pieces wait."""
        return 0 if self.whole else self.slots * self.slot_bytes


def candidates(rows: int, columns: int, tiles: int, tiles_filters: int, boxes: int) -> list[Division]:
    """Divisions into whole tiles, into equally many shares of each tile, and into a share for each multiprocessor.

    The last only of up to twice as many tiles as multiprocessors: of more, larger tiles took less time (scripts, H100).
    """
    shares = [tiles * n for n in range(1, max(min(card.SMS // tiles, boxes), 1) + 1)]
    if tiles * boxes >= card.SMS and tiles <= 2 * card.SMS:  # no more lanes than boxes
        shares.append(card.SMS)
    return [Division(rows, columns, tiles, tiles_filters, boxes, n) for n in shares]


def fold_us(d: Division) -> float:
    """Microseconds of the launch that adds the pieces, and of writing them."""
    return 0.0 if d.whole else card.LAUNCH_US + 2 * d.slots * d.slot_bytes / card.BYTES_PER_US


def fold(desc: Conv2dProblem, inner: Conv2dProblem, d: Division, sums: Scratch, channels: int | None = None) -> Launch:
    """The launch that adds the pieces of ``inner``; ``channels`` under a tap, of which ``desc`` keeps the first."""
    out = desc.operand("dweight")
    args: dict[str, Arg] = {
        "parts": sums,
        "out": values(out),
        "out_strides": axis_strides(out),
        "tiles": Int(d.tiles),
        "shares": Int(d.shares),
        "lanes": Int(d.lanes),
        "boxes": Int(d.boxes),
        "tiles_filters": Int(d.tiles_filters),
        "blocks": Int(-(-inner.channels // 64)),
        "filters": Int(inner.filters),
        "taps": Int(inner.taps),
        "reduced": count(inner.channels),
        "channels": count(channels or desc.channels),
        "kept": None if channels is None else count(desc.channels),
        "kernel_rows": Int(desc.kernel[0]),
        "kernel_columns": Int(desc.kernel[1]),
    }
    elements = d.tiles * d.slot_bytes // 4
    busy = ceil_power(shared.FOLD_BUSY * shared.FOLD_AREA // elements)
    # Few tiles have more pieces than lanes.
    at_once = min(ceil_power(d.lanes), max(shared.FOLD_PARTS, min(busy, shared.MOST_FOLD_PARTS)))
    block = shared.FOLD_AREA // at_once
    constants = {"FILTERS": d.rows, "COLUMNS": d.columns, "PARTS": at_once, "BLOCK": block}
    return Launch(kernels.conv2d_fold_pieces_kernel, elements // block, args, constants, num_warps=4)
