"""Kernel ``looped`` of scans: a program loops over the blocks of rows of any length, and carries the result so far."""

from __future__ import annotations

from triplan.backends.runtime.launch import Arg, Launch, Ptr
from triplan.backends.triton.common.card import LAUNCH_US, LINE_BYTES, SM_WARPS
from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.common.rows_entries import Entry, LoopedRows
from triplan.backends.triton.common.tiles import Tile, registers_for, tile_of
from triplan.backends.triton.scans import looped_kernels as kernels
from triplan.backends.triton.scans.shared import ALONG_PER_US, BACKWARD, GROUPED_FROM, SCANS, ScanEntry
from triplan.sku import ElementKind, Target

#: Microseconds of a step of the loop: the latency of its loads and of the step before. Untuned.
STEP_US = 1.0
#: Microseconds of a step whose elements are loaded one step ahead; of 8 bytes twice as long. From drawn problems on an
#: H200.
AHEAD_STEP_US = 0.45
#: Elements of a thread up to which registers also hold those of the next block; and of rows that begin between two
#: vectors. Untuned.
AHEAD, GROUPED_AHEAD = 4, 8
#: Bytes of compute elements of a block of one such row: the fewer warps share it, the less they wait for each other. Of
#: more blocks than FEW_STEPS each is twice as long, as few rows take the latency of each; of many rows of 6 or 8 blocks
#: twice as long ones take longer. Untuned.
GROUPED_BYTES, FEW_STEPS = 4096, 16
#: Where rows are adjacent in all operands: bytes of compute elements of a thread, warps of a tile, and programs of so
#: many that are resident. Untuned.
EACH_BYTES, ACROSS_WARPS, ACROSS_RESIDENT = 128, 8, 2
#: Microseconds of the loop itself. From drawn problems on an H200.
LOOP_US = 0.25
#: Microseconds of a step of a tile of several rows, for each of its warps: every thread combines the results of all
#: other warps. From drawn problems on an H200.
WARP_STEP_US = 0.18
#: Time of such a step if rows are scanned from their ends, relative to others. From the same problems.
REVERSED_STEP = 1.2
#: Elements a microsecond of other crossed rows, by the bytes of an element: the larger it is, the fewer of a tile each
#: of its warps has. From drawn problems on an H100 and an H200.
CROSSED_PER_US = {2: 1.6e5, 4: 0.85e5, 8: 0.5e5}
#: The same of rows that are adjacent in all operands: of which a thread accesses several at once (untuned, from the
#: number of instructions), or one (from drawn problems on an H200; of 8 bytes untuned).
ACROSS_PER_US, ACROSS_SINGLY_PER_US = {2: 6e5, 4: 4e5, 8: 2e5}, {2: 5.3e5, 4: 2.2e5, 8: 1.1e5}
#: Microseconds of a step of these for each warp, whose results all threads combine; bytes of a line of the L1 cache,
#: and lines that it gives or takes in a microsecond, one a cycle. The first is from drawn problems on an H200.
ACROSS_STEP_US, LINES_PER_US = 0.15, 1750.0
#: Microseconds of a tile of the backward where rows are adjacent in all operands, beside STEP_US, by the bytes of an
#: element: of which a thread accesses several neighbours at once, or one. From drawn problems on an H200; of 8 bytes
#: untuned.
BACKWARD_STEP_US = {2: (1.5, 2.5), 4: (1.9, 2.9), 8: (1.9, 2.9)}
#: Time of crossed rows whose results have gaps in both directions, relative to others. From a run on an H200 that is
#: not published.
GAPS = 1.65


