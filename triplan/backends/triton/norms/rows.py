"""``rows`` of the norms: a program holds whole rows in registers.

Backward, programs stay for several groups of rows, and accumulate the gradients of weight and bias meanwhile.
"""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.common.rows_entries import WholeRows
from triplan.backends.triton.common.tiles import Tile, registers_for, waves_us
from triplan.backends.triton.norms import rows_kernels as kernels
from triplan.backends.triton.norms.shared import CENTRED, FEW_GROUPS, OPS, NormEntry
from triplan.descriptors.norms import NormDescriptor
from triplan.sku import ElementKind, Target

#: Elements of a row from which on forward programs of 16-bit elements have fewer warps: these wait less for each other.
LONG = 8192
#: Elements of a tile backward where each has an address of its own: 16 warps, as few loads of each are on their way.
GAPPED = 4096
#: Elements a microsecond backward, bound by instructions, where no vectors are loaded: of 16 bits in tiles of at most
#: FEW_ROWS rows, in others; of f32, and of f64. (From drawn problems on an H200.)
FEW_ROWS, SINGLE_PER_US = 4, (3.7e5, 3e5, 2e5, 1.2e5)
#: Microseconds of reducing a gradient's sums through shared memory, between the warps that have rows of their own, at a
#: program's end: of a sum of a warp, where vectors are loaded; and elsewhere of more than 4 and 8 rows and 4 warps.
REDUCE_US, SINGLE_REDUCE_US = 0.0011, (1.0, 2.0)
#: Microseconds that an element of a thread takes where no vectors are loaded: forward in short rows, and with two sums
#: and a weight, of two operands; backward, where a thread has more than FEW_EACH.
ELEMENT_US, BACKWARD_ELEMENT_US, FEW_EACH = (0.02, 0.05), 0.1, 8
#: Microseconds, for each of its warps, in which a forward program exchanges a tile where rows are crossed.
CROSSED_WARP_US = 0.08
#: How many times as long backward tiles of several rows take that are exchanged between threads, as rows are adjacent
#: in some operands alone, if programs have more than one. (From drawn problems on an H200.)
CROSSED = 1.6
#: ``ELEMENT_US`` forward in tiles of more than 8 rows of odd lengths, of which each element is loaded by itself.
ODD_ELEMENT_US = 0.045
#: ``ELEMENT_US`` forward where rows are crossed, and with a weight and one sum. (From drawn problems on an H200.)
SHORT_ELEMENT_US = 0.01
#: Elements of 16 bits that a multiprocessor has in a microsecond forward, of long rows that threads load one by one, as
#: one such program is resident; and the shortest tile of these. (From drawn problems on an H200.)
ODD_PER_US, ODD_FROM = 3600.0, 16384
#: How much longer than estimated rows take of which a fifth of the lanes or more has no element, where there are enough
#: to be bound by memory: forward of centred ones in IDLE_WARPS warps, of which a multiprocessor has two programs, that
#: wait for two sums; and backward of 16 bits in tiles of several rows of at most IDLE_BLOCK elements. (From drawn
#: problems on an H200.)
IDLE, IDLE_WARPS, IDLE_BLOCK = (1.2, 1.15), 16, 2048
#: Backward, where no vectors are loaded, so many threads share a row that each has EACH elements at most, or half as
#: many while few share it: no lane is idle but in a row's last piece, and rows of few threads are summed within a warp.
DIVIDED_FROM, EACH, FEW_LANES = 16, 16, (8, 16)
#: Warps of such a program, and elements of a thread, of whole rows, up to which it has several: with gradients of
#: weight and bias, in tiles of up to SHORT elements and in longer ones; and without. (Sums over the rows of many warps,
#: of a column each, conflict in shared memory.)
SHORT, WARPS, SEVERAL = 128, (16, 8, 4), (16, 32, 16)
#: Parts into which tiles of one row are divided forward, of which those that hold no element are left out, and the
#: shortest such tile; and parts of a row, of one operand, up to which three programs of 16 warps do not spill. Untuned.
PARTS, PARTED_FROM, FEW_PARTS = 8, 2048, 5
#: Elements of such a tile at most whose weights are loaded at once: those of longer ones leave no registers.
AT_ONCE = 8192
#: Part of a thread's registers that its elements may take.
HELD = 2 / 3
#: Of such programs, elements a microsecond: of 16 bits with gradients of weight or bias, of 16 bits without, of f32, of
#: f64. And microseconds of an element of a thread. (These and what follows: from drawn problems on an H200.)
DIVIDED_PER_US, DIVIDED_ELEMENT_US = (3.7e5, 6e5, 3.2e5, 2e5), 0.02
#: Microseconds of a sum at such a program's end. It takes twice as long where its warps, times those of them that have
#: rows of their own, are SUMS_CONFLICT.
SUMS_US, SUMS_CONFLICT = 0.02, 24


