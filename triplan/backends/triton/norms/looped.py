"""``looped`` of the norms: a program loops along one row of any length, or along several that are adjacent in memory.

Backward, a second launch accumulates the gradients of weight and bias, column by column.
"""

from __future__ import annotations

from typing import Any

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.rows_entries import LoopedRows
from triplan.backends.triton.common.tiles import Tile, registers_for
from triplan.backends.triton.norms import crossed_kernels, looped_kernels, shifted_kernels
from triplan.backends.triton.norms.shared import CENTRED, OPS, NormEntry
from triplan.descriptors.norms import NormDescriptor
from triplan.sku import ElementKind, Target

#: The kernels of one row a program, and of several; forward and backward.
LOOPED = (looped_kernels.norm_looped_kernel, looped_kernels.norm_backward_looped_kernel)
SHIFTED = (shifted_kernels.norm_shifted_kernel, shifted_kernels.norm_backward_shifted_kernel)
CROSSED = (crossed_kernels.norm_crossed_kernel, crossed_kernels.norm_backward_crossed_kernel)
#: Microseconds of the loops themselves; accesses of single elements in a microsecond where no vectors are loaded: of
#: rows with gaps forward (or with a residual), of others forward, backward, and with gradients of weight or bias. (From
#: drawn problems on an H200.)
LOOP_US, SINGLE_PER_US = 0.45, (2e6, 1.4e6, 2e6, 1.3e6)
#: The same of rows of more than LONG elements backward, of which each multiprocessor has fewer than MANY: more programs
#: would hide each other's latencies.
LONG, MANY, FEW_PER_US = 1 << 15, 6, 1.2e6
#: Microseconds at least of each block of a row forward where no vectors are loaded: it waits for memory.
BLOCK_US = 0.4
#: How much shorter such rows take in a lone warp, without a weight. (From drawn problems on an H200.)
LONE_WARP_US = 0.35
#: Elements of ``shifted`` blocks that a multiprocessor has in a microsecond: forward, backward, and backward with a
#: weight, which both loops load element by element; and the fewest programs that are counted on one, which wait for
#: memory: forward; of the backward none, which is fitted and has no reason that is known. (From runs on an H200 that
#: are not published, and from drawn problems.)
SHIFTED_PER_US, SHIFTED_ALONE = (7700.0, 5400.0, 3500.0), (1.5, 0.0)
#: Elements of ``shifted`` rows above which there are mostly few of them, so that each has more warps than these. Timed
#: with layer_norm, and backward with rows of up to 32769 and of 95179 elements, by a run that is not published.
SHIFTED_LONG, SHIFTED_WARPS = 5 << 14, 8
#: Elements of a short row, and microseconds of each launch after the first backward of rows of at most as many. (From
#: drawn problems on an H200.)
SHORT_ROW, LATER_US = 144, 0.9
#: ``several_per_us`` forward of f64, which has no exponentials; and backward of more than 16 bits where rows are
#: crossed, and not centred. (From drawn problems on an H200.)
F64_PER_US, CROSSED_WIDE_PER_US = 3000.0, 850.0
#: What the second loop's reads cost backward where vectors are loaded.
CACHED_SHARE = 0.05


