"""Kernel ``split`` of scans: each block of a row has its own program, for few and long rows.

Two launches: the totals of the blocks, and the scan of each block from the total of all blocks before it. Where a row
has many blocks, a launch between them scans the totals. The division into blocks depends on a row's length alone.
"""

from __future__ import annotations

from dataclasses import replace

from triplan.backends.runtime.launch import Arg, Int, Launch
from triplan.backends.triton.common.card import LAUNCH_US, SECTOR
from triplan.backends.triton.common.offsets import I32_LIMIT, ceil_power
from triplan.backends.triton.common.rows_entries import Entry
from triplan.backends.triton.common.tiles import Tile, again_us, fits_grid, tile_of
from triplan.backends.triton.scans import split_kernels as kernels
from triplan.backends.triton.scans.looped_kernels import scan_looped_kernel
from triplan.backends.triton.scans.shared import (
    ALONG_PER_US,
    BACKWARD,
    BACKWARD_PER_US,
    GROUPED_FROM,
    MOST,
    SCANS,
    ScanEntry,
)
from triplan.descriptors import CumprodBackwardDescriptor, ScanDescriptor
from triplan.sku import Support, Target

#: If batch invariance is required, the choice between ``split`` and ``looped`` must not depend on the number of rows:
#: rows of at least so many blocks are split. Untuned.
FEWEST_BLOCKS = 4
#: Passes that those of a product of floats weigh in throughput, as the first also scans; sums take 2. From drawn
#: problems on an H100.
PRODUCTS = 3
#: Sectors a microsecond where neighbouring rows are adjacent in all operands: each element that a program moves is in
#: one of its own, but where a sector has all lanes of several. From drawn problems on an H200.
ACROSS_PER_US = 3.5e4
#: Elements a microsecond where they are adjacent in some operands. From the same problems.
CROSSED_PER_US = 6e4
#: Totals for each warp of a program up to which it combines them by itself: one a thread. And the microseconds that
#: the last launch adds then: it follows the first, beside whose end it begins. (Where a launch between them scans the
#: totals, both wait.) From a run on an H200.
MERGED, MERGE_US = 32, 0.5
#: The shortest tile of totals: one for each thread of a warp. (Triton 3.6 fails to compile a scan of a tile of one.)
LEAST_MERGED = 32
#: Elements of the shortest rows that are divided several at a time. Untuned.
LONG = 8192
#: Microseconds of a tile of the backward beside its elements that are loaded one by one, and the time of both launches
#: that have one, relative to one of ``looped`` that reads as much. The first is from drawn problems on an H200, the
#: second is untuned.
BACKWARD_STEP_US, BACKWARD_SHARE = 0.25, 1.6


