"""Tiles of ``tiles`` and ``small_tiles``, and how these divide problems into them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.conv import shared
from triplan.descriptors import Operand
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku import MathPrecision
from triplan.sku.facts import fact

#: Programs that keep any card busy, and parts of the gradient of weight at most. Untuned.
BUSY_PROGRAMS = 528
MOST_PARTS = 128
#: Pairs of a tap and a channel of a tile at most, and of FMAs, whose registers would spill. Untuned.
FLAT_COLUMNS, FLAT_COLUMNS_FMA = 64, 32
#: Elements of a tile up to which 4 warps compute it, and not 8. Untuned.
FEW_WARPS = 64 * 64
#: Elements of a tile at least, of FMAs 8 of each thread, of f64 one instruction of each of 4 warps. Untuned below.
FEW_SUMS = {MathPrecision.F32: 16 * 64, MathPrecision.F64: 4 * 16 * 8}


@dataclass(frozen=True, slots=True)
class Tile:
    """Pixels (or filters), channels and terms of a step, and stages of the pipeline."""

    m: int
    n: int
    k: int
    stages: int

    @property
    def warps(self) -> int:
        return 4 if self.m * self.n <= FEW_WARPS else 8


#: Tiles by kind of arithmetic: the largest, as channels and terms may be fewer. Of f64, a warp of 32 by 32 results
#: reads shared memory in half of the time that its products take; of 16 by 16, in all of it. Untuned.
TILES = {
    "half": Tile(128, 128, 64, 3),
    "tf32": Tile(64, 64, 32, 3),
    "f32": Tile(64, 64, 16, 3),
    "f64": Tile(64, 64, 16, 3),
}
#: Of halves that are not all read and written in vectors: each element has an address, and larger tiles spill so many
#: registers that these leave the L1 cache.
RAGGED_HALF = Tile(128, 64, 32, 3)
#: Filters of a tile of the gradient of weight in tf32 at most, too few for wgmma; and channels, for which a pixel's
#: addresses are computed once.
FILTERS_TF32, CHANNELS_TF32 = 32, 128
#: Of ``small_tiles``; and blocks of pixels that a program sums alone, because a second launch takes longer.
SMALL, WHOLE = Tile(16, 16, 128, 1), 4
#: Blocks of channels that may be summed in a step.
DEPTHS = (128, 64, 32, 16)


def _fitting(most: int, extent: int) -> int:
    """A block of at least 16, as tensor cores need, and less than twice ``extent``."""
    return max(min(most, ceil_power(extent)), 16)


def by_fma(desc: Conv2dProblem) -> bool:
    """Whether pixels are sums of FMAs, whose order is that of the terms, whatever the tile."""
    return desc.multiplicands is MathPrecision.F32 and not shared.of_weight(desc)


def along_features(desc: Conv2dProblem) -> bool:
    """Whether weights are known to be adjacent along the features."""
    o, axis = desc.operand("weight"), int(shared.of_input(desc))
    return o.layout.unit_axis == axis or (o.layout.packed and axis == 1 and math.prod(o.shape[2:]) == 1)


def is_whole(o: Operand) -> bool:
    """Whether channels are read and written in vectors: packed ones are if there is one pixel or tap."""
    one = o.layout.packed and math.prod(o.shape[2:]) == 1
    return shared.in_vectors(o) or (one and o.shape[1] * o.element.itemsize % 16 == 0 and o.alignment >= 16)


def features(desc: Conv2dProblem) -> int:
    """Channels of a group of the result."""
    return desc.channels if shared.of_input(desc) else desc.filters


def reduced(desc: Conv2dProblem) -> int:
    """Channels of a group that are summed."""
    return desc.filters if shared.of_input(desc) else desc.channels


def strided(desc: Conv2dProblem) -> bool:
    """Whether rows and columns are divided by remainders modulo the strides, which tell the taps that reach them."""
    return shared.of_input(desc) and desc.stride != (1, 1)


def _rows(desc: Conv2dProblem) -> int:
    """Pixels, or the most that have one remainder."""
    if not strided(desc):
        return shared.pixels(desc)
    return desc.batch * -(-desc.height // desc.stride[0]) * -(-desc.width // desc.stride[1])


@dataclass(frozen=True)
class Tiling:
    """How the entry ``name`` divides problems; ``small``: into tiles of few results, whose sums have few steps.

    A step of a small tile takes many terms, all of which are read at once: where a problem is small, its time is what a
    program waits, and more programs take no longer.
    """

    name: str
    small: bool = False

    def _known(self, desc: Conv2dProblem) -> Tile:
        if self.small:
            return SMALL
        if desc.element.itemsize > 2:
            return TILES[desc.multiplicands.value]
        images = (o for o in desc.operands() if len(o.shape) == 4 and o.shape[1] > 1)
        whole = shared.of_weight(desc) or all(map(is_whole, images))
        return TILES["half"] if whole else RAGGED_HALF

    def _depth(self, desc: Conv2dProblem) -> int | None:
        """Channels of a step: the largest block whose last leaves a quarter empty at most; None if there is none."""
        n, most = reduced(desc), self._known(desc).k
        return next((k for k in DEPTHS if k <= most and -(-n // k) * k * 3 <= 4 * n), None)

    @fact
    def tile_of(self, desc: Conv2dProblem) -> Tile:
        """It must not depend on the batch, or bits would; but for the pixels of FMAs and of f64."""
        known, stages = self._known(desc), self._known(desc).stages
        if self.small:
            n = _fitting(known.n, features(desc))
            terms = shared.pixels(desc) if shared.of_weight(desc) else desc.taps * reduced(desc)
            each = None if shared.of_weight(desc) else self._depth(desc)
            # More elements of f64 and their addresses than registers hold, where each has an address of its own.
            most = known.k // 2 if shared.of_weight(desc) and desc.element.itemsize > 4 else known.k
            return Tile(known.m, n, each or _fitting(most, terms), stages)
        if self.flat(desc) and desc.multiplicands is MathPrecision("f32" if shared.of_weight(desc) else "tf32"):
            stages = 2  # with 3, registers spill
        if shared.of_weight(desc):
            tf32 = desc.multiplicands is MathPrecision.TF32
            if self.flat(desc):
                fma = desc.multiplicands is MathPrecision.F32
                columns = FLAT_COLUMNS_FMA if fma else FLAT_COLUMNS
                n, k = _fitting(columns, desc.taps * desc.channels), min(known.k, 32)
            else:
                n, k = _fitting(CHANNELS_TF32 if tf32 else known.n, desc.channels), known.k
                stages = 2 if n == CHANNELS_TF32 and tf32 else stages  # with 3, fewer programs are resident
            # wgmma takes tf32 along what is summed alone: elements would be transposed one by one.
            return Tile(_fitting(FILTERS_TF32 if tf32 else known.m, desc.filters), n, k, stages)
        n, k = _fitting(known.n, features(desc)), self._depth(desc) or min(known.k, 32)
        m, beside = known.m, -(-features(desc) // n) * desc.groups * (math.prod(desc.stride) if strided(desc) else 1)
        few = FEW_SUMS.get(desc.multiplicands, m * n)
        if not by_fma(desc) or along_features(desc):
            # No bits depend on m. Where weights lie otherwise, each of a thread's pixels saves reads that conflict.
            while m > 16 and m * n > few and -(-_rows(desc) // m) * beside < card.SMS:
                m //= 2
        return Tile(m, n, k, stages)

    def tiles(self, desc: Conv2dProblem) -> tuple[int, int]:
        """Tiles along the rows and columns of the product, of one group (and tap)."""
        tile = self.tile_of(desc)
        if shared.of_weight(desc):
            columns = desc.channels * (desc.taps if self.flat(desc) else 1)
            return -(-desc.filters // tile.m), -(-columns // tile.n)
        return -(-_rows(desc) // tile.m), -(-features(desc) // tile.n)

    def products(self, desc: Conv2dProblem) -> int:
        """Tiles of all products; without the parts of what they sum."""
        m, n = self.tiles(desc)
        if shared.of_weight(desc):
            return m * n * desc.groups * (1 if self.flat(desc) else desc.taps)
        return m * n * desc.groups * (math.prod(desc.stride) if strided(desc) else 1)

    def parts(self, desc: Conv2dProblem) -> tuple[int, int]:
        """Parts of the pixels that the gradient of weight sums, and the pixels of each."""
        block = self.tile_of(desc).k
        blocks, most = -(-shared.pixels(desc) // block), MOST_PARTS
        if self.small and blocks <= WHOLE:
            most = 1
        parts, each = shared.parts_of(blocks, self.products(desc), BUSY_PROGRAMS, most)
        return parts, each * block

    def parts_bytes(self, desc: Conv2dProblem) -> int:
        """Bytes of the parts' sums."""
        return shared.parts_bytes(desc, self.parts(desc)[0]) if shared.of_weight(desc) else 0

    def programs(self, desc: Conv2dProblem) -> int:
        """Programs of the main launch."""
        return self.products(desc) * (self.parts(desc)[0] if shared.of_weight(desc) else 1)

    def flat(self, desc: Conv2dProblem) -> bool:
        """Whether a step takes channels of several taps: where those of one would leave much of it empty."""
        return self._depth(desc) is None
