"""``rows`` of softmax: a program holds whole rows in registers."""

from __future__ import annotations

from typing import Any

from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.common.rows import Rows
from triplan.backends.triton.common.rows_entries import MOST_NARROW, WholeRows, rows_of
from triplan.backends.triton.common.tiles import Tile, registers_for
from triplan.backends.triton.softmax import rows_kernels as kernels
from triplan.backends.triton.softmax.shared import OPS, SoftmaxEntry
from triplan.descriptors.base import RowsDescriptor
from triplan.descriptors.softmax import AnySoftmaxDescriptor
from triplan.sku import ElementKind, Target

#: Parts into which a tile is divided where rows begin anywhere; those that hold no element of a row are left out. A row
#: of 65 then has five parts of 16 elements, in place of 128: no lane is idle but in the last, and a warp exchanges two
#: rows at a time, of shorter ones more.
PARTS = 8
#: Elements of a part at least, at most, and at most of f64; of a long tile an eighth. Each part is stored by itself, so
#: that shorter ones write each sector in several pieces. And what longer parts may pad a row to, relative to the
#: shortest: then idle lanes cost more. (Rows of 9 to 31 elements on an H200, by a run that is not
#: published, as the next two.)
LEAST_PART, MOST_PART, F64_PART, PADDED = 4, 16, 8, 1.25
#: The shortest tile that is divided; and elements of a program that has several rows, and its warps: with fewer it took
#: longer on an H100. (As many of rows where neighbours are adjacent in no operand. Untuned.) Of f64 a thread has one
#: element of each part.
DIVIDED_FROM, SEVERAL, SEVERAL_WARPS = 16, 1024, 4
#: Bytes of compute elements up to which a thread has whole rows, a vector of neighbours, where these lie side by side;
#: and bytes that such a program loads at least, if it has few warps: smaller ones leave memory idle.
MOST_BESIDE, SHORT_BYTES = 256, 4096
#: Elements of a row and its neighbours up to which programs go on to the next ones: half of SEVERAL. Neighbours that
#: fill more of a tile are faster by themselves.
FEW_AMONG = 512
#: Time of long rows that leave a quarter or more of the lanes empty, relative to the estimate, forward, backward, and
#: backward of log_softmax: if there are more rows than multiprocessors. And the shortest tile of such rows. From drawn
#: problems on an H200.
IDLE, IDLE_FROM = (1.07, 1.03, 1.15), 8192
#: Elements of 16 bits that a multiprocessor has in a microsecond forward, of rows that threads load one by one, by the
#: length of the tile: two programs of the shorter one are resident, and one of the longer. From drawn problems on an
#: H200.
ODD_PER_US = {16384: 5700.0, 32768: 4050.0}
#: Microseconds of the reductions forward, for each further row that a thread has of a part: lanes exchange each row's
#: maximum, and then its sum. (The estimate of the backward, which has one reduction, is long enough without.) From
#: drawn problems on an H200.
EXCHANGE_US = 0.13
#: Microseconds of the exponentials of f64 forward, for each part of a row: a thread takes one after another. From drawn
#: problems on an H200.
F64_PART_US = 0.05
#: Elements of f64 that a multiprocessor has in a microsecond forward, of the longest tile, if it has more than two such
#: programs. And bytes that one program backward moves in a microsecond if it is alone, and loads vectors. (From drawn
#: problems on an H200, as the next ones.)
LONGEST_F64, F64_PER_US, LONE_BYTES_PER_US = 8192, 1100.0, 1e5
#: Of tiles whose rows are adjacent in some operands alone: elements that a program alone exchanges in a microsecond, of
#: rows that there are not, too, and elements of a multiprocessor in one; each forward and backward.
CROSSED_EACH, CROSSED_PER_US = (4300.0, 3000.0), (3400.0, 2600.0)
#: Elements of such a tile at most, forward and backward: of larger ones, with as many a thread, fewer are resident.
CROSSED_TILE = (2048, 4096)


