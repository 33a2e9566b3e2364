"""Kernel ``rows`` of scans: a program holds whole rows in registers."""

from __future__ import annotations

from triplan.backends.triton.common.rows_entries import WholeRows
from triplan.backends.triton.common.tiles import Tile
from triplan.backends.triton.scans import rows_kernels as kernels
from triplan.backends.triton.scans.shared import OPS, ScanEntry


class ScanRows(WholeRows, ScanEntry, ops=OPS):
    which = (kernels.scan_rows_kernel, kernels.cumprod_backward_rows_kernel)

    def find_tile(self) -> Tile | None:
        return self.rows.whole_tile(self.most())
