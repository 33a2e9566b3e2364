"""``rows`` of softmax: a program holds whole rows in registers."""

from __future__ import annotations

from dataclasses import replace

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.rows import Tile, registers_for
from triplan.backends.triton.common.rows_entries import WholeRows
from triplan.backends.triton.softmax import rows_kernels as kernels
from triplan.backends.triton.softmax.shared import OPS, SoftmaxEntry
from triplan.sku import ElementKind, interpreting

#: Elements of a row at most: registers hold one operand of them (forward), or two (backward).
MOST_FORWARD = 32768
MOST_BACKWARD = 16384
#: Elements of a row from which on threads hold 16-bit elements as they are read: in f32 they would fill a
#: multiprocessor's registers.
NARROW = 32768


class SoftmaxRows(WholeRows, SoftmaxEntry, ops=OPS):
    def find_tile(self) -> Tile | None:
        most = MOST_BACKWARD if self.backward else MOST_FORWARD
        tile = self.rows.whole_tile(most // (4 if self.element is ElementKind.F64 else 1))
        if tile is not None and not self.backward and self.holds_narrow(tile):
            return replace(tile, warps=8)  # 128 elements a thread, two to a register
        return tile

    def holds_narrow(self, tile: Tile) -> bool:
        """Whether threads hold elements as they are read. (With an address for each, narrow ones would not fit.)"""
        return self.element.itemsize == 2 and tile.block >= NARROW and self.rows.vectors

    def main(self, narrow: bool | None = None) -> list[Launch]:
        """``narrow``: by default as ``holds_narrow``."""
        if self.backward:
            return [self.launch(kernels.softmax_backward_rows_kernel)]
        narrow = (self.holds_narrow(self.tile) if narrow is None else narrow) and not interpreting()
        most = registers_for(self.tile, 2) if narrow else 0
        return [self.launch(kernels.softmax_rows_kernel, registers=most, NARROW=narrow)]
