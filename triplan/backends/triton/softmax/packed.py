"""``packed`` of softmax: programs access consecutive elements of short packed rows, and each thread gets a row."""

from __future__ import annotations

from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.common.rows_entries import WholeRows
from triplan.backends.triton.common.tiles import Tile
from triplan.backends.triton.softmax import packed_kernels as kernels
from triplan.backends.triton.softmax.shared import OPS, SoftmaxEntry
from triplan.sku import Support, Target

#: The shortest and the longest tile of a row; longer ones are untuned.
SHORTEST, LONGEST = 16, 32
#: Warps of a program, which has a row for each thread.
WARPS = 4
#: Microseconds that a program takes for each element of a row, forward and backward: a thread has them one after
#: another. From drawn problems on an H200.
EACH_US = (0.03, 0.06)


class SoftmaxPacked(WholeRows, SoftmaxEntry, ops=OPS):
    """Rows that begin between two vectors. Where there are few, the parallel lanes of ``rows`` are sooner done."""

    name, priority = "packed", -1
    version = 6
    which = (kernels.softmax_packed_kernel, kernels.softmax_backward_packed_kernel)
    program_us = 1.0

    def find_tile(self) -> Tile | None:
        r, block = self.rows, ceil_power(self.rows.n)
        packed = r.unit and all(o.layout.packed for o in r.operands)
        found = packed and r.n % 2 == 1 and SHORTEST <= block <= LONGEST
        return Tile(32 * WARPS, block, WARPS) if found else None

    def supports(self, target: Target) -> Support:
        if self.own_tile is None:
            return Support.no(f"rows are not packed, or no odd number of {SHORTEST // 2} to {LONGEST} elements")
        return super().supports(target)

    def us(self, target: Target) -> float:
        return super().us(target) + EACH_US[self.backward] * self.rows.n
