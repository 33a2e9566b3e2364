"""``split`` of softmax: each block of a row has its own program, for few and long rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triplan.backends.triton.common.rows import Tile
from triplan.backends.triton.common.rows_entries import SplitRows, is_backward
from triplan.backends.triton.softmax import split_kernels as kernels
from triplan.backends.triton.softmax.shared import OPS, SoftmaxEntry
from triplan.descriptors.softmax import AnySoftmaxDescriptor


class SoftmaxSplit(SplitRows[AnySoftmaxDescriptor], SoftmaxEntry):
    priority = 1

    def tile(self, desc: AnySoftmaxDescriptor) -> Tile:
        return self.rows(desc).block_tile(desc.element, 2 if is_backward(desc) else 1, alone=True)

    def partials(self, desc: AnySoftmaxDescriptor) -> Sequence[str]:
        """Maxima and sums of exponentials relative to them; backward, sums."""
        if self.rows(desc).n == 0:
            return ()
        return ("totals",) if is_backward(desc) else ("tops", "totals")

    def kernels(self, desc: AnySoftmaxDescriptor) -> tuple[Any, Any]:
        if is_backward(desc):
            return kernels.softmax_backward_partial_kernel, kernels.softmax_backward_finish_kernel
        return kernels.softmax_partial_kernel, kernels.softmax_finish_kernel


SPLIT = SoftmaxSplit()
SPLIT.register(*OPS)
