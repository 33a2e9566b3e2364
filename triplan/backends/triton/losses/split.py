"""``split`` of cross_entropy: each block of a row has its own program, for few and long rows.

Without a gradient, the last launch writes losses alone.
"""

from __future__ import annotations

from triplan.backends.triton.common.rows_entries import SplitRows
from triplan.backends.triton.losses import split_kernels as kernels
from triplan.backends.triton.losses.shared import CrossEntropyEntry
from triplan.descriptors import CrossEntropyDescriptor


class CrossEntropySplit(SplitRows, CrossEntropyEntry, ops=CrossEntropyDescriptor.ops()):
    sku_version = 2  # of adjacent rows, several are taken together
    turned_per_us = (2300.0,)  # as of softmax
    reduced = (kernels.cross_entropy_partial_kernel,)
    merged = (kernels.cross_entropy_merge_kernel,)
    which = (kernels.cross_entropy_finish_kernel,)

    def partials(self) -> tuple[str, ...]:
        """Maxima; sums of exponentials relative to them; with label smoothing, sums of weighted logits."""
        return ("tops", "totals", "plains") if self.smoothing else ("tops", "totals")

    def arrays(self) -> dict[str, int]:
        return super().arrays() | {"mines": self.rows.count}  # logits of the targets, one a row
