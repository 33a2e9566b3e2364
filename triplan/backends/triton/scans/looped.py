"""Kernel ``looped`` of scans: a program loops over the blocks of rows of any length, and carries the result so far."""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.card import LAUNCH_US, SM_WARPS
from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.common.rows_entries import Entry, LoopedRows
from triplan.backends.triton.common.tiles import Tile, registers_for, tile_of
from triplan.backends.triton.scans import looped_kernels as kernels
from triplan.backends.triton.scans.shared import ALONG_PER_US, BACKWARD, GROUPED_FROM, SCANS, ScanEntry
from triplan.sku import ElementKind, Target

#: Microseconds of a step of the loop: the latency of its loads and of the step before. Untuned.
STEP_US = 1.0
#: Microseconds of a step whose elements are loaded one step ahead; of 8 bytes twice as long. From drawn problems on an
#: H200.
AHEAD_STEP_US = 0.45
#: Elements of a thread up to which registers also hold those of the next block; and of rows that begin between two
#: vectors. Untuned.
AHEAD, GROUPED_AHEAD = 4, 8
#: Bytes of compute elements of a block of one such row: the fewer warps share it, the less they wait for each other. Of
#: more blocks than FEW_STEPS each is twice as long, as few rows take the latency of each; of many rows of 6 or 8 blocks
#: twice as long ones take longer. Untuned.
GROUPED_BYTES, FEW_STEPS = 4096, 16
#: Microseconds of the loop itself. From drawn problems on an H200.
LOOP_US = 0.25
#: Microseconds of a step of a tile of several rows, for each of its warps: every thread combines the results of all
#: other warps. From drawn problems on an H200.
WARP_STEP_US = 0.18
#: Time of such a step if rows are scanned from their ends, relative to others. From the same problems.
REVERSED_STEP = 1.2
#: ALONG_PER_US of other crossed rows. From drawn problems on an H100 and an H200.
CROSSED_PER_US = 1.6e5
#: The same of rows that are adjacent in all operands, by the bytes of an element. From drawn problems on an H200.
ACROSS_PER_US = {2: 3e5, 4: 1.5e5, 8: 0.9e5}
#: Their time if they are scanned from their ends, relative to others. From the same problems.
REVERSED_ACROSS = 1.3
#: Time of crossed rows whose results have gaps in both directions, relative to others. From a run on an H200 that is
#: not published.
GAPS = 1.65


class ScanLooped(LoopedRows, ScanEntry, ops=SCANS):
    which = (kernels.scan_looped_kernel, kernels.cumprod_backward_looped_kernel)
    priority = 2
    moves = False
    program_us = 2.0  # of many short rows on an H200, drawn problems of ``bench anywhere``
    along = True
    sku_version = 4  # bits of rows that begin between vectors, and whose results do not

    def find_tile(self) -> Tile:
        r = self.rows
        # Several rows where they are crossed, if there are enough of them. Of rows that are read along, whose results
        # are adjacent to their neighbours', more than half as many as a tile has are enough.
        fewest = r.neighbours // 2 + 1 if self.writes_across() else r.neighbours
        many = r.has_many() and (r.lanes >= fewest or not r.along)
        tile = r.block_tile(2 if self.backward else 1, crosses=many)
        block = min(tile.block, self.most() // tile.rows)
        if not self.without_vectors():
            return tile_of(tile.rows, block, self.element.itemsize)
        size = self.compute.itemsize
        if tile.rows == 1:
            short = GROUPED_BYTES // size
            return tile_of(1, min(block, short if r.n <= FEW_STEPS * short else 2 * short), size)
        # Twice as many rows as elsewhere: longer pieces are written, fewer of which share a sector with others.
        return tile_of(min(2 * tile.rows, ceil_power(r.lanes)), GROUPED_FROM, size)

    def without_vectors(self) -> bool:
        """Whether rows begin between two vectors, or have gaps: no thread has its elements in vectors."""
        apart = not (self.rows.vectors or self.rows.across or self.rows.crossed)
        return self.grouped() or (apart and not self.backward)

    def is_ahead(self) -> bool:
        """Whether the next block is loaded while one is scanned."""
        each = self.tile.rows * self.tile.block // (32 * self.tile.warps)
        most = GROUPED_AHEAD if self.without_vectors() else AHEAD
        return not self.backward and each <= most and self.rows.n > self.tile.block

    def main(self) -> list[Launch]:
        ahead = self.is_ahead()
        # (Arithmetic of i64 is several instructions, for which half of the registers are too few: some would spill.)
        most = registers_for(self.tile, 2) if ahead and self.element is not ElementKind.I64 else 0
        return [self.launch(self.which[self.backward], registers=most, AHEAD=ahead)]

    def us(self, target: Target) -> float:
        sms = target.sm_count
        waves, steps = -(-self.programs() // (SM_WARPS // self.tile.warps * sms)), -(-self.rows.n // self.tile.block)
        us, wide = super().us(target), self.compute.itemsize // 4
        if self.is_ahead() and self.without_vectors():
            step = AHEAD_STEP_US * wide + self.step_us()
            us = max(us, self.step_us() + LOOP_US + step * (waves * steps - 1))
        else:
            us += LOOP_US + (STEP_US + self.step_us()) * (waves * steps - 1)
        held = steps * self.tile.rows * self.tile.block
        if self.tile.rows == 1:  # the busiest multiprocessor
            return max(us, self.scanned_us(-(-self.programs() // sms) * sms * held) - LAUNCH_US)
        way = self.reversed()
        us = max(us, WARP_STEP_US * self.tile.warps * (REVERSED_STEP if way else 1.0) * steps)
        held *= self.programs()
        if self.rows.across:
            across_us = held / ACROSS_PER_US[self.element.itemsize] * (REVERSED_ACROSS if way else 1.0)
            return max(us, across_us - LAUNCH_US)
        gaps = any(o.is_written and not o.layout.packed and o.layout.unit_axis is None for o in self.rows.operands)
        each = wide * held / (ALONG_PER_US if self.writes_across() else CROSSED_PER_US)
        return max(us, each * (GAPS if gaps else 1.0) - LAUNCH_US)


class BackwardLooped(ScanLooped, ops=BACKWARD):
    elements = Entry.elements
    along = False
    program_us = ScanEntry.program_us
    sku_version = 1
