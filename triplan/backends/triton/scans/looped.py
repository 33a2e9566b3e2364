"""Kernel ``looped`` of scans: a program loops over the blocks of rows of any length, and carries the result so far."""

from __future__ import annotations

from triplan.backends.triton.common.card import SM_WARPS
from triplan.backends.triton.common.rows_entries import LoopedRows
from triplan.backends.triton.common.tiles import Tile, warps_for
from triplan.backends.triton.scans import looped_kernels as kernels
from triplan.backends.triton.scans.shared import OPS, ScanEntry
from triplan.sku import Target

#: Microseconds of a step of the loop: the latency of its loads and of the step before. Untuned.
STEP_US = 1.0


class ScanLooped(LoopedRows, ScanEntry, ops=OPS):
    which = (kernels.scan_looped_kernel, kernels.cumprod_backward_looped_kernel)
    priority = 2

    def find_tile(self) -> Tile:
        tile = self.rows.block_tile(2 if self.backward else 1)
        block = min(tile.block, self.most() // tile.rows)
        return Tile(tile.rows, block, warps_for(tile.rows * block, self.element.itemsize))

    def us(self, target: Target) -> float:
        at_once = SM_WARPS // self.tile.warps * max(target.sm_count, 1)
        waves, steps = -(-self.programs() // at_once), -(-self.rows.n // self.tile.block)
        return super().us(target) + STEP_US * waves * steps
