"""``looped`` of softmax: a program loops along rows of any length, twice."""

from __future__ import annotations

import math

from triplan.backends.triton.common.card import L2_BYTES
from triplan.backends.triton.common.rows_entries import LoopedRows
from triplan.backends.triton.common.tiles import Tile
from triplan.backends.triton.softmax import looped_kernels as kernels
from triplan.backends.triton.softmax.shared import OPS, SoftmaxEntry
from triplan.descriptors.softmax import AnySoftmaxDescriptor
from triplan.sku import ElementKind, Target

#: How much longer than estimated loops take along rows that begin between two vectors, forward and backward (there of
#: 16 bits: of wider elements that threads load one by one, a warp fills whole sectors all the same). (This and what
#: follows: from drawn problems on an H200.)
ODD_ROWS = (1.7, 1.3)
#: Microseconds of a loop.
LOOP_US = 0.3
#: Elements that a program has in a microsecond, forward and backward: of a row with gaps, and of one that begins
#: between two vectors (backward that is no limit).
SINGLE_PER_US = ((1500.0, 3500.0), (3000.0, math.inf))
#: Elements of 16 bits that a multiprocessor has in a microsecond forward, of packed rows that threads load one by one.
ODD_PER_US = 2500.0
#: Elements of f64 that a multiprocessor has in a microsecond forward, of one row a program: each takes two exponentials
#: or three, of dozens of instructions.
F64_PER_US = 1050.0
#: Elements that a multiprocessor has in a microsecond forward, of 16 bits and of more, of tiles of several rows: where
#: neighbours are adjacent in the operand that both loops read, and rows are written by vectors, or one element at a
#: time; and where rows are contiguous in it.
CROSSED_PER_US = ((3600.0, 1800.0), (3200.0, 1800.0), (3000.0, 1000.0))
#: And where neighbours are adjacent in every operand, but are not accessed by vectors; forward and backward. (Of those
#: that are, too few were drawn to change the rates of any rows.)
SINGLE_ADJACENT_PER_US = (3200.0, 1800.0, 2000.0, 1500.0)
#: As CROSSED_PER_US, of 16 bits where every operand is accessed by vectors of 16 bytes: where rows are not contiguous
#: in the operand that is read, and where they are. And backward, where all operands but one at most are accessed by
#: vectors of any length, unless all are by those of 16 bytes and neighbours adjacent.
VECTORS_PER_US, BACKWARD_VECTORS_PER_US = (4000.0, 4500.0), 2600.0
#: Backward, of more bits, where rows are contiguous in all that is read, and only written ones are exchanged.
WRITTEN_ACROSS_PER_US = 1000.0
#: Of f64: forward of rows that are contiguous in what is read; and backward of softmax, which has no exponential, where
#: neighbours are adjacent in every operand.
F64_CROSSED_PER_US, F64_ADJACENT_PER_US = 1750.0, 3000.0
#: Elements of 16 bits that a multiprocessor has in a microsecond forward, of rows that have gaps.
GAPPED_PER_US = 3200.0
#: Warps of tiles of several rows that a multiprocessor holds: a thread has about 64 registers.
SEVERAL_WARPS = 32
#: What the second loop's reads cost; and where vectors are loaded, backward, and forward of so many elements and rows.
CACHED_SHARE, CACHED_FROM, CACHED_ROWS = (0.35, 0.05), 8192, 512
#: Elements of a tile of few rows.
FEW_BLOCK = 4096
#: Forward programs that read a row between vectors by vectors: elements of a row up to which 16 warps read two blocks
#: ahead, not four. Their registers then have room for three programs on a multiprocessor, not two, and the L2 cache for
#: the rows of all. And elements from which one program has all registers: of the tiles that were timed on an H200, by a
#: run that is not published, it was then the fastest.
TWO_AHEAD, ALONE_FROM = 1 << 16, 1 << 17
#: Elements that a multiprocessor has in a microsecond of such a program and of several: each takes two exponentials, or
#: three. And microseconds before the first elements arrive, and of the reductions. (From 14 problems on an H200.)
SHIFTED_PER_US, SHIFTED_US = (5400.0, 6250.0), 1.4
#: What the second loop's reads cost backward of more than 16 bits, along rows that begin anywhere, where the L2 cache
#: does not hold them: more than reads from memory. (From one problem on an H200.)
MISSED_SHARE = 1.5
#: How much longer tiles take of which every written sector is shared, of rows that are adjacent in all operands, and in
#: some. (From drawn problems on an H200.)
SHARED = (1.0, 0.35)
#: Bytes of a row above which the L2 cache holds the rows of one program on each multiprocessor, not of two.
LONG_ROW = 1 << 16


