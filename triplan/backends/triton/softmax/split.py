"""``split`` of softmax: each block of a row has its own program, for few and long rows.

Where programs write blocks of several rows of which each has many, a launch of its own merges the partial results.
"""

from __future__ import annotations

from triplan.backends.triton.common.card import SECTOR
from triplan.backends.triton.common.rows import FEWEST, LONG, Rows
from triplan.backends.triton.common.rows_entries import SplitRows, rows_of
from triplan.backends.triton.softmax import split_kernels as kernels
from triplan.backends.triton.softmax.shared import OPS, SoftmaxEntry
from triplan.descriptors.base import RowsDescriptor
from triplan.sku import Target

#: How much longer than estimated the launches forward take along rows of 16 bits that begin between two vectors, as
#: threads load and store single elements. (From 14 problems on an H200.)
ODD_ROWS = 1.2


class SoftmaxSplit(SplitRows, SoftmaxEntry, ops=OPS):
    priority, version, sku_version = 1, 3, 2  # few long rows of which some operand has sectors are taken together
    turned_per_us = (2300.0, 1900.0, 1450.0)  # from drawn problems on an H200
    reduced = (kernels.softmax_partial_kernel, kernels.softmax_backward_partial_kernel)
    merged = (kernels.softmax_merge_kernel, kernels.softmax_backward_merge_kernel)
    which = (kernels.softmax_finish_kernel, kernels.softmax_backward_finish_kernel)

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
        return super().us(target) * (ODD_ROWS if odd and not self.backward else 1.0)
