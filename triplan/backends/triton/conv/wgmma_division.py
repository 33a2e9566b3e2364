"""How ``wgmma`` divides the gradient of weight among programs: tiles, their lanes, shares, and pieces.

A step multiplies a box of pixels for a tile of the gradient. The boxes of each tile are cut into lanes, some of one box
more than others. A share is a lane; where there are more lanes than shares, all shares have equal parts of the others.
What a share has of a tile is a piece, whose sums wait in a slot of the workspace for a launch that adds them.
"""

from __future__ import annotations

from dataclasses import dataclass

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch
from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import ceil_power, values
from triplan.backends.triton.common.strides import axis_strides, count
from triplan.backends.triton.conv import shared, shared_kernels as kernels
from triplan.descriptors.conv import Conv2dProblem

#: Multiprocessors that the gradient of weight is divided for: bits depend on it, so that it is no target's.
DIVIDED_FOR = 132
#: Elements of a block of the gradient.
BLOCK = 64 * 64


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
        """Lanes without a share of their own, the last of as many tiles."""
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
        """Of a tile at most: shares that have parts of a lane may begin and end within it."""
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
    """Whole tiles; as many shares of each; or shares for all multiprocessors.

    The last not of more than twice as many tiles as multiprocessors: those took longer than larger tiles (H100).
    """
    shares = [tiles * n for n in range(1, max(min(DIVIDED_FOR // tiles, boxes), 1) + 1)]
    if tiles * boxes >= DIVIDED_FOR and tiles <= 2 * DIVIDED_FOR:  # no more lanes than boxes
        shares.append(DIVIDED_FOR)
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