class SoftmaxLooped(LoopedRows, SoftmaxEntry, ops=OPS):
    which = (kernels.softmax_looped_kernel, kernels.softmax_backward_looped_kernel)
    priority = 2
    sku_version = 3  # rows that begin between two vectors are read by vectors
    refilled = 3  # (the loop reads between the writes of a sector's parts)

    def __init__(self, desc: AnySoftmaxDescriptor) -> None:
        super().__init__(desc)
        self.several_per_us = self.elements_per_us()
        r, narrow = self.rows, self.element.itemsize == 2
        cached = self.backward or (narrow and r.n > CACHED_FROM and r.count >= CACHED_ROWS)
        self.cached_share = CACHED_SHARE[cached and (r.vectors or self.shifted())]
        if self.shifted():
            self.which, self.version = (kernels.softmax_shifted_kernel, kernels.softmax_backward_shifted_kernel), 3
        if self.shifted() or self.backward:
            self.resident = 1 if self.tile.warps > 16 else 2

    def elements_per_us(self) -> tuple[float, float, float, float]:
        """``several_per_us``."""
        r, f64 = self.rows, self.element is ElementKind.F64
        vectors = [r.vector_bytes(o) for o in r.operands]
        forward, wide, backward, backward_wide = self.several_per_us
        if not r.across:  # neighbouring rows are adjacent in some operands alone
            backward = 2500.0
            written = all(r.vector_bytes(o) == 16 for o in r.operands if o.is_written)
            along = any(map(r.is_along, self.read_first))
            forward, wide = CROSSED_PER_US[2 if along else not written]
            if min(vectors) == 16:
                forward = VECTORS_PER_US[along]
            if along and f64:
                wide = F64_CROSSED_PER_US
            if all(map(r.is_along, self.read_first)) and not f64:
                backward_wide = WRITTEN_ACROSS_PER_US
        elif min(vectors) < 16:
            forward, wide, backward, backward_wide = SINGLE_ADJACENT_PER_US
        if r.across and f64 and not self.desc.op.startswith("log_"):
            backward_wide = F64_ADJACENT_PER_US
        if self.by_vectors() and not (r.across and min(vectors) == 16):
            backward = BACKWARD_VECTORS_PER_US
        return forward, wide, backward, backward_wide

    def shiftable(self) -> bool:
        return self.rows.begins_alike()

    def find_tile(self) -> Tile:
        if few := self.few_rows(FEW_BLOCK // self.rows.beside()):
            return few
        if not self.backward and self.shiftable() and self.rows.n > ALONE_FROM:
            return Tile(1, 8192, 32)
        if not self.backward:
            return self.rows.loop_tile(held=16)
        # A multiprocessor that has one program's rows in the L2 cache is filled by that program alone.
        return self.rows.loop_tile(held=32, operands=2, most_warps=32 if self.long() else 16)

    def long(self) -> bool:
        return self.rows.n * self.element.itemsize > LONG_ROW

    def again_share(self, nbytes: float) -> float:
        """As of any rows; of odd ones of wide elements, by the part that the L2 cache holds."""
        share, wide = super().again_share(nbytes), self.element.itemsize > 2
        if not (self.backward and wide and self.rows.unit) or self.rows.vectors or self.tile.rows > 1:
            return share
        kept = min(L2_BYTES / max(nbytes, 1), 1.0)
        return kept * self.cached_share + (1.0 - kept) * MISSED_SHARE

    def several_us(self, target: Target) -> float:
        """As of any rows; up to twice as long where programs write parts of sectors that they share with the next, and
        the L2 cache does not hold the rows of all until both have written them."""
        us, r, tile = super().several_us(target), self.rows, self.tile
        if not any(o.is_written and r.is_adjacent(o) and r.vector_bytes(o) < 16 for o in r.operands):
            return us
        running = min(self.programs(), SEVERAL_WARPS // tile.warps * target.sm_count) * tile.rows
        return us * (1.0 + SHARED[r.crossed] * (1.0 - min(L2_BYTES / max(running * self.traffic()[0], 1), 1.0)))

    def us(self, target: Target) -> float:
        us, r, narrow = max(super().us(target), self.several_us(target)), self.rows, self.element.itemsize == 2
        if self.shifted():
            us = us if self.backward else max(us, self.shifted_us(target))
        elif self.tile.rows == 1 and not r.vectors:
            if r.unit and (narrow or not self.backward):
                us *= ODD_ROWS[self.backward]
            us = max(us, r.n / SINGLE_PER_US[self.backward][r.unit])
            if narrow and not (self.backward or r.unit):
                us = max(us, r.n * r.count / target.sm_count / GAPPED_PER_US)
            if narrow and not self.backward and all(o.layout.packed for o in r.operands):
                us = max(us, r.n * r.count / target.sm_count / ODD_PER_US)
        if self.element is ElementKind.F64 and self.tile.rows == 1 and not self.backward:
            us = max(us, -(-r.count // target.sm_count) * r.n / F64_PER_US)
        return us + LOOP_US

    def shifted_us(self, target: Target) -> float:
        """Microseconds of the busiest multiprocessor, which has whole blocks of rows."""
        programs = -(-self.rows.count // target.sm_count)
        return programs * self.rows.blocks(self.tile) * self.tile.block / SHIFTED_PER_US[programs > 1] + SHIFTED_US

    def unroll(self) -> int:
        if self.backward:
            return self.rows.unroll(self.tile, 2 if self.rows.vectors else 1)
        two = self.shifted() and self.tile.warps == 16 and self.rows.n <= TWO_AHEAD
        return self.rows.unroll(self.tile, 2 if two else 4)
