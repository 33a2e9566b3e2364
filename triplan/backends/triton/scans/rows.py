"""Kernel ``rows`` of scans: a program holds whole rows in registers."""

from __future__ import annotations

from triplan.backends.triton.common.rows_entries import WholeRows
from triplan.backends.triton.common.tiles import Tile, warps_for
from triplan.backends.triton.scans import rows_kernels as kernels
from triplan.backends.triton.scans.shared import OPS, ScanEntry
from triplan.sku import Target

#: Time relative to the estimate if tiles write parts of sectors: cumprod_backward of 1046496 x 128 bf16 whose dx is
#: transposed takes 2478 us on an H100, estimated 778.
PARTLY = 2.5


class ScanRows(WholeRows, ScanEntry, ops=OPS):
    which = (kernels.scan_rows_kernel, kernels.cumprod_backward_rows_kernel)

    def find_tile(self) -> Tile | None:
        tile = self.rows.whole_tile(self.most())
        # Few rows side by side do not fill a tile of as many as sectors have.
        if tile and (self.rows.across or self.rows.crossed) and tile.rows > self.rows.beside():
            rows = self.rows.beside()
            return Tile(rows, tile.block, warps_for(rows * tile.block, self.element.itemsize))
        return tile

    def us(self, target: Target) -> float:
        """(Sectors that are written in part, where a result alone is contiguous across rows: see PARTLY.)"""
        us = super().us(target)
        written = [o for o in self.rows.operands if o.is_written]
        partly = self.rows.crossed and self.tile.rows < self.rows.beside()
        return us * PARTLY if partly and any(o.layout.unit_axis not in (None, self.rows.axis) for o in written) else us
