"""``split`` of softmax: each block of a row has its own program, for few and long rows.

Where programs write blocks of several rows of which each has many, a launch of its own merges the partial results.
"""

from __future__ import annotations

from triplan.backends.triton.common.card import SECTOR
from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.common.rows import FEWEST, LONG, Rows
from triplan.backends.triton.common.rows_entries import F64_SLOWDOWN, MOST_MERGED, SplitRows, rows_of
from triplan.backends.triton.softmax import split_kernels as kernels
from triplan.backends.triton.softmax.shared import OPS, SoftmaxEntry
from triplan.descriptors.base import RowsDescriptor
from triplan.descriptors.softmax import AnySoftmaxDescriptor
from triplan.sku import ElementKind, Target

#: How much longer than estimated the launches forward take along rows of 16 bits that begin between two vectors, as
#: threads load and store single elements. (From 14 problems on an H200.)
ODD_ROWS = 1.2
#: Elements of 16 bits that a multiprocessor has in a microsecond forward, in both launches, of tiles of several rows,
#: beside merging; but if a program of the first has so many elements of one row, its warps wait for each other, and it
#: is as of more bits. (This and what follows: from drawn problems on an H200. Among them were too few of neighbours
#: that are adjacent in every operand and accessed by vectors: these keep the rate of more bits, merging included.)
NARROW_PER_US, LONE_BLOCK = 3000.0, 4096
#: ``turned_per_us`` backward of 16 bits where all operands but one at most are accessed by vectors.
VECTORS_PER_US = 2500.0
#: F64_SLOWDOWN backward without an exponential, and where neighbours are adjacent in all operands.
F64_BACKWARD = (2.0, 2.2)
#: Elements of f64 that a multiprocessor has in a microsecond forward, also beyond the ends of rows, if the last launch
#: alone has tiles of more rows.
F64_PER_US = 600.0
#: Elements that a program has in a microsecond forward, in both launches, of tiles of several rows that are
#: exchanged between threads, if it is alone on a multiprocessor.
ALONE_PER_US = 2000.0
#: Partial results that a multiprocessor merges in a microsecond forward, each with an exponential, if a program has
#: more than half of MOST_MERGED: of 16 bits, and of f64. Fewer were hidden behind loads.
MERGED_PER_US, F64_MERGED_PER_US = 2800.0, 920.0


class SoftmaxSplit(SplitRows, SoftmaxEntry, ops=OPS):
    priority, version, sku_version = 1, 3, 2  # few long rows of which some operand has sectors are taken together
    turned_per_us = (2300.0, 1900.0, 1450.0)  # from drawn problems on an H200
    reduced = (kernels.softmax_partial_kernel, kernels.softmax_backward_partial_kernel)
    merged = (kernels.softmax_merge_kernel, kernels.softmax_backward_merge_kernel)
    which = (kernels.softmax_finish_kernel, kernels.softmax_backward_finish_kernel)

    def __init__(self, desc: AnySoftmaxDescriptor) -> None:
        super().__init__(desc)
        forward, backward, wide = self.turned_per_us
        first, r = self.tiles[0], self.rows
        apart = r.crossed or any(r.vector_bytes(o) < 16 for o in r.operands)
        #: Whether it is known how much of the time is merging.
        self.narrow = apart and self.element.itemsize == 2 and (first.rows > 1 or first.block < LONE_BLOCK)
        if self.narrow:
            forward = NARROW_PER_US
        if self.by_vectors():
            backward = VECTORS_PER_US
        if self.element is ElementKind.F64 and desc.op == "softmax_backward":
            wide *= F64_SLOWDOWN / F64_BACKWARD[r.across]  # (memory is the limit)
        self.turned_per_us = (forward, backward, wide)

    def find_rows(self, desc: RowsDescriptor) -> Rows:
        """Few neighbours of long rows are taken together if they fill half a sector: the parts of a sector that the
        programs of single rows write would each take as long as all of it."""
        half, found = SECTOR // 2 // desc.element.itemsize, super().find_rows(desc)
        return rows_of(desc, fewest=half) if found.n * desc.element.itemsize > LONG and half < FEWEST else found

    def partials(self) -> tuple[str, ...]:
        """Maxima and sums of exponentials relative to them; backward, sums."""
        return ("totals",) if self.backward else ("tops", "totals")

    def us(self, target: Target) -> float:
        odd = self.rows.unit and not self.rows.vectors and self.element.itemsize == 2
        us, (first, last) = super().us(target), self.tiles
        if self.backward:
            return us
        if self.rows.crossed and first.rows > 1:
            us = max(us, first.rows * first.block / ALONE_PER_US)
        if self.element is ElementKind.F64 and first.rows == 1 and last.rows > 1:
            us = max(us, self.blocks() * first.block * self.rows.count / target.sm_count / F64_PER_US)
        merged = last.rows * ceil_power(self.blocks())  # also of rows that a tile lacks
        f64 = self.element is ElementKind.F64
        if (self.narrow or f64) and last.rows > 1 and MOST_MERGED // 2 < merged <= MOST_MERGED:
            per_us = F64_MERGED_PER_US if f64 else MERGED_PER_US
            us += self.rows.programs(*self.finish()) / target.sm_count * merged / per_us
        return us * (ODD_ROWS if odd else 1.0)