class NormRows(WholeRows, NormEntry, ops=OPS):
    longest = (16384, 8192)  # registers hold x forward, and backward also dout, weight and two sums
    #: Backward as many bytes as of long rows: two such programs on a multiprocessor, with the next rows on their way,
    #: keep memory busy.
    held = (4096, 16384)
    few_warps = (False, False)  # not tuned for norms, which keep a row for a second pass
    versions, sku_version = (2, 5), 3  # forward, parts of a row without elements are left out

    def __init__(self, desc: NormDescriptor) -> None:
        super().__init__(desc)
        if self.divided():
            self.version = 6
        else:
            parts = PARTS if self.leaves_idle() else 1
            self.piece, self.version = self.tile.block // parts, 6 if parts > 1 else self.version

    def divided(self) -> bool:
        return self.backward and self.rows.begins_anywhere(ceil_power(self.rows.n), DIVIDED_FROM)

    def leaves_idle(self) -> bool:
        """Whether a tile of one row forward, which may begin anywhere, has parts without any element. (Triton takes
        loads of fewer elements than threads for cheap: then each thread may load a whole part.)"""
        tile, fits = self.tile, PARTS * self.rows.n <= (PARTS - 1) * self.tile.block
        whole = not self.backward and tile.rows == 1 and tile.block >= PARTS * 32 * tile.warps
        return fits and whole and self.rows.begins_anywhere(tile.block, PARTED_FROM)

    def pieces(self) -> int:
        return max(-(-self.rows.n // self.piece), 1)

    def divided_tile(self) -> Tile | None:
        block, together = ceil_power(self.rows.n), self.rows.together
        few, several = FEW_LANES
        #: Threads that share a row; elements of a piece of it, and those that a thread has of the row.
        self.lanes = min(max(block // EACH, min(2 * block // EACH, several), few), block // together)
        self.piece = self.lanes * together
        self.each_of_row = self.pieces() * together
        how = 2 if not self.gradients else int(block > SHORT)
        warps, several = max(WARPS[how], self.lanes // 32), max(SEVERAL[how] // ceil_power(self.each_of_row), 1)
        halves = [several >> i for i in range(several.bit_length())]
        tiles = [Tile(count * (32 * warps // self.lanes), block, warps) for count in halves]
        return next((tile for more in (self.residual, False) for tile in tiles if self.fits(tile, more)), None)

    def fits(self, tile: Tile, more: bool) -> bool:
        """Whether registers hold of each row dout, x and the gradients' sums, and with ``more`` dsummed and where it
        lies; and the weights."""
        several = tile.rows * self.lanes // (32 * tile.warps)
        held = self.each_of_row * ((2 + len(self.gradients) + more) * several + 1) * self.compute.itemsize // 4
        return held + (2 * several if more else 0) <= HELD * registers_for(tile, 1)

    def find_tile(self) -> Tile | None:
        if self.divided():
            return self.divided_tile()
        r, tile, narrow = self.rows, super().find_tile(), self.element.itemsize == 2
        if tile is not None and self.backward:
            # Weights shared by rows of several warps come through shared memory; with two sums registers run out.
            crowded = self.centred and narrow and (tile.block == 1024 if r.vectors else tile.block > 256)
            rows = max(tile.rows // 2, 1) if r.across or crowded else tile.rows
            if r.is_strided():
                rows = max(GAPPED // tile.block, 1)
            each = 32 * (4 if self.element is ElementKind.F64 else 32 if tile.block > 256 and r.vectors else 8)
            return Tile(rows, tile.block, min(max(rows * tile.block // each, 1), 16))
        if tile is not None and narrow and tile.block >= LONG:
            return Tile(1, tile.block, tile.block // 1024)
        if tile is not None and narrow and self.centred and r.unit and tile.block <= 512:
            return Tile(4096 // tile.block, tile.block, 4)  # converts vectors of weight and bias once for four rows
        return tile

    def partials_tile(self) -> Tile:
        return self.tile

    def us(self, target: Target) -> float:
        r, tile = self.rows, self.tile
        each = 0.0 if r.vectors else tile.rows * tile.block / (32 * tile.warps)
        if not self.backward:
            odd = r.n % 2 and tile.rows > 8 and not r.crossed
            short = r.crossed or (self.weighted() and not self.centred)
            element_us = ELEMENT_US[self.centred and self.weighted()]
            each *= SHORT_ELEMENT_US if short else max(ODD_ELEMENT_US if odd else 0.0, element_us)
            each *= len(self.moved) / 2 if r.crossed else 1.0
            crossed = CROSSED_WARP_US * tile.warps if r.crossed else 0.0
            us = super().us(target) + (each + crossed if tile.rows > 1 else 0.0)
            if r.begins_alike() and tile.block >= ODD_FROM and r.count > target.sm_count:
                us = max(us, r.n * r.count / target.sm_count / ODD_PER_US)
            waits = self.centred and tile.warps >= IDLE_WARPS and self.programs() > target.sm_count
            return us * (IDLE[False] if waits and r.vectors and 5 * r.n <= 4 * tile.block else 1.0)
        us = waves_us(self.sums, self.each * tile.rows * sum(self.traffic()) * r.sectors(tile.rows), target)
        wide, held = self.element.itemsize // 4, self.pieces() * self.piece
        if self.divided():
            us = max(us, r.count * held / DIVIDED_PER_US[wide + 1 if wide else not self.gradients])
            each *= held / tile.block
            beside = min(max(tile.warps * 32 // self.lanes, 1), tile.warps)  # warps that have own rows
            sums = len(self.gradients) * self.pieces() * (1 + tile.warps * beside / SUMS_CONFLICT)
            return us + DIVIDED_ELEMENT_US * each + SUMS_US * sums
        if not r.vectors:
            # Those of the busiest multiprocessor, of whose last tile rows that there are not cost nothing.
            elements = -(-self.sums // target.sm_count) * self.each * min(tile.rows, r.count) * held
            exchanges = r.crossed and tile.rows > 1 and self.each > 1
            slower = CROSSED * (CENTRED if self.centred else 1.0) if exchanges else 1.0
            us = max(us, slower * elements * card.SMS / SINGLE_PER_US[wide + 1 if wide else tile.rows > FEW_ROWS])
        elif 5 * r.n <= 4 * tile.block and self.element.itemsize == 2 and tile.block <= IDLE_BLOCK:
            us *= IDLE[True]
        reduced = SINGLE_REDUCE_US[tile.rows > 8] if tile.rows > 4 and tile.warps > 4 else 0.0
        if r.vectors:
            beside = min(32 * tile.warps * r.vector(tile) // tile.block, tile.warps, tile.rows)
            reduced = REDUCE_US * max(beside - 1, 0) * tile.block
        few = each <= FEW_EACH and (r.unit or r.crossed)
        # Of 16 warps whose threads hold addresses one program is resident: none hides what the next one waits for.
        groups = -(-self.sums // target.sm_count) * self.each if r.is_strided() else 1
        return us + (0.0 if few else BACKWARD_ELEMENT_US * each * groups) + reduced * len(self.gradients)

    def stages(self) -> int:
        """How far backward programs fetch ahead. With 3, two groups of rows are in registers or on their way, with
        fewer one. A program of few groups only executes the instructions of fetching ahead, which are many where each
        element is fetched by itself."""
        return 1 if self.each <= FEW_GROUPS or self.divided() else 3 if self.rows.vectors else 2

    def main(self) -> list[Launch]:
        r, tile = self.rows, self.tile
        if not self.backward and self.piece < tile.block:
            count, narrow = self.pieces(), self.element.itemsize == 2
            # Programs that are resident without spills.
            two = narrow and not (self.centred and count == PARTS - 1)
            programs = (2 if two else 1) if self.residual else 3 if count <= FEW_PARTS else 2
            most = registers_for(tile, programs)
            which, together = kernels.norm_parted_kernel, count if tile.block <= AT_ONCE else 1
            return [self.launch(which, registers=most, PIECES=count, BLOCK=self.piece, TOGETHER=together)]
        if not self.backward:
            # Rows of which a program's threads hold one vector each; all rows, where no vectors are loaded.
            abreast = max(32 * tile.warps * r.vector(tile) // tile.block, 1) if r.vectors else tile.rows
            full, once = r.n == tile.block, self.mean_is_one_sum
            return [self.launch(kernels.norm_rows_kernel, FULL=full, ABREAST=min(abreast, tile.rows), ADDS_UP=once)]
        # Where a warp holds whole rows of vectors, and two sums, a program takes more than half of the registers, but
        # so few more that ptxas, left alone, may spill to fit a second program; so it may where there is no second one.
        # (In f32 and f64 the lone program is the binary of many.)
        fits_once = self.element is ElementKind.F32 and tile.block <= 128 and r.vectors and len(self.gradients) == 2
        lone = bool(self.gradients) and self.sums == 1 and self.element.itemsize == 2
        most = registers_for(tile, 1) if fits_once or lone else 0
        which, count, piece, stages = kernels.norm_backward_rows_kernel, self.pieces(), self.piece, self.stages()
        ahead = self.divided() and self.residual and self.fits(tile, True)
        return [self.launch(which, self.sums, registers=most, PIECES=count, BLOCK=piece, STAGES=stages, AHEAD=ahead)]
