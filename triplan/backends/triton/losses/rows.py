"""``rows`` of the losses.

* cross_entropy: a program holds whole rows in registers.
* nll_loss: a program reads the target's element of many rows.
* scale_gradient: programs scale blocks of rows that are not promised packed, or of their elements one by one.
"""

from __future__ import annotations

from triplan.backends.runtime.launch import Arg, Int, Launch
from triplan.backends.triton.common import bounds, card
from triplan.backends.triton.common.offsets import I32_LIMIT, extents, padded
from triplan.backends.triton.common.rows import FEW_WARPS_FROM
from triplan.backends.triton.common.rows_entries import WholeRows
from triplan.backends.triton.common.strides import Along, known_strides, stride_arg
from triplan.backends.triton.common.tiles import Tile
from triplan.backends.triton.losses import rows_kernels as kernels
from triplan.backends.triton.losses.elements import SMALL, TILES, ScaleElements
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
#: (elements in all, elements of a thread) at most, and warps, where elements are scaled one by one. Untuned.
POINTS, MOST_POINTS, POINT_WARPS = ((1 << 17, 1), (1 << 20, 2)), 4, 4


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
    name, along = "rows", True
    which = (kernels.scale_gradient_rows_kernel, kernels.scale_gradient_points_kernel)

    def find_tile(self) -> Tile:
        r, numel = self.rows, self.desc.operand("dx").numel
        small = numel < SMALL
        if self.scatters():
            each = next((each for most, each in POINTS if numel <= most), MOST_POINTS)
            return Tile(1, 32 * POINT_WARPS * each, POINT_WARPS)
        if (r.across or r.crossed) and r.lanes >= CROSSED_TILES[0].rows:
            tile = ACROSS_TILES[small] if r.across else CROSSED_TILES[small]
            # Half of the rows where a block of twice the columns is a whole row: of 65, the second block has one.
            wider = 2 if r.crossed and not small and tile.block < r.n <= 2 * tile.block else 1
            return Tile(tile.rows // wider, wider * tile.block, tile.warps)
        if small and r.n > TILES[1].block:
            return TILES[1]
        return r.whole_tile(TILES[0].block) or r.block_tile()

    def scatters(self) -> bool:
        """Whether no two elements are promised adjacent in some operand: nothing is gained by tiles of rows, whose ends
        would leave lanes idle and divide lines of memory between warps."""
        return self.rows.gapped and self.rows.is_strided() and self.desc.operand("dx").numel < I32_LIMIT

    def main(self) -> list[Launch]:
        return [self.launch(self.which[self.scatters()])]

    def is_turned(self) -> bool:
        """(Where the gradient cannot be stored by vectors, loads by vectors gain nothing.)"""
        return super().is_turned() and self.rows.vector_bytes(self.desc.operand("dx")) >= LEAST_VECTOR

    def arguments(self) -> dict[str, Arg]:
        return super().arguments() | (self.points() if self.scatters() else {})

    def points(self) -> dict[str, Arg]:
        """Extents, and the strides of each operand along them."""
        shape = self.desc.input_shape
        axes, found = [a for a, n in enumerate(shape) if n != 1], dict[str, Arg]()
        for name in ("unscaled", "dx"):
            o = self.desc.operand("dx" if self.desc.in_place else name)
            known = known_strides(o, len(shape))
            wide = any(isinstance(known[a], Along) for a in axes)
            strides = padded([stride_arg(o, known[a], wide) for a in axes], Int(0, wide, 16))
            found[f"{name}_strides"] = strides
        return {**found, "extents": extents((shape[a] for a in axes), False)}

    def programs(self) -> int:
        return super().programs() if self.scatters() else self.rows.programs(self.tile)

    def launches(self, target: Target) -> list[Launch]:
        """A program for each tile, which takes less time than a loop; but few where they may have nothing to do."""
        return super().launches(target) if self.desc.in_place else super(ScaleElements, self).launches(target)

    def supports(self, target: Target) -> Support:
        return SUPPORTED if self.desc.input_shape else Support.no("a scalar has no rows")

    def rank(self, target: Target) -> float:
        return 1.2 * super().rank(target)  # addresses are computed, and loads may be narrow
