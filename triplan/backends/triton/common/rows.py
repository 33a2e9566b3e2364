"""Where the rows of a rowwise op lie, and the tiles that programs hold of them.

A tile depends on the rows' length, element and direction alone, never on how many rows there are: the same row then has
the same bits in every batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from triplan.backends.runtime.launch import Arg, Int, Stride, power_of_two_in
from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import I32_LIMIT, ceil_power, padded
from triplan.backends.triton.common.tiles import Tile, tile_of
from triplan.descriptors import Operand, packed_strides
from triplan.descriptors.base import RowsDescriptor
from triplan.descriptors.fields import AxisField

#: Bytes of compute elements of a thread, for ``few_warps``, and the shortest such tile. On an H200, of 4 to 64 elements
#: a thread 32 are the best, or nearly, for rows of 65 to 2049: cross_entropy of 300,000 x 65 bf16 takes 52 us, and with
#: four warps 151.
UNALIGNED_BYTES, FEW_WARPS_FROM = 128, 128
#: Registers of a tile of adjacent rows that ``split`` turns, and of one of its warps. Rows of more than LONG bytes have
#: many blocks, and so are read by half as many. Fewer neighbours than FEWEST are by default divided one by one.
TURNED_TILE, TURNED_WARP, LONG, FEWEST = 8192, 1024, 1 << 14, 8
#: Programs that keep a card busy: if there are as many, each has several rows. Untuned.
ENOUGH = 128
#: The annotation of a field that names the axis of the rows.
AXIS = AxisField("input_shape")


class Rows:
    """The rows of ``desc``: along the axis that a field of it names, by default the last.

    The other axes are numbered in groups. Neighbouring rows of one program lie along the last group, the *lanes*; the
    other groups are *outer* dimensions, and a program works at one point of them.

    Attributes:
        operands: those that consist of the rows.
        n, lanes, outer, count: elements of a row, rows along the last group, points of the outer dimensions, all rows.
        unit, along: whether each row is contiguous in every operand; in any.
        across: whether instead neighbouring rows are adjacent in memory, in every operand.
        crossed: whether they are in some operands alone. Tiles of several rows are then exchanged between threads.
        invariant: whether the promised layouts make a row's loads the same in every batch. Otherwise the batch's
            extents decide the width of loads, and so the order of sums.
        gapped: whether in some operand no neighbours are known to be adjacent, but elements of a row are likely nearer
            to each other than rows are.
        vectors: whether a thread may load 16 bytes of a row at once. Otherwise it holds an address for each element.
        together: elements of each row that one load may have.
        neighbours: adjacent rows that fill two sectors.
        fewest: neighbours that are worth a tile of several rows where they are adjacent in some operands.
        flat: whether a program's rows follow each other row-major, along two axes. No neighbours are then known to be
            adjacent, as the next may be at another outer point.
    """

    def __init__(self, desc: RowsDescriptor, flat: bool = False, fewest: int = FEWEST) -> None:
        self.flat, self.fewest = flat, fewest
        shape, fields = desc.input_shape, type(desc).model_fields
        named = [getattr(desc, name) for name in fields if AXIS in fields[name].metadata]
        self.axis = axis = named[0] if named else len(shape) - 1
        self.operands = operands = [o for o in desc.operands() if o.shape == shape]
        self.n, self.element = shape[axis] if shape else 1, desc.element  # a scalar is a row of one
        self.neighbours = 2 * card.SECTOR // desc.element.itemsize
        others = [a for a in range(len(shape)) if a != axis and shape[a] != 1]
        if all(o.layout.packed for o in operands):
            # Strides are known: the axes before ``axis`` form one dimension, and those behind it another.
            groups = [g for g in ([a for a in others if a < axis], [a for a in others if a > axis]) if g]
        else:
            # Operands with one element a row require that rows are numbered row-major.
            in_order = any(o.shape == (*shape[:axis], *shape[axis + 1 :]) for o in desc.operands())

            def preference(g: list[int]) -> tuple[int, int]:
                """The lanes lie along the axis where neighbours are adjacent in most operands, of such the longest. Few
                neighbours are worth it only where they are adjacent in all."""
                n, adjacent = shape[g[0]], sum(self._step(o, g[0]) is None for o in operands)
                worth = n >= fewest or adjacent == len(operands)
                return (0, 0) if in_order or flat else (adjacent if worth else 0, n)

            groups = sorted([[a] for a in others], key=preference)
        self._groups, self._sizes = groups, [math.prod(shape[a] for a in g) for g in groups]
        self.lanes, self.outer = self._sizes[-1] if groups else 1, math.prod(self._sizes[:-1])
        self.count = self.lanes * self.outer
        #: Rows that programs number through: those along the last group, or all.
        self.numbered = self.count if flat else self.lanes
        contiguous = list(map(self.is_along, operands))
        self.unit, self.along = all(contiguous), any(contiguous)
        adjacent = [self.is_adjacent(o) for o in operands]
        self.across, self.crossed = not self.unit and all(adjacent), not self.unit and any(adjacent) > all(adjacent)
        # (Elements of packed rows along an inner axis are as many elements apart as there are adjacent rows.)
        self.invariant = all(
            axis == len(shape) - 1 if o.layout.packed else o.layout.unit_axis in (None, axis) for o in operands
        )
        aligned = [self._alignment(o) for o in operands]
        self.vectors = self.unit and min(aligned) >= 16
        self.together = max(min(*aligned, 16) // desc.element.itemsize, 1) if self.unit else 1
        self._nearer = axis == len(shape) - 1
        self.gapped = any(map(self._is_gapped, operands))

    def is_adjacent(self, o: Operand) -> bool:
        """Whether neighbouring rows of ``o`` are adjacent in memory."""
        return not self.flat and bool(self._groups) and self._step(o, self._groups[-1][-1]) is None

    def _is_gapped(self, o: Operand) -> bool:
        # (Flat rows are adjacent but where a program goes on to the next outer point.)
        beside = self.flat and self._fills_sector() and self._step(o, self._groups[-1][-1]) is None
        return self._nearer and not (beside or self.is_along(o) or self.is_adjacent(o))

    def _fills_sector(self) -> bool:
        """Whether the lanes have as many elements as a sector."""
        return self.lanes * self.element.itemsize >= card.SECTOR

    def _alignment(self, o: Operand) -> int:
        """Bytes to which each contiguous row of ``o`` is aligned."""
        return min(o.alignment, self._distance(o) * o.element.itemsize)

    def is_along(self, o: Operand) -> bool:
        """Whether each row of ``o`` is contiguous."""
        return self._step(o, self.axis) is None

    def vector_bytes(self, o: Operand) -> int:
        """Bytes of ``o`` that a tile of several rows may access at once, along the rows or across them."""
        size = o.element.itemsize
        extent = self.n if self.is_along(o) else self.lanes if self.is_adjacent(o) else 1
        apart = extent if o.layout.packed else o.layout.stride_multiple
        return math.gcd(o.alignment, 16, extent * size, apart * size)

    def begins_between(self, o: Operand, nbytes: int) -> bool:
        """Whether ``o`` has contiguous rows, which begin between two vectors of ``nbytes``."""
        return self.is_along(o) and self._alignment(o) < nbytes

    def _distance(self, o: Operand) -> int:
        """A power of two that divides the distance between contiguous rows of ``o``, in elements."""
        return power_of_two_in(self.n) if o.layout.packed else o.layout.stride_multiple

    def _step(self, o: Operand, axis: int) -> Arg:
        """The stride along an axis; None where it is known to be 1."""
        if axis == self.axis and self.n == 1:
            return None
        if o.layout.packed:
            known = packed_strides(o.shape)[axis]
            return None if known == 1 else Int(known, known >= I32_LIMIT, power_of_two_in(known))
        return None if o.layout.unit_axis == axis else Stride(o.name, axis, divisibility=o.layout.stride_multiple)

    # --- arguments of kernels ---

    def strides(self, o: Operand, turns: bool) -> Arg:
        """(outer strides, lane stride, step along the row) of ``o``; and 1 where ``load_rows`` is to give consecutive
        threads consecutive elements of a row, as ``o`` is gapped and the kernel ``turns`` such operands, else None."""
        outer = [self._step(o, g[-1]) or Int(1, True) for g in self._groups[:-1]]
        # A lone row has the divisibility that neighbours would have: it decides a load's width, and so a sum's order.
        wide = not o.layout.packed or self.n >= I32_LIMIT
        lane = self._step(o, self._groups[-1][-1]) if self._groups else Int(0, wide, self._distance(o))
        if self.n == 1 and lane is None and self.lanes % (16 // o.element.itemsize):
            lane = Int(1)  # no vector of an odd number of elements is loaded at once: threads would access every eighth
        turned = Int(1) if turns and self._is_gapped(o) else None
        found = tuple(outer) if self.flat else padded(outer, Int(0, True, 16)) if outer else None
        return (found, lane, self._step(o, self.axis), turned)

    def sizes(self, turned: bool = False) -> dict[str, Arg]:
        """The kernels' arguments for sizes; if blocks are ``turned``, with what masks of vectors need of both axes."""
        # (Numbers of flat rows go on to the end of the last program's tile.)
        wide = (2 * self.count if self.flat else max(self.outer, self.lanes)) >= I32_LIMIT
        outer, beside = [Int(n, wide) for n in self._sizes[:-1]], self.across or self.n == 1
        return {
            "sizes": tuple(outer) if self.flat else padded(outer, Int(1, wide)) if outer else None,
            "lanes": Int(self.lanes, wide, power_of_two_in(self.lanes) if beside or turned else 1),
            "n": Int(self.n, self.n >= I32_LIMIT, power_of_two_in(self.n) if self.unit or turned else 1),
        }

    def groups(self, rows: int) -> int:
        """Groups of ``rows`` rows that are numbered through."""
        return -(-self.numbered // rows)

    def beside(self) -> int:
        """Rows of a tile of ``neighbours``: not more than there are, but a power of two."""
        return min(self.neighbours, ceil_power(self.lanes))

    def is_strided(self) -> bool:
        """Whether all access is strided: rows have gaps in some operand, and neighbouring rows are adjacent in none."""
        return not (self.unit or self.across or self.crossed)

    def has_many(self) -> bool:
        """Whether there are enough rows for several ``neighbours`` a program."""
        return self.outer * self.groups(self.neighbours) >= ENOUGH

    def blocks(self, tile: Tile) -> int:
        """Blocks of a row, one even of an empty row: its statistics are written."""
        return max(-(-self.n // tile.block), 1)

    def programs(self, tile: Tile, blocks: int | None = None) -> int:
        """Programs of ``blocks`` blocks of every row, of one ``tile`` each; by default of those that cover all rows."""
        points = 1 if self.flat else self.outer
        return points * self.groups(tile.rows) * (self.blocks(tile) if blocks is None else blocks)

    def numerics(self, name: str, operands: Sequence[Operand]) -> str | None:
        """The numerics id: ``name``, which holds all else that decides bits, and the promised layouts: how many
        neighbours a thread loads at once, and accumulates first. None where the batch decides bits as well."""
        if not self.invariant:
            return None
        found = {o.name: self._promise(o) for o in operands}
        if len(set(found.values())) == 1:  # one more operand of the same kind changes nothing
            return f"{name}.{next(iter(found.values()))}"
        return f"{name}.{','.join(f'{operand}={promise}' for operand, promise in found.items())}"

    def _promise(self, o: Operand) -> str:
        kind = "packed" if o.layout.packed else "strided" if o.layout.unit_axis is None else "unit"
        multiple = f"x{o.layout.stride_multiple}" if o.layout.stride_multiple > 1 else ""
        return f"{kind}{min(o.alignment, 16)}{multiple}"

    # --- tiles ---

    def scattered(self) -> bool:
        """Whether rows lie along two axes, and those of a program along the first, adjacent in no operand, while those
        along the second are adjacent in some."""
        found = [g[0] for g in self._groups]
        if not self.is_strided() or not self._nearer or len(found) != 2 or found[0] < found[1]:
            return False
        return any(self._step(o, found[0]) is None for o in self.operands)

    def among_few(self, elements: int) -> bool:
        """Whether rows lie along two axes, and the neighbours along the second, which fill a sector, have no more than
        so many ``elements`` in a tile. Programs of these alone would move few bytes each."""
        few = self._fills_sector() and self.lanes * ceil_power(self.n) <= elements
        in_order = len(self._groups) == 2 and self._groups[0][0] < self._groups[1][0]
        return few and in_order and (self.across or self.crossed)

    def begins_anywhere(self, block: int, shortest: int = FEW_WARPS_FROM) -> bool:
        """Whether few warps may share a tile of whole rows, ``block`` long: its rows begin between two vectors."""
        return self.unit and not self.vectors and block >= shortest

    def begins_alike(self) -> bool:
        """Whether rows of 16 bits begin between two vectors, at the same element of one in all operands."""
        packed = all(o.layout.packed and o.alignment >= 16 for o in self.operands)
        return self.element.itemsize == 2 and self.unit and not self.vectors and packed

    def whole_tile(self, most: int, held: int = 4096, few_warps: bool = False) -> Tile | None:
        """The tile that holds whole rows, at most ``most`` elements; None if rows are longer.

        ``held``: bytes of a tile of several short rows. Two 16-byte loads a thread of four warps saturate memory;
        smaller programs leave it idle, in larger ones threads wait for each other. ``few_warps``: where rows begin
        anywhere, consecutive threads load consecutive elements, and so do warps: with fewer of them fewer share a row.
        """
        # (Bytes of registers that an element takes as it is loaded: those of its address, where rows have gaps.)
        block, size = ceil_power(self.n), self.element.itemsize if self.unit else 8
        if few_warps and self.begins_anywhere(block):
            each = 32 * UNALIGNED_BYTES // self.element.compute.itemsize
            rows = max(each // block, 1)
            return None if block > most else Tile(rows, block, max(rows * block // each, 1))
        if self.across or self.crossed:
            if self.neighbours * block <= min(most, 8192):
                return tile_of(self.neighbours, block, self.element.itemsize)
            if self.across:
                return None
        if block > (most if self.unit else min(most, 4096)):
            return None
        return tile_of(max(held // size // block, 1), block, size)

    def turned_tile(self, operands: Sequence[Operand], times: int, held: int) -> Tile | None:
        """The tile of a block of several rows, ``held`` of ``operands`` at a time, where neighbouring rows are adjacent
        in some of these; of ``times`` as many as are read."""
        if self.unit or self.lanes < self.fewest or not any(map(self.is_adjacent, operands)):
            return None
        halves = times == 1 and self.n * self.element.itemsize > LONG
        rows = min(self.neighbours * times // (2 if halves else 1), ceil_power(self.lanes))
        wide = held * self.element.compute.itemsize // 4  # registers of an element
        block = min(TURNED_TILE // wide // rows, ceil_power(self.n))
        return Tile(rows, block, max(rows * block * wide // TURNED_WARP, 1))

    def lone_tile(self, operands: Sequence[Operand], held: int) -> Tile:
        """The tile that holds one block of one row of any length, of ``held`` of ``operands`` at a time."""
        size = self.element.itemsize if all(map(self.is_along, operands)) else 8
        return tile_of(1, min(ceil_power(self.n), 32768 // size // held, 8192), size)

    def block_tile(self, operands: int = 1, crosses: bool = False) -> Tile:
        """The tile that holds one block of rows of any length, of ``operands`` operands at a time: of several rows
        where neighbours are adjacent, with ``crosses`` also where they are ``crossed``."""
        if self.across or (self.crossed and crosses):
            return tile_of(self.neighbours, 4096 // self.neighbours, self.element.itemsize)
        return self.lone_tile(self.operands, operands)

    def loop_tile(self, held: int, operands: int = 1, most_warps: int = 0) -> Tile:
        """The tile of a loop that reads rows of any length twice, the second time from the L2 cache: of one row, or of
        several where neighbouring rows are adjacent in memory, or in some operands (if there are enough).

        Programs are so large that the rows of all resident ones fit in the L2 cache. A thread holds ``held`` bytes of
        each of ``operands`` operands: the fewer, the more programs are resident. ``most_warps``: by default 32, or 16
        with several operands.
        """
        if self.across or (self.crossed and self.has_many()):
            return self.block_tile(crosses=True)
        block, size = ceil_power(self.n), self.element.itemsize
        each = held if self.unit else 4 * size
        warps = min(max(operands * block * size // 4096, 4), 8 * size, most_warps or (16 if operands > 1 else 32))
        block = min(block, 32 * warps * each // size)
        return Tile(1, block, min(warps, max(block * size // (32 * each), 1)))

    def unroll(self, tile: Tile, most: int) -> int:
        """Blocks of one row that a loop loads at a time: a power of two up to ``most``."""
        while most > 1 and not (self.unit and tile.block * most <= self.n):
            most //= 2
        return most

    def sectors(self, rows: int = 1, operands: Sequence[Operand] = ()) -> float:
        """How often each sector of memory (of ``operands``, by default all) is moved if every program has ``rows``
        neighbouring rows. Where rows are ``crossed``, one that is written in part moves twice.

        An operand with gaps in both directions is likely densest along its last axis: rows of another axis are then
        read as if their neighbours were adjacent."""
        if not (self.across or self.crossed):
            return 1
        most = min(self.lanes, card.SECTOR // self.element.itemsize)
        if self.across or rows >= most:
            return max(most // rows, 1)

        def of(o: Operand) -> float:
            if self.is_along(o):
                return 1
            gaps, lane = not o.layout.packed and o.layout.unit_axis is None, self._groups[-1][-1]
            if gaps and self._nearer:
                return 1
            beside = self._step(o, lane) is None or (gaps and lane == len(o.shape) - 1)
            often = most / rows if beside else card.SECTOR / o.element.itemsize
            return often * (2 if o.is_written and often > 1 else 1)

        listed = operands or self.operands
        return sum(map(of, listed)) / len(listed)

    def vector(self, tile: Tile) -> int:
        """Neighbours in a row that one thread loads at once."""
        return min(16 // self.element.itemsize, tile.block) if self.unit else 1
