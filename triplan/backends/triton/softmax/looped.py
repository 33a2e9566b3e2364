"""``looped`` of softmax: a program loops along rows of any length, twice."""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.rows_entries import LoopedRows
from triplan.backends.triton.common.tiles import Tile
from triplan.backends.triton.softmax import looped_kernels as kernels
from triplan.backends.triton.softmax.shared import OPS, SoftmaxEntry

#: Bytes of a row above which the L2 cache holds the rows of one program on each multiprocessor, not of two.
LONG_ROW = 1 << 16
#: Programs from which on they have several rows each, where neighbours are adjacent in some operands. Untuned.
ENOUGH = 128


class SoftmaxLooped(LoopedRows, SoftmaxEntry, ops=OPS):
    priority = 2

    def find_tile(self) -> Tile:
        if self.rows.crossed and self.rows.outer * self.rows.groups(self.rows.neighbours) >= ENOUGH:
            return self.rows.block_tile(crosses=True)
        if not self.backward:
            return self.rows.loop_tile(held=16)
        # A multiprocessor that has one program's rows in the L2 cache is filled by that program alone.
        long = self.rows.n * self.element.itemsize > LONG_ROW
        return self.rows.loop_tile(held=32, operands=2, most_warps=32 if long else 16)

    def main(self, unroll: int = 0) -> list[Launch]:
        """``unroll``: blocks loaded at a time; by default what ``Rows.unroll`` allows."""
        r = self.rows
        if self.backward:
            unroll = unroll or r.unroll(self.tile, 2 if r.vectors else 1)
            return [self.launch(kernels.softmax_backward_looped_kernel, UNROLL=unroll)]
        unroll, vector = unroll or r.unroll(self.tile, 4), r.vector(self.tile)
        return [self.launch(kernels.softmax_looped_kernel, UNROLL=unroll, VECTOR=vector)]
