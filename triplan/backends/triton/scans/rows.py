"""Kernel ``rows`` of scans: a program holds whole rows in registers."""

from __future__ import annotations

from triplan.backends.triton.common.card import L2_BYTES, LAUNCH_US
from triplan.backends.triton.common.rows import ENOUGH
from triplan.backends.triton.common.rows_entries import Entry, WholeRows
from triplan.backends.triton.common.tiles import Tile, tile_of
from triplan.backends.triton.scans import rows_kernels as kernels
from triplan.backends.triton.scans.shared import BACKWARD, SCANS, ScanEntry
from triplan.sku import Target

#: Time relative to the estimate if tiles write parts of sectors: cumprod_backward of 1046496 x 128 bf16 whose dx is
#: transposed takes 2478 us on an H100, estimated 778.
PARTLY = 2.5
#: The same while results fit in the L2 cache, which completes these sectors. From drawn problems on an H200.
PARTLY_CACHED = 1.05
#: Warps of a tile up to which the first of SINGLY counts. Untuned.
FEW_WARPS = 4
#: Time of tiles whose threads have no adjacent elements, relative to other tiles without vectors: in up to FEW_WARPS
#: warps, forward and reversed, and in more. From drawn problems on an H200.
SINGLY, SINGLY_WIDE = (0.9, 1.1), 1.15
#: Elements a microsecond of rows that are adjacent in all operands: each thread has columns far apart, and exchanges
#: each with other threads. Of 8 bytes, half as many. From drawn problems on an H200; 8 bytes untuned.
ACROSS_PER_US = 5.4e5
#: Rows of a tile where short ones lie side by side, its warps, and bytes of compute elements of such a row: there are
#: two rows for each thread, where a tile of as many as sectors have leaves programs few bytes to move. From a run on an
#: H200, forward.
BESIDE, BESIDE_WARPS, BESIDE_BYTES = 128, 2, 64


class ScanRows(WholeRows, ScanEntry, ops=SCANS):
    which = (kernels.scan_rows_kernel, kernels.cumprod_backward_rows_kernel)
    sku_version = 4  # tiles of short rows side by side have more rows

    def find_tile(self) -> Tile | None:
        r, tile = self.rows, self.rows.whole_tile(self.most())
        if tile is None or not (r.across or r.crossed):
            return tile
        short = r.across and not self.backward and tile.block * self.compute.itemsize <= BESIDE_BYTES
        if short and r.outer * (r.lanes // BESIDE) >= ENOUGH:
            return Tile(BESIDE, tile.block, BESIDE_WARPS)
        # Few rows side by side do not fill a tile of as many as sectors have.
        return tile_of(r.beside(), tile.block, self.element.itemsize) if tile.rows > r.beside() else tile

    def us(self, target: Target) -> float:
        """(Sectors that are written in part, where a result alone is contiguous across rows: see PARTLY.)"""
        us, held = super().us(target), self.programs() * self.tile.rows * self.tile.block
        if self.rows.across and not self.backward:
            # Lanes behind the ends of rows are scanned too, but move nothing: they take about half as long.
            mean = (held + self.rows.count * self.rows.n) / 2
            return max(us, self.compute.itemsize // 4 * mean / ACROSS_PER_US)
        if self.rows.unit or self.rows.is_strided():
            apart = (self.singly() and self.group() == 1) or self.rows.is_strided()
            slower = SINGLY_WIDE if self.tile.warps > FEW_WARPS else SINGLY[self.reversed()]
            slower = slower if apart else 1.0
            us = max(us, self.scanned_us(held) * slower - LAUNCH_US)
        written = [o for o in self.rows.operands if o.is_written]
        partly = self.rows.crossed and self.tile.rows < self.rows.beside()
        if partly and any(o.layout.unit_axis not in (None, self.rows.axis) for o in written):
            once = self.step_us()
            cached = sum(o.nbytes for o in written) <= L2_BYTES
            return once + (us - once) * (PARTLY_CACHED if cached else PARTLY)
        return us


class BackwardRows(ScanRows, ops=BACKWARD):
    elements = Entry.elements
    sku_version = 2