class ScanSplit(ScanEntry, ops=SCANS):
    name, priority = "split", 1
    overlaps = True
    sku_version = 5  # programs combine few totals by themselves

    def __init__(self, desc: ScanDescriptor | CumprodBackwardDescriptor) -> None:
        super().__init__(desc)
        if self.merged() and not self.backward:
            self.version += 2

    def merged(self) -> int:
        """Totals of a row that each program of the last launch combines, if they are few; otherwise 0."""
        found = max(ceil_power(self.blocks()), LEAST_MERGED)
        return found if self.tile.rows * found <= MERGED * self.tile.warps else 0

    def find_tile(self) -> Tile:
        # Too few for ``looped`` to have several a program; a result alone would be a sector's only one.
        r = self.rows
        if self.writes_across() and not r.has_many() and r.lanes > r.neighbours // 2 and r.n >= LONG:
            return tile_of(min(2 * r.neighbours, ceil_power(r.lanes)), GROUPED_FROM, self.compute.itemsize)
        return tile_of(1, min(r.lone_tile(r.operands, 1).block, self.most()), self.element.itemsize)

    def invariant(self) -> bool:
        return super().invariant() and self.blocks() >= FEWEST_BLOCKS

    def blocks(self) -> int:
        return self.rows.blocks(self.tile)

    def partials(self) -> tuple[str, ...]:
        """The arrays with one element for each block."""
        return ("totals",)

    def arrays(self) -> dict[str, int]:
        return dict.fromkeys(self.partials(), 0 if self.idle() else self.rows.count * self.blocks())

    def arguments(self) -> dict[str, Arg]:
        return super().arguments() | {"blocks": Int(self.blocks())}

    def supports(self, target: Target) -> Support:
        return fits_grid(self.rows.count * self.blocks())

    def totals_tile(self) -> Tile:
        """The tile in which ``looped`` scans the totals of rows."""
        size = self.compute.itemsize
        return tile_of(1, min(ceil_power(self.blocks()), MOST * 4 // size), size)

    def depth(self) -> int:
        """Additions on the path of a term: within its block, within the scan of totals, and one to a later block."""
        within = self.totals_tile().block
        return 2 * self.tile.block + within + -(-self.blocks() // within)

    def us(self, target: Target) -> float:
        rows, programs = self.tile.rows, self.programs()
        count, row = self.rows.count, self.rows.sectors(rows) * self.rows.n * self.element.itemsize
        once = self.reducing_us(programs, rows * row / self.blocks(), target)
        scans = self.desc.op == "cumprod" and self.element.is_floating_point
        passes, step = PRODUCTS if scans else 2, self.step_us()
        fixed = 2 * step + (MERGE_US if self.merged() else self.later_us() + LAUNCH_US)
        us = passes * (once - step) + fixed + again_us(count * row)
        # (Totals of a product are scanned forward, in vectors in no time.)
        scanned = 1 if self.rows.vectors else passes - 1
        us = max(us, once + self.scanned_us(count * self.blocks() * self.tile.block) * scanned)
        r = self.rows
        if rows > 1:
            held = programs * rows * self.tile.block * self.compute.itemsize / 4
            return max(us, fixed + passes * held / ALONG_PER_US - LAUNCH_US)
        if not (r.across or r.crossed):
            return us
        shared = max(SECTOR / max(r.lanes * self.element.itemsize, 1), 1.0)
        return max(us, count * r.n / (ACROSS_PER_US * shared if r.across else CROSSED_PER_US) - LAUNCH_US)

    def main(self) -> list[Launch]:
        blocks, programs = self.blocks(), self.programs()
        totals, wide = self.given["totals"], self.rows.count * blocks >= I32_LIMIT
        strides = (None, Int(blocks, wide), None, None)
        rows = {"x": totals, "out": totals, "x_strides": strides, "out_strides": strides, "sizes": None}
        rows |= {"lanes": Int(self.rows.count), "n": Int(blocks), "blocks": Int(self.rows.count)}
        first = self.launch(kernels.scan_totals_kernel, programs)
        last = self.launch(kernels.scan_finish_kernel, programs, BLOCKS=self.merged())
        if self.merged():
            return [first, last]
        scan = self.launch(scan_looped_kernel, self.rows.count, self.totals_tile(), rows, AHEAD=False, GROUP=1)
        return [first, replace(scan, overlaps=False), last]


class BackwardSplit(ScanSplit, ops=BACKWARD):
    """The maps s -> term + factor * s of all blocks, their compositions from the end of each row on, and the results
    of each block from the s behind it."""

    elements = Entry.elements
    overlaps = False
    sku_version = 1

    def invariant(self) -> bool:
        return False

    def partials(self) -> tuple[str, ...]:
        return "factors", "terms"

    def totals_tile(self) -> Tile:
        return tile_of(1, min(ceil_power(self.blocks()), self.most()), self.compute.itemsize)

    def us(self, target: Target) -> float:
        programs, nbytes = self.programs(), self.rows.sectors() * self.tile.block * self.element.itemsize
        step = BACKWARD_STEP_US + self.step_us()
        composed = BACKWARD_STEP_US * -(-self.blocks() // self.totals_tile().block)
        busy = BACKWARD_SHARE * programs * self.tile.block / BACKWARD_PER_US[self.element.itemsize]
        return 2 * LAUNCH_US + composed + max(2 * step, busy, self.reducing_us(programs, 6 * nbytes, target))

    def main(self) -> list[Launch]:
        programs = self.programs()
        return [
            self.launch(kernels.block_maps_kernel, programs),
            self.launch(kernels.carry_maps_kernel, self.rows.count, self.totals_tile()),
            self.launch(kernels.cumprod_backward_finish_kernel, programs),
        ]
