"""``split`` of softmax: each block of a row has its own program, for few and long rows."""

from __future__ import annotations

from triplan.backends.triton.common.rows_entries import TurnedSplit
from triplan.backends.triton.softmax import split_kernels as kernels
from triplan.backends.triton.softmax.shared import OPS, SoftmaxEntry


class SoftmaxSplit(TurnedSplit, SoftmaxEntry, ops=OPS):
    priority, version = 1, 3
    pairs = (
        (kernels.softmax_partial_kernel, kernels.softmax_finish_kernel),
        (kernels.softmax_backward_partial_kernel, kernels.softmax_backward_finish_kernel),
    )

    def partials(self) -> tuple[str, ...]:
        """Maxima and sums of exponentials relative to them; backward, sums."""
        return ("totals",) if self.backward else ("tops", "totals")
