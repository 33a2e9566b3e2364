"""``rows`` of softmax: a program holds whole rows in registers."""

from __future__ import annotations

from typing import Any

from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.common.rows_entries import MOST_NARROW, WholeRows
from triplan.backends.triton.common.tiles import Tile
from triplan.backends.triton.softmax import rows_kernels as kernels
from triplan.backends.triton.softmax.shared import OPS, SoftmaxEntry
from triplan.descriptors.softmax import AnySoftmaxDescriptor

#: Parts into which a tile is divided where rows begin anywhere; those that hold no element of a row are left out. A row
#: of 65 then has five parts of 16 elements, in place of 128: no lane is idle but in the last, and a warp exchanges two
#: rows at a time, of shorter ones more.
PARTS = 8
#: The shortest tile that is divided; and elements of a program that has several rows, and its warps: with fewer it took
#: longer on an H100.
DIVIDED_FROM, SEVERAL, SEVERAL_WARPS = 16, 1024, 4


class SoftmaxRows(WholeRows, SoftmaxEntry, ops=OPS):
    which = (kernels.softmax_rows_kernel, kernels.softmax_backward_rows_kernel)
    longest = (32768, 16384)  # registers hold one operand (forward), or two (backward)
    narrow_above = (16384, MOST_NARROW)

    def __init__(self, desc: AnySoftmaxDescriptor) -> None:
        super().__init__(desc)
        divided = self.divided()
        #: Elements of a part of a row.
        self.part = self.tile.block // PARTS if divided else self.tile.block
        self.version = 4 if divided else 2

    def divided(self) -> bool:
        return self.rows.begins_anywhere(ceil_power(self.rows.n), DIVIDED_FROM)

    def find_tile(self) -> Tile | None:
        block = ceil_power(self.rows.n)
        if self.divided() and block <= SEVERAL:
            return Tile(SEVERAL // block, block, SEVERAL_WARPS)
        return super().find_tile()

    def constants(self) -> dict[str, Any]:
        return {**super().constants(), "PIECES": max(-(-self.rows.n // self.part), 1), "BLOCK": self.part}
