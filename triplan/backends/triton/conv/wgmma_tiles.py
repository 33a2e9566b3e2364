"""Tiles of ``wgmma`` for the result and the gradient of the input: their sizes, and estimates of their times."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from triplan.backends.runtime.gluon import VIEWS_GROW
from triplan.backends.triton.common import card
from triplan.backends.triton.conv import shared
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku.facts import fact

#: Side of the blocks that tiles are made of, and channels of a step: those of 2 bytes.
CHANNELS = 64
#: Narrow blocks, and the most channels for which they take less time where others end half empty (H100).
NARROW, MOST_NARROW = 32, 160
#: Microseconds of one multiprocessor for a product of 64 by 64 by 64 (of tf32: by 32), and for each 64 by 64 results of
#: a tile, of 2 bytes, beside its products. (Boxes of the result, which no other reads at the same time, come as fast as
#: if it were alone.) Fitted by hand on an H200 and an H100.
STEP_US, RESULT_US = 0.074, 0.45
#: As RESULT_US, of all tiles of a multiprocessor but the last: whole blocks are written while the next tile is read. By
#: least squares over ResNet-50's convolutions on an H200, whose tiles were chosen with RESULT_US.
LATER_US = 0.25
#: As RESULT_US, of tiles whose taps share rows, of 2 bytes: their results are stored during the next products. From 32
#: to 128 channels on an H200.
HELD_US = 0.39
#: Bytes that a multiprocessor reads from the L2 cache in a microsecond, if the problem is small. From drawn problems on
#: an H200.
CACHED_BYTES_PER_US = 1e5
#: Bytes of the ring at most: what the staged results and barriers leave.
RING_BYTES = 192 << 10
#: (pixels of a box, features) of tiles of the result; of equal ones the first.
TILES = ((64, 256), (64, 128), (128, 128), (128, 64), (64, 64))
#: Those beside them of narrow blocks.
NARROW_TILES = ((128, 32), (256, 32))
#: Tiles of few features that are summed in whole blocks: TMA fills weights that do not exist more slowly than it reads.
FEW_TILES = ((128, 32),)
#: (boxes of 64 pixels, features) of tiles whose taps of a column share the rows that they read, if there are so few
#: features: of more, each tap reads its own box in as little time (H200). Rows that the taps may reach beyond a box:
#: there must be a tensor map of them. Slots of the ring at least: with two, steps wait for what they read (H200).
ROW_TILES, ROW_FEATURES = ((4, 64), (4, 32), (2, 64), (2, 32)), 64
REACHES, LEAST_STAGES = (1, 2, 4, 8), 3
#: Features of the tiles of a last wave that has a launch of its own.
TAIL_FEATURES = (128, 64)
#: Microseconds that this launch adds to its tiles: it begins when the first one ends. Fitted by hand on an H200.
TAIL_US = 3.0


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of the result, or of the gradient of the weight.

    Attributes:
        box: images, rows and columns of a box of pixels.
        rows: boxes that a step reads; of the gradient of the weight, blocks of filters.
        features: those of the tile; of the gradient of the weight, channels under taps.
        width: channels of a block, of 2 bytes.
        taps: how many taps of a column of the filter share the rows that they read.
        reach: rows that these taps read beyond those of a box.
    """

    box: tuple[int, int, int]
    rows: int
    features: int
    width: int = CHANNELS
    taps: int = 1
    reach: int = 0

    @property
    def pixels(self) -> int:
        return math.prod(self.box)

    @property
    def stages(self) -> int:
        """Slots of the ring."""
        return min(RING_BYTES // self.step_bytes, 8)

    @property
    def step_bytes(self) -> int:
        """Bytes that a step reads: ``rows`` boxes, and as many pixels (or channels) of each column."""
        read = self.box[0] * (self.box[1] + self.reach) * self.box[2]
        return 2 * self.width * (self.rows * read + self.taps * self.features)

    @property
    def step_us(self) -> float:
        """Of a step's products, and of the rows that it reads."""
        # wgmma reads each pixel from shared memory, which takes no less time for fewer features.
        few = max(CHANNELS / self.features, 1.0) if self.taps > 1 else 1.0
        products = STEP_US * self.taps * self.blocks * few * self.width / CHANNELS
        return max(products, self.step_bytes / (2 * self.width) / card.TMA_ROWS_PER_US)

    @property
    def columns(self) -> int:
        """Blocks of the features."""
        return -(-self.features // self.width)

    @property
    def blocks(self) -> float:
        """Blocks of 64 by 64 results."""
        return self.rows * self.features * self.pixels / CHANNELS**2

    def boxes(self, lattice: tuple[int, int, int]) -> tuple[int, int, int]:
        """Boxes in all, and of a column and a row of an image."""
        images, high, wide = (-(-n // b) for n, b in zip(lattice, self.box, strict=True))
        return images * high * wide, high, wide


class Part(NamedTuple):
    """What a launch computes: ``boxes`` boxes from ``first`` on, in tiles of one size."""

    tile: Tile
    first: int
    boxes: int


@fact
def _best_box(pixels: int, lattice: tuple[int, int, int]) -> tuple[int, int, int]:
    """Of the boxes of so many pixels those that cover with the fewest; of these that with the longest rows."""
    powers = range(pixels.bit_length())
    fitting = [(1 << i, 1 << j, pixels >> i + j) for i, j in itertools.product(powers, repeat=2) if pixels >> i + j]

    def wasted(box: tuple[int, ...]) -> tuple[int, int, int]:
        return math.prod(-(-n // b) for n, b in zip(lattice, box, strict=True)), -box[2], -box[1]

    images_of, high, wide = min(fitting, key=wasted)
    return images_of, high, wide


@fact
def tile_of(desc: Conv2dProblem) -> Tile:
    """The cheapest of the result. Its bits do not depend on it."""
    width = width_of(desc)
    sizes = (*TILES, *(NARROW_TILES if width == NARROW else FEW_TILES))
    found = [Tile(_best_box(p, lattice_of(desc)), 2, n, width) for p, n in sizes]
    reach = (desc.kernel[0] - 1) * desc.dilation[0]
    if VIEWS_GROW and desc.stride == (1, 1) and reach in REACHES and features_of(desc) <= ROW_FEATURES:
        boxes = [(1, 64 // wide, wide) for wide in (8, 16, 32, 64)]  # rows begin where the swizzle does
        shared_rows = [Tile(b, rows, n, width, desc.kernel[0], reach) for b in boxes for rows, n in ROW_TILES]
        found += [t for t in shared_rows if t.stages >= LEAST_STAGES]
    return min(found, key=lambda t: parts_of(desc, t, card.SMS)[0])


def parts_of(desc: Conv2dProblem, tile: Tile, multiprocessors: int) -> tuple[float, tuple[Part, ...]]:
    """Estimated microseconds, and the launches that together compute all boxes of ``tile``.

    Boxes of a last wave that leaves most multiprocessors idle may have tiles of fewer features, of which there are
    more, and so a launch of their own: whichever is estimated to take less time.
    """
    boxes, across = tile.boxes(lattice_of(desc))[0], -(-features_of(desc) // tile.features)
    waves = -(-boxes // tile.rows) * across // multiprocessors
    first = waves * multiprocessors // across * tile.rows
    found: list[tuple[Part, ...]] = [(Part(tile, 0, boxes),)]
    if tile.taps == 1 and 0 < first < boxes:
        tails = (replace(tile, features=n) for n in TAIL_FEATURES if n < tile.features)
        found += [(Part(tile, 0, first), Part(tail, first, boxes - first)) for tail in tails]
    return min(((parts_us(desc, parts, multiprocessors), parts) for parts in found), key=lambda f: f[0])


def parts_us(
    desc: Conv2dProblem,
    parts: tuple[Part, ...],
    multiprocessors: int,
    cached: bool = False,
    later_us: float = RESULT_US,
) -> float:
    """Of the launches of all ``parts``, beside that of the first."""
    busy = sum(waves_us(desc, part, multiprocessors, cached, later_us) for part in parts)
    return busy + (len(parts) - 1) * TAIL_US


def waves_us(desc: Conv2dProblem, part: Part, multiprocessors: int, cached: bool, later_us: float) -> float:
    """Of one launch; on average, as every tap is of one launch.

    ``cached``: boxes are read from the L2 cache. ``later_us``: RESULT_US of tiles that others follow.
    """
    tile = part.tile
    whole, rest = divmod(reduced(desc), depth_of(desc))
    pixels = tile.rows * (tile.pixels + tile.reach * tile.box[2])
    read = 2 * tile.width * pixels / (CACHED_BYTES_PER_US if cached else card.SM_BYTES_PER_US)
    ending = card.TMA_ENDING[rest * desc.element.itemsize % card.SECTOR > 0]
    each = desc.taps / (launches_of(desc) * tile.taps)  # steps of a block of channels: the first reads from memory
    steps = whole * (min(each, 1.0) * max(tile.step_us, read) + max(each - 1.0, 0.0) * tile.step_us)
    if rest:
        # Rows of weights end within a block too, but for gradients of x of 2 bytes, which read them across. Of few
        # tiles, multiprocessors do not share the rate of rows from the L2 cache; memory takes longer than both.
        across = shared.of_input(desc) and desc.element.itemsize == 2
        rows = pixels + tile.taps * tile.features * (1.0 if across else ending)
        busy = min(tiles_in(desc, part) / multiprocessors, 1.0) if cached else 0.0
        steps += each * max(tile.step_us, read * ending, busy * rows / card.TMA_ROWS_PER_US)
    held = tile.taps > 1 and desc.element.itemsize == 2
    last_us, later_us = (HELD_US, HELD_US) if held else (RESULT_US, later_us)
    waves, blocks = -(-tiles_in(desc, part) // multiprocessors), desc.element.itemsize / 2 * tile.blocks
    return waves * steps + ((waves - 1) * later_us + last_us) * blocks


def lattice_of(desc: Conv2dProblem) -> tuple[int, int, int]:
    """Images, rows and columns that one launch computes, or sums.

    Of the gradient of x, the most of one remainder modulo the strides. Where pixels are rows of a matrix, all are one
    row of one image: then boxes end within none.
    """
    if shared.is_matrix(desc):
        return 1, 1, shared.pixels(desc)
    if not shared.of_input(desc):
        return desc.batch, *desc.out_extents
    return desc.batch, -(-desc.height // desc.stride[0]), -(-desc.width // desc.stride[1])


def features_of(desc: Conv2dProblem) -> int:
    return desc.channels if shared.of_input(desc) else desc.filters


def reduced(desc: Conv2dProblem) -> int:
    """Channels that are summed."""
    return desc.filters if shared.of_input(desc) else desc.channels


def launches_of(desc: Conv2dProblem) -> int:
    """One for each remainder of the rows and columns of the gradient of x modulo the strides."""
    return math.prod(desc.stride) if shared.of_input(desc) else 1


def width_of(desc: Conv2dProblem) -> int:
    """Channels of a block, of 2 bytes: no tile decides it, because bits of the result depend on it."""
    n = reduced(desc)
    narrow = desc.element.itemsize == 2 and n <= MOST_NARROW and 0 < n % CHANNELS <= NARROW
    return NARROW if narrow else CHANNELS


def depth_of(desc: Conv2dProblem) -> int:
    """Channels of a step: of 128 bytes, the widest that TMA swizzles, or narrow ones of 64."""
    return 2 * width_of(desc) // desc.element.itemsize


def tiles_in(desc: Conv2dProblem, part: Part) -> int:
    """Tiles of one launch."""
    return -(-part.boxes // part.tile.rows) * -(-features_of(desc) // part.tile.features)
