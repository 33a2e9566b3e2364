"""``rows`` of softmax: a program holds whole rows in registers."""

from __future__ import annotations

from typing import Any

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.rows_entries import WholeRows
from triplan.backends.triton.softmax import rows_kernels as kernels
from triplan.backends.triton.softmax.shared import OPS, SoftmaxEntry
from triplan.descriptors.softmax import AnySoftmaxDescriptor

#: Parts into which a tile is divided where rows begin anywhere; those that hold no element of a row are left out. A row
#: of 65 then has five parts of 16 elements, in place of 128: no lane is idle but in the last, and a warp exchanges two
#: rows at a time.
PARTS = 8


class SoftmaxRows(WholeRows, SoftmaxEntry, ops=OPS):
    which = (kernels.softmax_rows_kernel, kernels.softmax_backward_rows_kernel)
    longest = (32768, 16384)  # registers hold one operand (forward), or two (backward)
    narrow_above = 16384

    def __init__(self, desc: AnySoftmaxDescriptor) -> None:
        super().__init__(desc)
        block = self.tile.block
        divided = self.rows.begins_anywhere(block)
        #: Elements of a part of a row, and the parts that a row has.
        self.part = block // PARTS if divided else block
        self.parts = max(-(-self.rows.n // self.part), 1)
        self.version = 3 if divided else 2

    def narrow(self) -> bool:
        return super().narrow() and not self.backward

    def launch(self, *args: Any, **how: Any) -> Launch:
        return super().launch(*args, **{**how, "PIECES": self.parts, "BLOCK": self.part})
