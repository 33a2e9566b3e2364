"""``split`` of softmax: each block of a row has its own program, for few and long rows.

Where programs write blocks of several rows of which each has many, a launch of its own merges the partial results.
"""

from __future__ import annotations

from triplan.backends.triton.common.card import LAUNCH_US
from triplan.backends.triton.common.rows_entries import TurnedSplit
from triplan.backends.triton.softmax import split_kernels as kernels
from triplan.backends.triton.softmax.shared import OPS, SoftmaxEntry
from triplan.sku import Target

#: Elements of tiles of several rows that a multiprocessor has in a microsecond in both launches: forward, backward, and
#: backward of more than 16 bits. (From drawn problems on an H200.)
TURNED_PER_US = (2300.0, 1900.0, 1450.0)
#: The same, forward, of 16 bits, where the axis is contiguous in one operand and not in the other.
CROSSED_PER_US = 3600.0


class SoftmaxSplit(TurnedSplit, SoftmaxEntry, ops=OPS):
    priority, version = 1, 3
    pairs = (
        (kernels.softmax_partial_kernel, kernels.softmax_finish_kernel),
        (kernels.softmax_backward_partial_kernel, kernels.softmax_backward_finish_kernel),
    )
    merged = (kernels.softmax_merge_kernel, kernels.softmax_backward_merge_kernel)

    def us(self, target: Target) -> float:
        us, (tile, pieces) = super().us(target), self.finish()
        if tile.rows == 1:
            return us
        wide = self.element.itemsize > 2
        per_us = TURNED_PER_US[self.backward + (self.backward and wide)]
        if self.rows.crossed and not self.backward and not wide:
            per_us = CROSSED_PER_US
        busy = self.tiles_us(tile, self.rows.programs(tile, pieces), per_us, target, 0.5)
        return max(us, (3 if self.merges_apart() else 2) * LAUNCH_US + busy)

    def partials(self) -> tuple[str, ...]:
        """Maxima and sums of exponentials relative to them; backward, sums."""
        return ("totals",) if self.backward else ("tops", "totals")
