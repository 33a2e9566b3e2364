"""``looped`` of cross_entropy: a program loops along rows of any length, a second time for the gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.common.rows_entries import LoopedRows
from triplan.backends.triton.common.tiles import Tile, registers_for
from triplan.backends.triton.losses import looped_kernels as kernels
from triplan.backends.triton.losses.shared import CrossEntropyEntry
from triplan.descriptors import CrossEntropyDescriptor
from triplan.sku import ElementKind, Target

#: Time where a thread loads single elements, of 16 bits or with gaps, relative to that of vectors. (This and what
#: follows: from drawn problems on an H200.)
SINGLE = 1.3
#: Microseconds in which the maxima and sums of a row are merged.
MERGE_US = 0.2
#: Elements that one program has in a microsecond; of f64, whose exponentials are many instructions; and of a row with
#: gaps and of its gradient. The latter's programs on one multiprocessor take turns: their rows are so far apart that
#: each sector of a gradient, of which they write a part, is read and written by itself.
PER_US, DOUBLE_PER_US, GAPPED_PER_US = 5000.0, 1800.0, 1000.0
#: Microseconds in which a multiprocessor reads a block of several rows; and one whose columns are a multiple of
#: DISTANCE bytes apart, which share few sets of a cache. (The latter from one drawn problem, DISTANCE untuned.)
BLOCK_US, DISTANCE = (0.75, 3.0), 1 << 16


@dataclass(frozen=True, slots=True)
class Loop(Tile):
    """A tile whose threads hold ``vec`` neighbours each, with a maximum and a sum of their own until the loop ends."""

    vec: int

    @property
    def cols(self) -> int:
        return self.block // self.vec

    @property
    def text(self) -> str:
        return f"{self.rows}x{self.cols}x{self.vec}w{self.warps}"

    def additions(self, n: int, each_block: int = 5) -> float:
        # Sums are rescaled to a new maximum once a block, and once between threads.
        return self.vec + each_block * -(-n // self.block) + 5 + math.log2(self.cols)


class CrossEntropyLooped(LoopedRows, CrossEntropyEntry, ops=CrossEntropyDescriptor.ops()):
    which = (kernels.cross_entropy_looped_kernel,)
    tile: Loop
    cached_share = 0.2
    missed_share = 0.7

    def __init__(self, desc: CrossEntropyDescriptor) -> None:
        super().__init__(desc)
        #: Whether a thread loads elements that are apart from each other: consecutive threads then have consecutive
        #: elements, also where only some operands have them in one place, or none.
        self.apart = not self.rows.vectors
        self.version += 2 * self.apart
        self.resident = 32 // self.tile.warps

    def us(self, target: Target) -> float:
        """More than of whole rows, which need fewer exponentials, and whose threads wait for each other once less."""
        us, r, narrow = super().us(target), self.rows, self.element.itemsize == 2
        if self.tile.rows > 1:
            blocks = r.blocks(self.tile) * max(self.programs() / target.sm_count, 1.0) * (1 + self.desc.gradient)
            conflicts = r.lanes * self.element.itemsize % DISTANCE == 0
            return MERGE_US + max(us, BLOCK_US[conflicts] * blocks)
        if not r.vectors and (narrow or not r.unit):
            us *= SINGLE
        per_us = DOUBLE_PER_US if self.element is ElementKind.F64 else PER_US
        turns = 1.0
        if self.desc.gradient and not r.unit:
            per_us, turns = GAPPED_PER_US, max(self.programs() / target.sm_count, 1.0)
        return MERGE_US + max(us, turns * r.n / per_us)

    def find_tile(self) -> Loop:
        r, size = self.rows, self.element.itemsize
        if r.across or (r.crossed and r.has_many()):
            return Loop(r.neighbours, 4096 // r.neighbours, 8, vec=4)
        if not r.unit:
            return Loop(1, 4 * min(512, max(ceil_power(r.n) // 4, 1)), 8, vec=4)
        vec = 16 // size
        # A gradient reads rows again: with many warps, so few programs run that their rows stay in the L2 cache.
        warps = (32 if r.n * size > 65536 else 16) if self.desc.gradient else 8
        # Two 16-byte loads a thread and block; one where weights take as many registers again, or where smoothing's
        # sums have too few beside addresses.
        loads = 1 if self.smoothing and (self.desc.weight or not r.vectors) else 2
        cols = min(32 * warps * loads, max(ceil_power(r.n) // vec, 1))
        return Loop(1, vec * cols, min(warps, max(cols // 32, 1)), vec)

    def most_registers(self) -> int:
        spills = self.element is ElementKind.F64 and self.rows.unit  # rows with gaps need more
        return registers_for(self.tile, self.resident) if spills else 0

    def constants(self) -> dict[str, Any]:
        return {**super().constants(), "COLS": self.tile.cols, "VEC": self.tile.vec, "APART": self.apart}
