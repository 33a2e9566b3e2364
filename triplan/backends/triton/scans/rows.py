"""Kernel ``rows`` of scans: a program holds whole rows in registers."""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.rows import Tile
from triplan.backends.triton.common.rows_entries import WholeRows
from triplan.backends.triton.scans import rows_kernels as kernels
from triplan.backends.triton.scans.shared import OPS, ScanEntry


class ScanRows(WholeRows, ScanEntry, ops=OPS):
    def find_tile(self) -> Tile | None:
        return self.rows.whole_tile(self.most())

    def main(self) -> list[Launch]:
        return [self.launch(kernels.cumprod_backward_rows_kernel if self.backward else kernels.scan_rows_kernel)]
