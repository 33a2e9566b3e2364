"""How a reduction is divided among programs and threads: dimensions, tiles, registers and costs."""

from __future__ import annotations

import math

from triplan.backends.runtime.launch import power_of_two_in
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US, MAX_THREAD_REGISTERS, SMS
from triplan.backends.triton.common.offsets import I32_LIMIT, ceil_power
from triplan.backends.triton.common.strides import in_memory, known_strides, row_tile
from triplan.backends.triton.common.tiles import Tile, registers_for
from triplan.backends.triton.reductions import shared_kernels as do
from triplan.backends.triton.reductions.dims import Dim, line_distance, merged
from triplan.backends.triton.reductions.kinds import EXTREMA, OTHER_NORM, PAIRS, POSITIONS, TURNED, kind_of
from triplan.backends.triton.reductions.limits import (
    ACROSS_BYTES,
    BUSY,
    CHUNK_TILES,
    FAR_APART,
    FEW,
    FEW_HELD,
    FEW_OF_MANY,
    FEWEST_ACROSS,
    FEWEST_BLOCKS,
    FEWEST_GROUPS,
    FEWEST_HELD,
    FLAT_FROM,
    FLAT_POINTS,
    FLAT_SHARE,
    HELD,
    LONE,
    LONE_BLOCKS,
    LONE_LINE,
    LONE_WARPS,
    LONG_BLOCK,
    LONG_BLOCKS,
    LONG_FROM,
    LONG_TILES,
    LONGER,
    MANY,
    MERGED_BYTES,
    MERGED_WARPS,
    MORE_HELD,
    MOST_CHUNKS,
    MOST_LINES,
    NARROW_BUSY,
    NARROW_CHUNK,
    NARROW_REGISTERS,
    ODD_ACROSS_BYTES,
    ODD_BLOCKS,
    ODD_BUSY,
    ODD_HELD,
    ODD_WARPS,
    ONCE_BELOW,
    ONCE_BYTES,
    ONCE_HELD,
    ONCE_LONGEST,
    OWN_LINES,
    POWER_REGISTERS,
    RESIDENT,
    SCATTERED,
    SCATTERED_REGISTERS,
    STEP,
    THREAD_BYTES,
    TURNED_BYTES,
    TURNED_FROM,
    TURNED_LINE,
    TURNED_SIDE,
    WARPS,
    WAVE_WARPS,
    WHOLE_ANY,
    WHOLE_HELD,
    WHOLE_LINE,
)
from triplan.backends.triton.reductions.loads import Loads
from triplan.backends.triton.reductions.waves import divided, tile_of
from triplan.descriptors import ExpressionReductionDescriptor
from triplan.descriptors.reductions import ReductionProblem
from triplan.sku import ElementKind