class NormLooped(LoopedRows, NormEntry, ops=OPS):
    sku_version = 3  # rows that begin between two vectors are read by vectors, long ones by other tiles

    def __init__(self, desc: NormDescriptor) -> None:
        super().__init__(desc)
        # (Of two operands the loop waits for memory, not for a second sum.)
        self.two_sums = CENTRED if self.backward or self.residual or self.shifted() else 1.0
        self.which = SHIFTED if self.shifted() else LOOPED if self.tile.rows == 1 else CROSSED
        if self.shifted():
            self.version = 5
        narrow, wide, narrow_backward, wide_backward = self.several_per_us
        wide = F64_PER_US if self.element is ElementKind.F64 else wide
        wide_backward = CROSSED_WIDE_PER_US if self.rows.crossed and not self.centred else wide_backward
        self.several_per_us = (narrow, wide, narrow_backward, wide_backward)
        if self.backward and self.rows.vectors and not self.gradients:
            self.cached_share = CACHED_SHARE

    def find_tile(self) -> Tile:
        """By sweeps on an H200: what registers have room for beside a row's sums. A program has one row, but several
        where neighbours are adjacent in memory, if there are enough of them."""
        r, size, centred, operands = self.rows, self.element.itemsize, self.centred, len(self.read_first)
        if r.across and not r.has_many():
            return r.lone_tile(r.operands, operands)
        if self.backward:
            tile = r.loop_tile(32 if centred and size < 8 else 16, operands)
        elif operands > 1:
            return r.loop_tile(8 if centred and size == 2 else 16, operands)
        else:
            held = {2: 32, 4: 64, 8: 16}[size] if centred else 32
            tile = r.loop_tile(held, most_warps=16 if held == 64 else 0)
        # (Where rows begin between two vectors, each element of the tile has a sum of its own.)
        if not self.shiftable() or tile.block >= r.n:
            return tile
        if r.n <= SHIFTED_LONG:
            return r.loop_tile(16, operands, SHIFTED_WARPS)
        return Tile(1, 8192, 32) if self.backward else r.loop_tile(16)

    def shiftable(self) -> bool:
        """(Not with a residual, its gradient or a second result.)"""
        return self.rows.begins_alike() and len(self.moved) == 2 + self.backward

    def us(self, target: Target) -> float:
        r, tile = self.rows, self.tile
        us = max(super().us(target), self.several_us(target))
        if self.shifted():
            us = max(us, self.shifted_us(target)) + LOOP_US
        elif tile.rows == 1:
            busiest = -(-r.count // target.sm_count) * target.sm_count  # a program is one row
            kind = 1 + self.backward + bool(self.gradients) if (r.unit and not self.residual) or self.backward else 0
            few = self.backward and r.n > LONG and r.count < MANY * target.sm_count
            per_us = min(SINGLE_PER_US[kind], FEW_PER_US) if few else SINGLE_PER_US[kind]
            us = max(us + LOOP_US, self.single_us(per_us, busiest))
            if not r.vectors and not self.backward:
                us = max(us, BLOCK_US * r.blocks(tile))
                # A lone warp waits for no other one, and without a weight for no load behind the sum.
                lone = tile.warps == 1 and r.unit and not (self.weighted() or self.centred)
                us -= LONE_WARP_US if lone else 0.0
        if not self.gradients:
            return us
        accumulated = self.accumulate_us(target)
        if tile.rows > 1:
            accumulated = max(accumulated, self.apart_us(self.read_first))
        return us + self.later_us() + accumulated

    def shifted_us(self, target: Target) -> float:
        """Microseconds of whole steps of the loops: the elements that the last one lacks cost as much."""
        step = self.tile.block * (1 if self.backward else self.unroll())
        longest = self.rows.n + 16 // self.element.itemsize - 1  # with what is skipped of a vector
        weighted = any(o.name == "weight" for o in self.desc.operands())
        per_us = SHIFTED_PER_US[self.backward * (1 + weighted)]
        tile, alone = Tile(1, step, self.tile.warps), SHIFTED_ALONE[self.backward]
        return -(-longest // step) * self.tiles_us(tile, self.programs(), per_us, target, alone)

    def later_us(self) -> float:
        return LATER_US if self.rows.n <= SHORT_ROW else super().later_us()

    def partials_tile(self) -> Tile:
        return self.tile if self.tile.rows > 1 else super().partials_tile()

    def is_turned(self) -> bool:
        return False  # (No measurement says whether it would help.)

    def unroll(self) -> int:
        vectors = self.rows.vectors or self.shifted()
        return self.rows.unroll(self.tile, 4 if vectors else max(2 // len(self.read_first), 1))

    def constants(self) -> dict[str, Any]:
        return {**super().constants(), "FULL": self.rows.n % (self.tile.block * self.unroll()) == 0}

    def most_registers(self) -> int:
        spills = self.tile.rows == 1 and not self.backward and self.element is ElementKind.F64
        return registers_for(self.tile, 1) if spills else 0

    def main(self) -> list[Launch]:
        return [*super().main(), *([self.accumulate()] if self.gradients else [])]
