"""``split`` of the norms: each block of a row has its own program, for few and long rows.

Forward, the first launch reduces blocks of rows to statistics. Backward, the kernel that accumulates the gradients of
weight and bias reduces blocks of each row on its way, so that no operand is read a third time.
"""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.card import LAUNCH_US
from triplan.backends.triton.common.rows_entries import SplitRows
from triplan.backends.triton.common.tiles import Tile, registers_for
from triplan.backends.triton.norms import split_kernels as kernels
from triplan.backends.triton.norms.parameters_kernels import norm_parameters_kernel
from triplan.backends.triton.norms.shared import OPS, NormEntry
from triplan.sku import ElementKind, Support, Target

#: Elements a microsecond where no vectors are loaded.
SINGLE_PER_US = 4.2e5


class NormSplit(SplitRows, NormEntry, ops=OPS):
    versions, overlaps = (2, 4), True
    pairs = (
        (kernels.norm_partial_kernel, kernels.norm_finish_kernel),
        (norm_parameters_kernel, kernels.norm_backward_finish_kernel),
    )

    def find_tile(self) -> Tile:
        return self.partials_tile() if self.backward else super().find_tile()

    def finish(self) -> tuple[Tile, int]:
        tile = super().find_tile()
        return tile, max(-(-self.rows.n // tile.block), 1)

    def partials(self) -> tuple[str, ...]:
        names = ("projections", "totals") if self.backward else ("squares", "centres", "rests")
        return names if self.centred else names[:1]

    def supports(self, target: Target) -> Support:
        if self.rows.across:
            return Support.no("neighbouring rows are adjacent in memory: their elements are read together")
        return super().supports(target)

    def reduce_us(self, target: Target) -> float:
        return self.accumulate_us(target) if self.backward else super().reduce_us(target)

    def us(self, target: Target) -> float:
        busy = LAUNCH_US + self.busy_us(self.programs(), target)
        return max(super().us(target), busy, self.single_us(SINGLE_PER_US))

    def reduce(self) -> Launch:
        # In f64, sums along rows and columns leave room for two programs; left alone, ptxas may spill to fit a fifth.
        registers = registers_for(self.tile, 2) if self.element is ElementKind.F64 else 0
        return self.accumulate(registers) if self.backward else super().reduce()