class ScanLooped(LoopedRows, ScanEntry, ops=SCANS):
    which = (kernels.scan_looped_kernel, kernels.cumprod_backward_looped_kernel)
    priority = 2
    moves = False
    program_us = 2.0  # of many short rows on an H200, drawn problems of ``bench anywhere``
    along = True
    sku_version = 6  # threads have as many neighbours as they access at once in all operands

    def find_tile(self) -> Tile:
        r = self.rows
        if self.in_runs():
            rows, held = r.beside(), 32 * EACH_BYTES // self.compute.itemsize  # elements of a warp
            block = min(ceil_power(r.n), ACROSS_WARPS * held // rows)
            return Tile(rows, block, max(rows * block // held, 1))
        # Several rows where they are crossed, if there are enough of them. Of rows that are read along, whose results
        # are adjacent to their neighbours', more than half as many as a tile has are enough.
        fewest = r.neighbours // 2 + 1 if self.writes_across() else r.neighbours
        many = r.has_many() and (r.lanes >= fewest or not r.along)
        tile = r.block_tile(2 if self.backward else 1, crosses=many)
        block = min(tile.block, self.most() // tile.rows)
        if not self.without_vectors():
            return tile_of(tile.rows, block, self.element.itemsize)
        size = self.compute.itemsize
        if tile.rows == 1:
            short = GROUPED_BYTES // size
            return tile_of(1, min(block, short if r.n <= FEW_STEPS * short else 2 * short), size)
        # Twice as many rows as elsewhere: longer pieces are written, fewer of which share a sector with others.
        # (Reversed sums of 16 bits would spill on sm80.)
        times = 1 if self.reversed() and self.element.itemsize == 2 else 2
        return tile_of(min(times * tile.rows, ceil_power(r.lanes)), GROUPED_FROM, size)

    def without_vectors(self) -> bool:
        """Whether rows begin between two vectors, or have gaps: no thread has its elements in vectors."""
        apart = not (self.rows.vectors or self.rows.across or self.rows.crossed)
        return self.grouped() or (apart and not self.backward)

    def is_ahead(self) -> bool:
        """Whether the next block is loaded while one is scanned."""
        each = self.tile.rows * self.tile.block // (32 * self.tile.warps)
        if self.in_runs():
            return self.rows.n > self.tile.block
        most = GROUPED_AHEAD if self.without_vectors() else AHEAD
        return not self.backward and each <= most and self.rows.n > self.tile.block

    def in_runs(self) -> bool:
        """Whether rows are adjacent in all operands: each thread then scans runs of them."""
        return self.rows.across and not self.backward

    def lanes_held(self) -> int:
        """Neighbouring rows of which a thread then accesses an element at once."""
        return min(self.rows.vector_bytes(o) for o in self.rows.operands) // self.element.itemsize

    def run(self) -> int:
        """Elements of such a run."""
        return min(max(EACH_BYTES // self.compute.itemsize // self.lanes_held(), 1), self.tile.block)

    def step_us(self) -> float:
        """(Of a thread's runs, what is loaded one by one costs lines: see ``lines_us``.)"""
        return 0.0 if self.in_runs() else super().step_us()

    def lines_us(self) -> float:
        """Microseconds of the L1 cache for a block's loads and stores. The fewer lanes there are, the more runs lie
        side by side in a warp, and each run is in a line of its own, or shares it with few others."""
        tile, held = self.tile, self.lanes_held()
        runs = max(32 * held // tile.rows, 1)
        lines = max(runs * min(self.run() * self.rows.lanes * self.element.itemsize / LINE_BYTES, 1.0), 1.0)
        return 2 * tile.rows * tile.block / (32 * held) * lines / LINES_PER_US

    def arguments(self) -> dict[str, Arg]:
        """Of rows side by side, no address promises more than all operands have. Otherwise the compiler gives each
        thread as many neighbours as one operand has in a vector, loads them one by one where another has none, and
        moves runs between threads."""
        args = super().arguments()
        if self.in_runs():
            held = self.lanes_held() * self.element.itemsize
            args |= {o.name: Ptr(o.name, o.element, held) for o in self.rows.operands}
        return args

    def resident_programs(self) -> int:
        return ACROSS_RESIDENT * ACROSS_WARPS // self.tile.warps

    def main(self) -> list[Launch]:
        ahead = self.is_ahead()
        if self.in_runs():
            most = registers_for(self.tile, self.resident_programs())
            runs, run = self.tile.block // self.run(), self.run()
            return [self.launch(kernels.scan_across_kernel, registers=most, AHEAD=ahead, RUNS=runs, RUN=run)]
        # (Arithmetic of i64 is several instructions, for which half of the registers are too few: some would spill.)
        most = registers_for(self.tile, 2) if ahead and self.element is not ElementKind.I64 else 0
        return [self.launch(self.which[self.backward], registers=most, AHEAD=ahead)]

    def us(self, target: Target) -> float:
        sms = target.sm_count
        waves, steps = -(-self.programs() // (SM_WARPS // self.tile.warps * sms)), -(-self.rows.n // self.tile.block)
        us, wide = super().us(target), self.compute.itemsize // 4
        if self.in_runs():
            waves = -(-self.programs() // (self.resident_programs() * sms))
            per_us = ACROSS_PER_US if self.lanes_held() > 1 else ACROSS_SINGLY_PER_US
            # (Warps whose runs lie behind the ends of rows have nothing to load or store.)
            fast = self.rows.count * self.rows.n / per_us[self.element.itemsize] - LAUNCH_US
            lines = self.lines_us() * steps * -(-self.programs() // sms)  # of the busiest multiprocessor
            return max(us, LOOP_US + ACROSS_STEP_US * self.tile.warps * waves * steps + lines, fast)
        if self.is_ahead() and self.without_vectors():
            step = AHEAD_STEP_US * wide + self.step_us()
            us = max(us, self.step_us() + LOOP_US + step * (waves * steps - 1))
        else:
            us += LOOP_US + (STEP_US + self.step_us()) * (waves * steps - 1)
        held = steps * self.tile.rows * self.tile.block
        if self.tile.rows == 1:  # the busiest multiprocessor
            return max(us, self.scanned_us(-(-self.programs() // sms) * sms * held) - LAUNCH_US)
        way = self.reversed()
        us = max(us, WARP_STEP_US * self.tile.warps * (REVERSED_STEP if way else 1.0) * steps)
        held *= self.programs()
        gaps = any(o.is_written and not o.layout.packed and o.layout.unit_axis is None for o in self.rows.operands)
        each = wide * held / ALONG_PER_US if self.writes_across() else held / CROSSED_PER_US[self.element.itemsize]
        return max(us, each * (GAPS if gaps else 1.0) - LAUNCH_US)


class BackwardLooped(ScanLooped, ops=BACKWARD):
    elements = Entry.elements
    along = False
    program_us = ScanEntry.program_us
    sku_version = 1

    def step_us(self) -> float:
        if not self.rows.across or self.tile.block == 1:
            return super().step_us()
        return BACKWARD_STEP_US[self.element.itemsize][self.lanes_held() == 1]
