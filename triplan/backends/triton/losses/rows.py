"""``rows`` of the losses.

* cross_entropy: a program holds whole rows in registers.
* nll_loss: a program reads the target's element of many rows.
* scale_gradient: programs scale blocks of rows that are not promised packed.
"""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.runtime.launch import Int, Launch
from triplan.backends.triton.common.card import BYTES_PER_US
from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.common.rows import Tile, registers_for
from triplan.backends.triton.common.rows_entries import MOST_PROGRAMS, WholeRows
from triplan.backends.triton.losses import rows_kernels as kernels
from triplan.backends.triton.losses.elements import BLOCK, ScaleEntry
from triplan.backends.triton.losses.shared import CrossEntropyEntry, LossEntry, rounded, smooths
from triplan.descriptors import CrossEntropyDescriptor, NllLossDescriptor, ScaleGradientDescriptor
from triplan.sku import SUPPORTED, ElementKind, PrecisionGuarantee, Support, Target, interpreting

#: Elements of a row at most, in registers as the compute element.
MOST = 8192
#: Elements of a row at most where threads hold 16-bit elements as they are read, and so many each.
MOST_NARROW = 32768
NARROW_EACH = 128


class CrossEntropyRows(WholeRows[CrossEntropyDescriptor], CrossEntropyEntry):
    def tile(self, desc: CrossEntropyDescriptor) -> Tile | None:
        r, block = self.rows(desc), ceil_power(self.rows(desc).n)
        if self.holds_narrow(desc, block) and r.vectors:
            return Tile(1, block, block // (32 * NARROW_EACH))
        return r.whole_tile(desc.element, MOST // (4 if desc.element is ElementKind.F64 else 1))

    def holds_narrow(self, desc: CrossEntropyDescriptor, block: int) -> bool:
        """Whether threads hold elements as they are read: a gradient would otherwise read them again. (Smoothing would
        need as many registers again for weights.)"""
        fits = MOST < block <= MOST_NARROW and desc.element.itemsize == 2
        return fits and desc.gradient and not smooths(desc)

    def main(self, desc: CrossEntropyDescriptor, tile: Tile) -> list[Launch]:
        narrow = self.holds_narrow(desc, tile.block) and not interpreting()
        most, which = min(registers_for(tile, 2), 128) if narrow else 0, kernels.cross_entropy_rows_kernel
        return [self.launch(desc, which, self.programs(desc, tile), tile, registers=most, NARROW=narrow)]


class NllLossRows(WholeRows[NllLossDescriptor], LossEntry[NllLossDescriptor]):
    elementwise = True

    def tile(self, desc: NllLossDescriptor) -> Tile:
        return Tile(128, 1, 4)

    def us(self, desc: NllLossDescriptor, tile: Tile, target: Target) -> float:
        return self.rows(desc).count * 64 / BYTES_PER_US  # sectors of a target and of an element

    def main(self, desc: NllLossDescriptor, tile: Tile) -> list[Launch]:
        return [self.launch(desc, kernels.nll_loss_kernel, self.programs(desc, tile), tile)]

    def guarantee(self, desc: NllLossDescriptor) -> Mapping[str, PrecisionGuarantee]:
        """One product a row."""
        over_rows = self.roundings_over_rows(desc)
        found = {"losses": rounded(desc, 2, 0, rows=True, batch=True, order=True)}
        return found | ({"loss": rounded(desc, over_rows, over_rows)} if desc.reduced else {}) | self.status(desc)


class ScaleRows(ScaleEntry):
    name = "rows"

    def tile(self, desc: ScaleGradientDescriptor) -> Tile:
        return self.rows(desc).whole_tile(desc.element, BLOCK) or self.rows(desc).block_tile(desc.element)

    def programs(self, desc: ScaleGradientDescriptor, tile: Tile) -> int:
        return self.rows(desc).programs(tile.rows) * -(-self.rows(desc).n // tile.block)

    def supports(self, desc: ScaleGradientDescriptor, target: Target) -> Support:
        if not desc.input_shape:
            return Support.no("a scalar has no rows")
        blocks = self.programs(desc, self.tile(desc))
        return SUPPORTED if blocks <= MOST_PROGRAMS else Support.no(f"{blocks} blocks; at most {MOST_PROGRAMS} fit")

    def us(self, desc: ScaleGradientDescriptor, tile: Tile, target: Target) -> float:
        return 1.2 * super().us(desc, tile, target)  # addresses are computed, and loads may be narrow

    def main(self, desc: ScaleGradientDescriptor, tile: Tile) -> list[Launch]:
        tiles = self.programs(desc, tile)
        return [self.launch(desc, kernels.scale_gradient_rows_kernel, tiles, tile, {"tiles": Int(tiles)})]


ROWS = CrossEntropyRows()
ROWS.register("cross_entropy")
NllLossRows().register("nll_loss")
ScaleRows().register("scale_gradient")
