"""``rows`` of the losses.

* cross_entropy: a program holds whole rows in registers.
* nll_loss: a program reads the target's element of many rows.
* scale_gradient: programs scale blocks of rows that are not promised packed.
"""

from __future__ import annotations

from triplan.backends.runtime.launch import Arg, Launch
from triplan.backends.triton.common import bounds, card
from triplan.backends.triton.common.rows import FEW_WARPS_FROM
from triplan.backends.triton.common.rows_entries import WholeRows
from triplan.backends.triton.common.tiles import Tile
from triplan.backends.triton.losses import rows_kernels as kernels
from triplan.backends.triton.losses.elements import BLOCK, SMALL, SMALL_BLOCK, SMALL_WARPS, ScaleElements
from triplan.backends.triton.losses.shared import LEAST_VECTOR, CrossEntropyEntry, LossEntry
from triplan.descriptors import CrossEntropyDescriptor, NllLossDescriptor, Operand, ScaleGradientDescriptor
from triplan.sku import SUPPORTED, PrecisionGuarantee, Support, Target

#: Microseconds that tiles of many short rows take longer than a loop where rows begin between vectors: on an H200
#: 8 x 63 bf16 take 7.1 us, and looped 4.8.
SEVERAL_US = 1.0
#: Tiles of scale_gradient where neighbouring rows are adjacent in all operands, and in some; the second of each if
#: there are fewer elements than SMALL, so that every multiprocessor has work. Untuned.
ACROSS_TILES = (Tile(512, 8, 8), Tile(128, 8, 4))
CROSSED_TILES = (Tile(64, 64, 8), Tile(32, 32, 4))
#: Elements of 16 bits that a thread has of rows with gaps, so that enough bytes are in flight. Untuned.
GAPPED_EACH = 16
#: Elements of a tile of several such rows. Untuned.
GAPPED = 2048


class CrossEntropyRows(WholeRows, CrossEntropyEntry, ops=CrossEntropyDescriptor.ops()):
    which, longest, narrow_above = (kernels.cross_entropy_rows_kernel,), (8192,), (8192,)

    def us(self, target: Target) -> float:
        several = self.rows.unit and not self.rows.vectors and self.tile.block <= FEW_WARPS_FROM
        return super().us(target) + (SEVERAL_US if several else 0.0)

    def narrow(self) -> bool:
        """A gradient would otherwise read elements again. (Smoothing would need as many registers for weights.)"""
        return super().narrow() and self.desc.gradient and not self.smoothing


class NllLossRows(WholeRows, LossEntry, ops=NllLossDescriptor.ops()):
    elementwise = True

    def find_tile(self) -> Tile:
        n, alone = max(self.rows.n, 1), self.sum_tile()
        return Tile(alone.block, n, alone.warps) if self.reduces() else Tile(128, n, 4)

    def reduces(self) -> bool:
        """One program does, which takes less time than a launch. As in ``loss_sum_kernel``, each thread has a row: the
        order of additions is the same."""
        return self.desc.reduced and self.rows.outer == 1 and self.rows.count > 0 and self.few

    def main(self) -> list[Launch]:
        absent = () if self.reduces() else ("loss", "share", "counted")
        return [self.launch(kernels.nll_loss_kernel, args=dict.fromkeys(absent))]

    def us(self, target: Target) -> float:
        # Sectors of a target and of an element. (``rank`` counts the launch.)
        return self.rows.count * 64 / card.BYTES_PER_US - card.LAUNCH_US

    def guaranteed(self, o: Operand) -> PrecisionGuarantee:
        """One product a row."""
        each = o.name == "losses"
        how = (2, 0) if each else (self.roundings_over_rows(),) * 2
        return bounds.rounded(o.element, self.compute, *how, batch=each, order=each)


class ScaleRows(ScaleElements, ops=ScaleGradientDescriptor.ops()):
    name, which, along = "rows", (kernels.scale_gradient_rows_kernel,), True
    programs = WholeRows.programs

    def find_tile(self) -> Tile:
        small = self.desc.operand("dx").numel < SMALL
        if (self.rows.across or self.rows.crossed) and self.rows.lanes >= CROSSED_TILES[0].rows:
            return (ACROSS_TILES if self.rows.across else CROSSED_TILES)[small]
        if small and self.rows.n > SMALL_BLOCK:
            return Tile(1, SMALL_BLOCK, SMALL_WARPS)
        tile = self.rows.whole_tile(BLOCK) or self.rows.block_tile()
        if small or self.element.itemsize > 2 or not self.rows.gapped or self.rows.crossed:
            return tile
        rows = max(GAPPED // tile.block, 1)
        return Tile(rows, tile.block, max(rows * tile.block // (32 * GAPPED_EACH), 1))

    def arguments(self) -> dict[str, Arg]:
        # (Where the gradient cannot be stored by vectors, loads by vectors gain nothing.)
        stores = self.rows.vector_bytes(self.desc.operand("dx")) >= LEAST_VECTOR
        return super().arguments() | self.rows.sizes(turned=self.rows.crossed and stores)

    def launches(self, target: Target) -> list[Launch]:
        """A program for each tile, which takes less time than a loop; but few where they may have nothing to do."""
        return super().launches(target) if self.desc.in_place else super(ScaleElements, self).launches(target)

    def supports(self, target: Target) -> Support:
        return SUPPORTED if self.desc.input_shape else Support.no("a scalar has no rows")

    def rank(self, target: Target) -> float:
        return 1.2 * super().rank(target)  # addresses are computed, and loads may be narrow
