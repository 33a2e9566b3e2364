"""``blocks`` of the losses' backward ops: each program writes one block of the gradient; no row is reduced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.common.tiles import Tile
from triplan.backends.triton.losses import blocks_kernels as kernels
from triplan.backends.triton.losses.elements import TILES
from triplan.backends.triton.losses.shared import LEAST_VECTOR, LossEntry
from triplan.descriptors import CrossEntropyBackwardDescriptor, NllLossBackwardDescriptor, Operand
from triplan.sku import ElementKind, PrecisionGuarantee

#: Elements of a row at most that a program holds whole, of several rows where they are shorter. Untuned.
MOST = 4096
#: Programs at least that have blocks of several rows instead of whole rows. Untuned; 21 are slower. (From one drawn
#: problem on an H200.)
BUSY = 64
#: Elements of a program where rows begin between two vectors, and the shortest such rows; and below how many elements
#: in all programs are small, so that every multiprocessor has work. Untuned.
FLAT_TILES, FLAT_FROM, SMALL_FLAT = (Tile(1, 8192, 8), TILES[1]), 64, 1 << 18
#: The tile of a row of at least as many elements that lie apart: parts of sectors are written close together.
#: Chosen on an H200, by runs that are not published.
STRIDED_TILE = Tile(1, 512, 4)


class LossBlocks(LossEntry):
    name = "blocks"
    #: Roundings relative to the result, and of its terms.
    roundings: ClassVar[tuple[int, int]]

    def block_tile(self) -> Tile:
        """A tile of a block of a row, or of several where neighbouring rows are adjacent and there are enough."""
        return self.rows.block_tile(crosses=self.rows.lanes >= self.rows.neighbours)

    def idle(self) -> bool:
        return self.rows.count == 0  # rows of no classes have a status: their targets are bad

    def guaranteed(self, o: Operand) -> PrecisionGuarantee:
        """``roundings``, and those of the classes' sum of weights and of a denominator."""
        classes, exact = self.roundings_over_classes(), self.counts_exactly()
        relative, of_terms = (n + classes for n in self.roundings)
        relative += 0 if exact else self.roundings_over_rows()
        order = exact and not classes
        return bounds.rounded(o.element, self.compute, relative, of_terms, batch=not self.mean, order=order)


class CrossEntropyBlocks(LossBlocks, ops=CrossEntropyBackwardDescriptor.ops()):
    which = (None, kernels.cross_entropy_backward_kernel)
    # exp(x - lse): the difference has a rounding of the size of lse where the exponential is not small, and lse the
    # forward op's roundings.
    roundings = (24, 24)

    def find_tile(self) -> Tile:
        r, blocks = self.rows, self.block_tile()
        tile = r.whole_tile(2 * MOST // (4 if self.element is ElementKind.F64 else 1))
        if tile is None or tile.block > MOST:
            return blocks
        # (One row of the operand in which neighbouring rows are adjacent has an element of each sector.)
        apart = r.crossed and tile.rows < r.neighbours <= r.lanes
        return blocks if apart and r.programs(blocks) >= BUSY else tile

    def constants(self) -> dict[str, Any]:
        r, x = self.rows, self.desc.operand("x")
        turned = self.tile.rows > 1 and r.is_adjacent(x) and r.vector_bytes(x) >= LEAST_VECTOR
        return {**super().constants(), "TURNED": turned}

    def numerics(self) -> str:
        """Elements are independent: neither tile nor layout changes them, but for the sum of the classes' weights."""
        weight = f".weight{min(self.desc.operand('weight').alignment, 16)}" if self.weighs else ""
        return f"{self.desc.op}.{self.name}.v{self.version}.{self.element}{weight}"


class NllLossBlocks(LossBlocks, ops=NllLossBackwardDescriptor.ops()):
    elementwise = True
    roundings = (8, 0)  # products

    def find_tile(self) -> Tile:
        if self.flat():
            tile = FLAT_TILES[self.rows.count * self.rows.n < SMALL_FLAT]
            return replace(tile, rows=ceil_power(tile.block // self.rows.n + 2))
        if self.rows.is_strided() and self.rows.n >= STRIDED_TILE.block:
            return STRIDED_TILE
        return self.rows.whole_tile(MOST) or self.block_tile()

    def flat(self) -> bool:
        """Whether all rows are filled as one, because vectors do not begin where rows do."""
        return self.rows.operands[0].layout.packed and self.rows.begins_anywhere(self.rows.n, FLAT_FROM)

    def programs(self) -> int:
        return -(-(self.rows.count * self.rows.n + 16) // self.tile.block) if self.flat() else super().programs()

    def main(self) -> list[Launch]:
        return [self.launch(kernels.nll_loss_backward_flat_kernel if self.flat() else kernels.nll_loss_backward_kernel)]