class Tiling(Loads):
    """How one problem is reduced. A *line* is the elements that one result reduces.

    Attributes:
        reads: the tensors that are read: x, or those of an expression.
        results: the tensors that are written, one or two.
        x: the largest of those read, whose layout decides what a tile is.
        kept, reduced: dimensions, innermost last; adjacent ones are merged where strides allow it.
        across: the kept dimension along which x is contiguous, or where its elements are likely nearest to each other,
            if there is one; it is then not among ``kept``.
        lanes, n: number of results, and elements of a line.
        unit: whether the elements of a line are contiguous, and threads share it.
        own: whether they are contiguous, and each thread reads lines of its own.
        once: where lines are short, odd and of few bytes an element, and the order of their elements does not matter,
            places of a block in which all are read at once, in vectors that may reach beside the line; otherwise 0.
        rowed: whether lines consist of contiguous rows, each of which is read as lines are that begin between vectors.
        flat: where ``across`` is short, elements of a vector along it, and lines of several of its points are reduced
            side by side; otherwise 0.
        waves: where lines side by side are long, (elements, number) of the chunks with which one program on each
            multiprocessor, or two, read them in whole waves; otherwise None.
        turns: where lines side by side begin between vectors, a program reads every ``turns``-th element of its lines:
            these lie at the same distance from a vector. Otherwise 1.
        tile: (lines, elements of each) that a program holds at a time.
        chunk, chunks: elements of a line that one program reduces at most, and programs that share a line.
    """

    def __init__(self, desc: ReductionProblem) -> None:
        self.desc = desc
        self.kind = kind_of(desc)
        self.compute = self.kind.compute(desc)
        self.tree = desc if isinstance(desc, ExpressionReductionDescriptor) else None
        shape = desc.input_shape
        self.reads = tuple(o for o in desc.operands() if o.is_tensor and not o.is_written)
        self.x = max(self.reads, key=lambda o: o.nbytes)
        self._lead = self.reads.index(self.x)
        of_reads = [*zip(*(known_strides(o, len(shape)) for o in self.reads), strict=True)]
        self.results = tuple(o for o in desc.operands() if o.is_written)
        of_results = zip(*(known_strides(o, len(o.shape)) for o in self.results), strict=True)
        of_kept = dict(zip(desc.kept_axes, of_results, strict=True))
        reduced = [Dim(shape[a], of_reads[a]) for a in desc.reduce_axes if shape[a] != 1]
        if self.kind.accumulates not in POSITIONS:  # these number elements row-major
            reduced.sort(key=lambda d: in_memory(d.reads[self._lead]))
        self.reduced = merged(reduced)
        kept = merged([Dim(shape[a], of_reads[a], *of_kept[a]) for a in desc.kept_axes if shape[a] != 1])
        self.lanes, self.n = math.prod(d.size for d in kept), desc.reduced
        contiguous = len(self.reduced) == 1 and self._is_unit(self.reduced[0])
        if contiguous and not kept:
            # A single line is given the stride that neighbours would have: its divisibility decides the width of loads.
            apart = tuple(
                line_distance(desc, o) if s == 1 else 0 for o, s in zip(self.reads, self.reduced[0].reads, strict=True)
            )
            kept = [Dim(1, apart, 1, len(self.results) - 1)]
        long = [d for d in kept if d.size >= FEWEST_ACROSS]
        beside = [d for d in long if self._is_unit(d)] or [d for d in long if self._is_likely_near(d)]
        self.across = beside[0] if beside and not contiguous else None
        self.kept = [d for d in kept if d is not self.across]
        self.turns = self._turns()
        self.own = contiguous and self._are_own()
        self.unit = contiguous and not self.own
        self.flat = self._flat()
        self.rowed = self._rowed()
        self.once = self._once()
        self.waves = self._waves()
        self.tile = self._tile()
        self.chunk, self.chunks = self._chunks()
        self.single = self.n <= self.tile.block and self.turns == 1 and not (self.once or self.rowed)

    def _are_own(self) -> bool:
        """Whether each thread reads lines of its own (see OWN_LINES): not where one vector holds a line."""
        short = self.tree is None and 1 < self.n <= OWN_LINES
        return short and self._aligned() < min(self.n * self.x.element.itemsize, 16)

    def _flat(self) -> int:
        if self.across is None or not self._is_unit(self.across) or not self.kept:
            return 0
        size, vector = self.across.size, max(self._aligned() // max(o.element.itemsize for o in self.reads), 1)
        if self._aligned() >= 16:
            worth = self.n <= FEW and size < 32 * vector and self.lanes > FLAT_POINTS * size
        else:
            width = min(ceil_power(size), FLAT_FROM)
            worth = FLAT_SHARE * -(-size // width) * width > size
        return vector if worth and size % vector == 0 else 0

    def _turns(self) -> int:
        if self.across is None or self.tree is not None or len(self.reduced) != 1 or not self._is_unit(self.across):
            return 1
        stride, item = self.reduced[0].reads[self._lead], self.x.element.itemsize
        if not isinstance(stride, int) or item not in TURNED_BYTES or self.kind.accumulates not in TURNED:
            return 1
        turns, odd = 16 // power_of_two_in(stride * item), ODD_ACROSS_BYTES // item
        few = self.light and self.x.nbytes < TURNED_FROM and self._are_lone(row_tile(odd, odd, self.across.size)[1])
        return turns if self.n >= TURNED_LINE and self.across.size >= TURNED_SIDE and not few else 1

    def _are_lone(self, rows: int) -> bool:
        """Whether there are so few lines that programs of ``rows`` of them have LONE_WARPS."""
        return self.lanes <= LONE * rows and self.n <= LONE_LINE

    def _rowed(self) -> bool:
        vector, *outer = 16 // self.x.element.itemsize, *(d.size for d in self.reduced[:-1])
        plain = self.tree is None and self.across is None and self.kind.accumulates in TURNED
        if not plain or not outer or not self._is_unit(self.reduced[-1]) or self.x.alignment < 16:
            return False
        long, many = self.reduced[-1].size >= 32 * WARPS * vector, self.lanes * math.prod(outer) >= RESIDENT
        return long and many and self._vectors(vector)[self._lead] < vector

    def _once(self) -> int:
        item, n = self.x.element.itemsize, self.n
        exact = self.kind.accumulates in EXTREMA or not self.compute.is_floating_point
        narrow = min(self._aligned(), power_of_two_in(n) * item) < ONCE_BELOW
        plain = self.tree is None and self.unit and exact and narrow and item <= 2 and n * item >= ONCE_BYTES
        block = ceil_power(n + (0 if self._aligned() >= 16 else 16 // item - 1))
        return block if plain and block <= ONCE_LONGEST and block < 2 * n else 0  # (most places are of the line)

    def _waves(self) -> tuple[int, int] | None:
        item = self.x.element.itemsize
        plain = self.tree is None and self.across is not None and not self.flat and self.turns == len(self.reduced) == 1
        if not plain or item == 1 or self._aligned() < 16 or self.kind.accumulates in POSITIONS:
            return None
        return divided(self.n, self.lanes, self._side(), item, self.light, self._between)

    def _tile(self) -> Tile:
        item, n, count = self.x.element.itemsize, max(self.n, 1), len(self.reads)
        if self.waves:
            return Tile(*tile_of(item), WAVE_WARPS)
        wide = self.compute.itemsize > 4
        double = wide or (self.kind.accumulates in PAIRS and self.kind.accumulates is not do.ENDS)
        odd, whole = self._aligned() < 16, 32 * WARPS * THREAD_BYTES // max(item, 2)
        if self.across is not None:
            vector = self._beside()
            most = min(ceil_power(n), max(self._held(FEW_HELD, wide or vector == 1) // vector, 1))
            block = min((most, max(most // 2, 1)), key=lambda b: -(-n // b) * (b + STEP))
            held, block = (n, 1) if self._at_once() else (block, block)
            beside = 32 * WARPS * vector * max(FEWEST_HELD // (vector * held), 1)
            _, rows = row_tile(beside, beside, self._side())
            if n <= FEW or (not odd and n <= FEW_OF_MANY and self.lanes >= MANY * rows):
                return Tile(rows, block, min(max(rows // (32 * vector), 1), WARPS))
        if self.own:
            return Tile(32 * WARPS, ceil_power(n), WARPS)
        if block := self.once:  # of two vectors a lane one warp has a line: two would exchange accumulators
            held, warps = (ONCE_HELD[1], 1) if block == 2 * 32 * 16 // item else (ONCE_HELD[0], WARPS)
            return Tile(32 * warps * held // block, block, warps)
        if odd and self.unit and n <= whole:
            size = 32 * self._held(ODD_HELD, wide)
            block = min(ceil_power(n), ODD_WARPS * size)
            return Tile(min(max(size // block, 1), self._most_lines() // WARPS), block, max(block // size, 1))
        size = 2 * whole if odd and self.across is not None else whole
        if double:
            size = max(size // 2, 32 * WARPS * 16 // item)  # at least one 16-byte load a thread
        size = min(size, 32 * WARPS * self._held(HELD, False)) if count > 1 else size
        if self.unit and size < n and self._takes_two(wide):
            block = ceil_power(n)
            more = self.kind.accumulates is do.EXPONENTIALS and n <= WHOLE_ANY
            return Tile(1, block, max(block // (32 * (MORE_HELD if more else WHOLE_HELD)), 2))
        if self.rowed:
            least, row = 32 * WARPS * 16 // item, self.reduced[-1].size
            return Tile(1, max(least, min(size, ceil_power(row + 1) // 4)), WARPS)
        if self._is_long():
            return Tile(1, LONG_BLOCK, LONG_BLOCK * item // (32 * THREAD_BYTES))
        if self.across is None:
            size = max(size, 32 * WARPS * FEWEST_HELD) if self._are_apart() else size
            block = min(ceil_power(n), size)
            return Tile(min(size // block, self._most_lines()), block, WARPS)
        narrow = self._narrow()
        most = (ODD_ACROSS_BYTES if odd and not narrow else ACROSS_BYTES) // item
        size = size // 2 if narrow and not odd else size
        _, rows = row_tile(most, most, self._side())
        size, warps = (min(size, whole), LONE_WARPS) if self._are_lone(rows) else (size, WARPS)
        return Tile(rows, min(ceil_power(n), max(size // rows, 1)), warps)

    def _takes_two(self, wide: bool) -> bool:
        """Whether a tile of whole lines is reduced in two passes over registers, which take fewer instructions than
        accumulators of moments or exponentials; and whether vectors of 16 bytes are masked as one."""
        kinds, item = (do.MOMENTS, do.EXPONENTIALS), self.x.element.itemsize
        vectors = self._aligned() >= 16 and power_of_two_in(self.n) * item >= 16
        fits = self.n <= WHOLE_ANY or 3 * ceil_power(self.n) <= 4 * self.n <= 4 * WHOLE_LINE
        return fits and self.kind.accumulates in kinds and self.tree is None and vectors and not wide

    def _is_long(self) -> bool:
        """Whether a line of sums or extrema is so long that more threads than those of WARPS read it at a time."""
        read = self.unit and self.light and self.x.element.itemsize in (2, 4) and len(self.reads) <= 2
        return read and self._aligned() >= 16 and self.n >= LONG_FROM * LONG_BLOCK

    def _held(self, most: int, halved: bool) -> int:
        """Elements per thread: a power of two up to ``most``, or half of it; fewer of several operands."""
        return min(most // (2 if halved else 1), HELD // ceil_power(len(self.reads)))

    def _most_lines(self) -> int:
        """Lines of a program of WARPS warps at most, if each has its own address."""
        return 1 << (MOST_LINES // len(self.reads)).bit_length() - 1

    def _side(self) -> int:
        """How many lines lie side by side."""
        return self.lanes if self.flat or self.across is None else self.across.size

    def _narrow(self) -> bool:
        """Whether lines of bytes lie side by side, with one accumulator of 32 bits for each place, or two."""
        double = self.kind.accumulates in PAIRS and self.kind.accumulates is not do.ENDS
        beside = self.across is not None and self.tree is None
        return beside and self.x.element.itemsize == 1 and self.compute.itemsize <= 4 and not double

    def _are_odd_and_few(self) -> bool:
        """Whether programs of LONE_WARPS read long columns of 2 bytes that begin between vectors; larger ones would be
        read in turns."""
        read = self.tree is None and self.light and self.kind.accumulates in TURNED
        odd = self.x.element.itemsize in TURNED_BYTES and self._aligned() < 16
        return read and odd and self.n >= TURNED_LINE and self.tile.warps > WARPS

    def _chunks(self) -> tuple[int, int]:
        if self.waves:
            return self.waves
        tiles = LONG_TILES if self._is_long() else CHUNK_TILES
        chunk = self.tile.block * max(tiles, -(-self.n // (self.tile.block * MOST_CHUNKS)))
        if self.unit and chunk < self.n <= LONGER * chunk:
            return -(-self.n // self.tile.block) * self.tile.block, 1
        if self.rowed:
            chunk = -(-chunk // self.reduced[-1].size) * self.reduced[-1].size
        elif self.across is not None:
            fewest = FEWEST_BLOCKS if self.tile.warps <= WARPS else LONE_BLOCKS
            groups = max(self.groups(), 1)
            most = 1 if self._at_once() else max(self.n // (self.tile.block * fewest), 1)
            wanted = min(max(BUSY // groups, 1), most)
            if self._are_odd_and_few():
                wanted = min(wanted, max(ODD_BUSY // groups, self.n // (ODD_BLOCKS * self.tile.block), 1))
            if self._narrow() and self.tile.warps <= WARPS:
                least = min(2 * RESIDENT // groups, most)
                wanted = min(max(NARROW_BUSY // groups, 1), max(self.n // NARROW_CHUNK, least, 1))
            if self.turns > 1:
                each, block = -(-self.n // self.turns), self.tile.block
                chunk = -(-each // (max(round(wanted / self.turns), 1) * block)) * block
                return chunk, self.turns * -(-each // chunk)
            if wanted > 1 and self._between(self.n // wanted) % FAR_APART == 0:
                wanted += 1 - wanted % 2
            block, group = self.tile.block, self.tile.block * self._group(self.tile)
            block = group if self.n >= wanted * FEWEST_GROUPS * group else block
            chunk = -(-self.n // (wanted * block)) * block
        elif self.tile.rows > 1:
            chunk = self.tile.block
        elif not self.unit:  # a step waits for scattered elements: those of few lines are many programs'
            chunk = min(max(self.groups() * -(-self.n // self.tile.block) // SCATTERED, 1) * self.tile.block, chunk)
        return max(chunk, 1), max(-(-self.n // max(chunk, 1)), 1)

    def _between(self, elements: int) -> int:
        """Bytes between so many elements of a line that has one dimension; else 1."""
        stride = self.reduced[0].reads[self._lead] if len(self.reduced) == 1 else None
        return elements * stride * self.x.element.itemsize if isinstance(stride, int) else 1

    def groups(self) -> int:
        """Programs per chunk."""
        vectors = self._side() + (self._beside() - 1 if self.turns > 1 else 0)
        return -(-vectors // self.tile.rows) * (self.lanes // max(self._side(), 1))

    @property
    def wide(self) -> bool:
        return max(self.lanes, self.n) >= I32_LIMIT

    def registers(self) -> int | None:
        """The limit of registers per thread; None leaves it to ptxas, which raises occupancy then: it spills a few
        registers of i64 and their positions, and lets narrow loads wait for each other, so that few programs take two
        to three times as long (drawn problems on an H200). But occupancy hides the latency of many programs: with the
        limit, sums of many odd rows or columns take longer. Lines of scattered elements have up to twice SCATTERED
        programs, which seldom need all registers: for so many the limit still helps. Long lines of more programs have
        SCATTERED_REGISTERS. Columns of 4 or 8 bytes have few more than ptxas would take, with which all loads of a
        block are issued before it is accumulated; but two accumulators of f64 would spill with so few, and powers have
        more. Programs of whole waves have as many as all of a wave leave them.
        """
        if self.waves:
            return registers_for(self.tile, 2 if self.light and self.groups() * self.chunks > SMS else 1)
        spilled = self.kind.accumulates in POSITIONS and self.compute is ElementKind.I64
        narrow = self._aligned() < 16 and self._shift(self.tile) == 1 and not self.once
        extremum = self.kind.accumulates in EXTREMA and self.tile.warps >= WARPS
        scattered = not (self.unit or self.own or self.rowed) and self.across is None and self.tile.rows == 1
        few = self.groups() * self.chunks <= (2 * SCATTERED if scattered else RESIDENT)
        if spilled or (narrow and few):
            return MAX_THREAD_REGISTERS
        is_long = self.n >= LONG_BLOCKS * self.tile.block
        if scattered and is_long and self._are_apart() and self.compute.itemsize <= 4:  # as many as addresses take
            return SCATTERED_REGISTERS
        if narrow and extremum:
            return MAX_THREAD_REGISTERS
        pairs = self.kind.accumulates in PAIRS and self.compute.itemsize > 4
        beside = narrow and self.across is not None and self.tree is None and not pairs
        most = POWER_REGISTERS if self.kind is OTHER_NORM else NARROW_REGISTERS
        return most if beside and self.x.element.itemsize >= 4 and self.tile.warps == WARPS else None

    def merging(self) -> Tile:
        """(lines, chunks) that a program of the second launch merges at a time."""
        size, block = 32 * WARPS * THREAD_BYTES // max(self.compute.itemsize, 4), ceil_power(self.chunks)
        if block > size:
            second = self.kind.second(self.compute)
            held = MERGED_BYTES // ceil_power(max(self.compute.itemsize, 4) + (second.itemsize if second else 0))
            block = min(block, 32 * MERGED_WARPS * held)
            return Tile(1, block, max(block // (32 * held), WARPS))
        return Tile(size // block, block, WARPS)

    def us(self) -> float:
        return LAUNCH_US + sum(o.nbytes for o in self.reads) / BYTES_PER_US