class SoftmaxRows(WholeRows, SoftmaxEntry, ops=OPS):
    sku_version = 7  # other parts of short odd rows
    which = (kernels.softmax_rows_kernel, kernels.softmax_backward_rows_kernel)
    longest = (32768, 16384)  # registers hold one operand (forward), or two (backward)
    narrow_above = (16384, MOST_NARROW)
    program_us = 1.0

    def __init__(self, desc: AnySoftmaxDescriptor) -> None:
        super().__init__(desc)
        #: Elements of a part of a row.
        self.part = self.find_part() if self.divided() else self.tile.block
        if self.divided():
            self.version = 9 if self.part > self.tile.block // PARTS else 4

    def find_rows(self, desc: RowsDescriptor) -> Rows:
        """Rows that lie among others are numbered row-major: those of a program then share sectors of memory. (Where no
        operand has the others adjacent, that was slower on an H200.) So are those that have few neighbours."""
        found = super().find_rows(desc)
        return rows_of(desc, flat=True) if found.scattered() or found.among_few(FEW_AMONG) else found

    def divided(self) -> bool:
        return self.rows.begins_anywhere(ceil_power(self.rows.n), DIVIDED_FROM)

    def find_part(self) -> int:
        """Elements of a part of a row that is divided."""
        n, part = self.rows.n, LEAST_PART
        most = min(F64_PART if self.element is ElementKind.F64 else MOST_PART, ceil_power(n) // 2)
        while part < most and -(-n // (2 * part)) * 2 * part <= PADDED * (-(-n // LEAST_PART) * LEAST_PART):
            part *= 2
        return max(part, ceil_power(n) // PARTS)

    def find_tile(self) -> Tile | None:
        r, block = self.rows, ceil_power(self.rows.n)
        if self.divided() and block <= SEVERAL and self.element is ElementKind.F64:
            return Tile(32 * SEVERAL_WARPS // self.find_part(), block, SEVERAL_WARPS)
        if (self.divided() and block <= SEVERAL) or (r.is_strided() and block <= SEVERAL // 2):
            return Tile(SEVERAL // block, block, SEVERAL_WARPS)
        if found := self.few_rows(block):
            return found
        if r.unit and block < DIVIDED_FROM:
            # As many rows as threads: with more, a thread's masked loads would wait for each other.
            return Tile(32 * SEVERAL_WARPS, block, SEVERAL_WARPS)
        vector, size = 16 // self.element.itemsize, self.element.compute.itemsize
        if r.across and vector * block * size <= MOST_BESIDE:
            warps = min(max(SHORT_BYTES // (32 * 16 * block), 1), SEVERAL_WARPS)
            rows = 32 * vector * warps
            if rows <= 2 * r.lanes:
                return Tile(rows, block, warps if r.lanes % vector == 0 else min(rows // 32, SEVERAL_WARPS))
        tile, most = super().find_tile(), CROSSED_TILE[self.backward]
        if r.crossed and tile is not None and tile.rows > 1 and (held := tile.rows * block) > most:
            return Tile(most // block, block, tile.warps * most // held)
        return tile

    def most_registers(self) -> int:
        few = self.tile == self.few_rows(self.tile.block)
        return registers_for(self.tile, 1) if few else super().most_registers()

    def us(self, target: Target) -> float:
        us, tile = super().us(target), self.tile
        if self.rows.crossed and tile.rows == 1 and self.rows.lanes * self.element.itemsize <= card.LINE_BYTES:
            # Programs of all rows that share a line run at a time, and find its sectors in the L2 cache.
            often = 1.0 + (self.rows.sectors(1) - 1.0) * card.BYTES_PER_US / card.L2_BYTES_PER_US
            us = self.reducing_us(self.programs(), often * sum(self.traffic()), target)
        if self.divided():
            us = max(us, self.parts_us())
        if not self.backward and (self.divided() or self.turns()):
            lanes = self.part // min(self.rows.vector_bytes(self.rows.operands[0]) // self.element.itemsize, self.part)
            rows = tile.rows * min(lanes, 32) / (32 * tile.warps)  # of a thread
            us += EXCHANGE_US * max(rows - 1, 0.0)
        if not self.backward and self.divided() and self.element is ElementKind.F64:
            us += F64_PART_US * self.pieces()
        single = self.element.itemsize == 2 and self.rows.unit and self.rows.together == 1
        if not self.backward and single and tile.block in ODD_PER_US:
            us = max(us, self.rows.n * self.rows.count / target.sm_count / ODD_PER_US[tile.block])
        full = self.programs() > target.sm_count
        if self.backward and self.rows.vectors and tile.rows == 1 and not full:
            nbytes = sum(self.traffic())
            us = max(self.programs() * nbytes / card.BYTES_PER_US, nbytes / LONE_BYTES_PER_US)
        many = self.programs() > 2 * target.sm_count
        if many and self.element is ElementKind.F64 and not self.backward and tile.block == LONGEST_F64:
            us = max(us, tile.block * self.rows.count / target.sm_count / F64_PER_US)
        if full and self.rows.vectors and tile.block >= IDLE_FROM and 4 * self.rows.n <= 3 * tile.block:
            us *= IDLE[self.backward * (1 + self.desc.op.startswith("log_"))]
        if self.rows.is_strided() and tile.rows == 1:
            resident = max(card.SM_WARPS // tile.warps, 1) * target.sm_count
            return max(us, -(-self.programs() // resident) * self.gapped_us())
        if not self.rows.crossed or tile.rows == 1:
            return us
        alone = tile.rows * tile.block / CROSSED_EACH[self.backward]
        return max(us, alone, self.tiles_us(tile, self.programs(), CROSSED_PER_US[self.backward], target, 0.0))

    def pieces(self) -> int:
        """Parts of a row that hold elements."""
        return max(-(-self.rows.n // self.part), 1)

    def parts_us(self) -> float:
        """Microseconds of rows in parts. Each part is stored by itself, and so the L2 cache takes each of its sectors,
        also those that it shares with others. What is read is shared in the L1 cache."""
        size, row = self.element.itemsize, self.rows.n * self.element.itemsize
        stored = self.pieces() * (self.part * size + card.SECTOR - size)  # on average
        read = row * (len(self.moved) - 1) / card.BYTES_PER_US
        return self.rows.count * (read + stored / card.L2_BYTES_PER_US)

    def constants(self) -> dict[str, Any]:
        return {**super().constants(), "PIECES": self.pieces(), "BLOCK": self.part}
