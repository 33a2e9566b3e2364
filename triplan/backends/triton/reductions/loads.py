"""How the operands of a reduction are loaded: in which vectors, and how many before the first is accumulated."""

from __future__ import annotations

from triplan.backends.runtime.launch import power_of_two_in
from triplan.backends.triton.common.strides import Along
from triplan.backends.triton.common.tiles import Tile
from triplan.backends.triton.reductions import shared_kernels as do
from triplan.backends.triton.reductions.dims import STEPS, Dim, distance, step_along
from triplan.backends.triton.reductions.kinds import OTHER_NORM, PAIRS, POSITIONS, TURNED, Kind
from triplan.backends.triton.reductions.limits import AT_ONCE, GROUP_BYTES, LIGHT_BYTES, WARPS, WAVE_GROUP
from triplan.descriptors import ExpressionReductionDescriptor, Operand
from triplan.sku import ElementKind


class Loads:
    """What of a ``Tiling`` depends on the addresses of its operands. For the attributes see there."""

    reads: tuple[Operand, ...]
    x: Operand
    _lead: int  #: the number of x among ``reads``
    kind: Kind
    compute: ElementKind
    tree: ExpressionReductionDescriptor | None
    kept: list[Dim]
    reduced: list[Dim]
    across: Dim | None
    n: int
    unit: bool
    own: bool
    once: int
    rowed: bool
    turns: int
    waves: tuple[int, int] | None

    @property
    def light(self) -> bool:
        """Whether each place of a tile has one accumulator of 32 bits, and elements take few registers beside it."""
        return self.kind.accumulates not in PAIRS and self.compute.itemsize <= 4 and self.kind is not OTHER_NORM

    def _is_unit(self, d: Dim) -> bool:
        """Whether x is contiguous along ``d``."""
        return d.reads[self._lead] == 1

    def _is_likely_near(self, d: Dim) -> bool:
        """Whether ``d`` is the last dimension, and x is known to be contiguous along none, as a slice with a step."""
        stride = d.reads[self._lead]
        last = isinstance(stride, Along) and stride.axis == len(self.x.shape) - 1
        return last and self.x.layout.unit_axis is None

    def _are_apart(self) -> bool:
        """Whether threads load lines element by element, as these are not contiguous."""
        alone = self.tree is None and self.across is None
        return alone and bool(self.reduced) and not self._is_unit(self.reduced[-1])

    def _aligned(self) -> int:
        """A power of two that divides, in bytes, all addresses at which something contiguous begins, lines or what lies
        across them, in all operands; at most 16."""
        if self.across is not None and not self._is_unit(self.across):
            return self.x.element.itemsize
        if self.turns > 1:
            return 16
        dims = [*self.kept, *(d for d in self.reduced if len(self.reduced) > 1 or not self._is_unit(d))]
        apart = [distance(o, s) for d in dims for o, s in zip(self.reads, d.reads, strict=True)]
        alignments = [o.alignment for o in self.reads if o.numel > 1]
        return min(map(power_of_two_in, (*apart, *alignments, 16)))

    def _beside(self) -> int:
        """Neighbouring elements that a thread may load at once."""
        return max(self._aligned() // self.x.element.itemsize, 1)

    def _at_once(self) -> bool:
        """Whether a thread loads its lines whole, side by side, before it accumulates any of their elements."""
        beside = self.across is not None and self.tree is None and self.x.element.itemsize <= 4
        return beside and 1 < self.n <= AT_ONCE and self._aligned() >= 16

    def _pieces(self, tile: Tile) -> int:
        """1 if lines of several dimensions consist of contiguous pieces of whole blocks; 2 if a block has elements of
        two rows of the innermost dimension at most; else 0."""
        several = self.tree is None and self.across is None and not self.rowed and len(self.reduced) > 1
        if not several or self.reduced[-1].size < tile.block:
            return 0
        return 1 if self._is_unit(self.reduced[-1]) and self.reduced[-1].size % tile.block == 0 else 2

    def _vectors(self, block: int) -> tuple[int, ...]:
        """Elements per load of each operand, if lines have several dimensions of which the innermost is contiguous."""

        def vector(o: Operand, strides: list[int | Along]) -> int:
            *outer, inner = strides
            if inner != 1:
                return 1
            multiples = [o.layout.stride_multiple if isinstance(s, Along) else power_of_two_in(s) for s in outer]
            return min(16 // o.element.itemsize, block, power_of_two_in(self.reduced[-1].size), *multiples)

        if self.unit or self.own or self.across is not None or not self.reduced:
            return (1,) * len(self.reads)
        return tuple(vector(o, [d.reads[i] for d in self.reduced]) for i, o in enumerate(self.reads))

    def _shift(self, tile: Tile) -> int:
        """Elements of a vector, if lines of several blocks (so that a tile has one line), or lines that are read at
        once, may begin at any; else 1."""
        vector = 16 // self.x.element.itemsize
        if self.rowed:
            return vector
        if self.once:
            return 1 if self._aligned() >= 16 else vector
        apart = (self.x.alignment, *(distance(self.x, d.reads[self._lead]) for d in self.kept))
        aligned = all(nbytes % 16 == 0 for nbytes in apart)
        worth = vector > (1 if self.x.alignment >= 16 else 2)  # (of 8 bytes, loads of one element are wide enough)
        long = self.tree is None and self.unit and self.n > tile.block and worth and tile.warps == WARPS
        return vector if long and not aligned and self.kind.accumulates in TURNED else 1

    def _ahead(self, tile: Tile) -> bool:
        """Whether the elements of a block are loaded before those of the one before are accumulated.

        ptxas keeps few loads ahead of what takes several instructions an element: narrow loads wait for each other
        then, and so do those of few threads. It costs registers, and other accumulations are not faster for it.
        """
        if self._at_once() or self.waves:
            return False
        narrow = self._aligned() < 16 and self._shift(tile) == 1
        if self.kind.accumulates in (do.MAX, do.MIN, do.ENDS):
            return self.kind.maps is do.PLAIN and (self.across is not None or (narrow and self.unit))
        return narrow and self.across is not None and self.kind.accumulates in (do.MOMENTS, do.EXPONENTIALS)

    def _group(self, tile: Tile) -> int:
        """Blocks that are loaded before the first of them is accumulated, unless a chunk has fewer.

        LLVM unrolls loops of sums and products, but only twice, and no longer ones. Of sums of bytes, and of rows, only
        rows of which every few are read gain by it. Moments of rows that begin between vectors are loaded element by
        element, and few of their loads would wait together.
        """
        if self.waves:
            return WAVE_GROUP
        if self.tree is not None or self.once or self.rowed or self._shift(tile) > 1 or self._ahead(tile):
            return 1
        if self._at_once():
            return self.n
        long = self.kind.accumulates in (do.MOMENTS, do.EXPONENTIALS, *POSITIONS)
        item, beside = self.x.element.itemsize, self.across is not None and self._aligned() >= 16
        moments = self.kind.accumulates is do.MOMENTS and self.unit and tile.rows == 1 and self._aligned() < 16
        pieces = long and self._pieces(tile) == 1
        if self.turns == 1 and not (beside and (long or item > 1)) and not pieces and not moments:
            return 1
        most = LIGHT_BYTES if self.light and self.turns == 1 else GROUP_BYTES
        group = max(most // max(tile.rows * tile.block * item // (32 * tile.warps), 1), 1)
        return min(group, max(self.n // tile.block, 1)) if moments else group

    def _read_beside(self) -> int:
        """Neighbouring lines that are all read if one exists: they end with the last line, or with its vector in every
        operand."""
        if self.across is None or not self._is_unit(self.across):
            return 1
        if self.turns > 1:
            return self._beside()
        steps = zip(self.reads, map(self._row_step, range(len(self.reads))), strict=True)
        items = [o.element.itemsize if step == STEPS[1] else 16 for o, step in steps if step != STEPS[0]]
        return max(power_of_two_in(self.across.size), self._aligned() // max(items))

    def _row_step(self, i: int) -> int:
        """How the offset of operand ``i`` changes along the lines of a tile."""
        if self.across is not None:
            return step_along([self.across.reads[i]])
        return STEPS[2 if any(d.reads[i] != 0 for d in self.kept) else 0]

    def _column_step(self, i: int) -> int:
        """How the offset of operand ``i`` changes along a line."""
        return step_along([d.reads[i] for d in self.reduced])
