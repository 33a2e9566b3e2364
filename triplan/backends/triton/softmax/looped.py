"""``looped`` of softmax: a program loops along rows of any length, twice."""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.rows import Tile
from triplan.backends.triton.common.rows_entries import LoopedRows, is_backward
from triplan.backends.triton.softmax import looped_kernels as kernels
from triplan.backends.triton.softmax.shared import OPS, SoftmaxEntry
from triplan.descriptors.softmax import AnySoftmaxDescriptor

#: Bytes of a row above which the L2 cache holds the rows of one program on each multiprocessor, not of two.
LONG_ROW = 1 << 16


class SoftmaxLooped(LoopedRows[AnySoftmaxDescriptor], SoftmaxEntry):
    priority = 2

    def tile(self, desc: AnySoftmaxDescriptor) -> Tile:
        r = self.rows(desc)
        if not is_backward(desc):
            return r.loop_tile(desc.element, held=16)
        # A multiprocessor that has one program's rows in the L2 cache is filled by that program alone.
        long = r.n * desc.element.itemsize > LONG_ROW
        return r.loop_tile(desc.element, held=32, operands=2, most_warps=32 if long else 16)

    def main(self, desc: AnySoftmaxDescriptor, tile: Tile, unroll: int = 0) -> list[Launch]:
        """``unroll``: blocks loaded at a time; by default what ``Rows.unroll`` allows."""
        r, grid = self.rows(desc), self.programs(desc, tile)
        if is_backward(desc):
            unroll = unroll or r.unroll(tile, 2 if r.vectors else 1)
            return [self.launch(desc, kernels.softmax_backward_looped_kernel, grid, tile, UNROLL=unroll)]
        unroll, vector = unroll or r.unroll(tile, 4), r.vector(desc.element, tile)
        return [self.launch(desc, kernels.softmax_looped_kernel, grid, tile, UNROLL=unroll, VECTOR=vector)]


LOOPED = SoftmaxLooped()
LOOPED.register(*OPS)
