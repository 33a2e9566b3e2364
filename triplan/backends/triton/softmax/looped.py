"""``looped`` of softmax: a program loops along rows of any length, twice."""

from __future__ import annotations

from triplan.backends.triton.common.rows_entries import LoopedRows
from triplan.backends.triton.common.tiles import Tile
from triplan.backends.triton.softmax import looped_kernels as kernels
from triplan.backends.triton.softmax.shared import OPS, SoftmaxEntry
from triplan.sku import Target

#: How much longer than estimated loops take on an H200: forward along several rows that not all operands have beside
#: each other, where most loads wait for a sector each (1.8 to 4.3 times, in six drawn problems); backward along rows
#: that begin between two vectors. And microseconds of them.
SEVERAL_ROWS, ODD_ROWS, LOOP_US = 2.5, 1.3, 0.3
#: Bytes of a row above which the L2 cache holds the rows of one program on each multiprocessor, not of two.
LONG_ROW = 1 << 16


class SoftmaxLooped(LoopedRows, SoftmaxEntry, ops=OPS):
    which = (kernels.softmax_looped_kernel, kernels.softmax_backward_looped_kernel)
    priority = 2

    def find_tile(self) -> Tile:
        if not self.backward:
            return self.rows.loop_tile(held=16)
        # A multiprocessor that has one program's rows in the L2 cache is filled by that program alone.
        long = self.rows.n * self.element.itemsize > LONG_ROW
        return self.rows.loop_tile(held=32, operands=2, most_warps=32 if long else 16)

    def us(self, target: Target) -> float:
        if self.backward:
            slower = ODD_ROWS if self.rows.unit and not self.rows.vectors else 1.0
        else:
            slower = SEVERAL_ROWS if self.tile.rows > 1 and not self.rows.across else 1.0
        return super().us(target) * slower + LOOP_US

    def unroll(self) -> int:
        most = 4 if not self.backward else 2 if self.rows.vectors else 1
        return self.rows.unroll(self.tile, most)
