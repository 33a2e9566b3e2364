"""``rows`` of softmax: a program holds whole rows in registers."""

from __future__ import annotations

from triplan.backends.triton.common.rows_entries import WholeRows
from triplan.backends.triton.softmax import rows_kernels as kernels
from triplan.backends.triton.softmax.shared import OPS, SoftmaxEntry


class SoftmaxRows(WholeRows, SoftmaxEntry, ops=OPS):
    which = (kernels.softmax_rows_kernel, kernels.softmax_backward_rows_kernel)
    longest = (32768, 16384)  # registers hold one operand (forward), or two (backward)
    narrow_above = 16384

    def narrow(self) -> bool:
        return super().narrow() and not self.backward
