"""``looped`` of the norms: a program loops along one row of any length.

Backward, a second launch accumulates the gradients of weight and bias, column by column.
"""

from __future__ import annotations

from typing import Any

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.rows import LONG
from triplan.backends.triton.common.rows_entries import LoopedRows
from triplan.backends.triton.common.tiles import Tile, registers_for
from triplan.backends.triton.norms import looped_kernels as kernels
from triplan.backends.triton.norms.shared import OPS, NormEntry
from triplan.sku import ElementKind, Target

#: Elements a microsecond where no vectors are loaded, forward, backward, and backward of rows longer than LONG.
SINGLE_PER_US = (3e5, 3e5, 1.5e5)


class NormLooped(LoopedRows, NormEntry, ops=OPS):
    which = (kernels.norm_looped_kernel, kernels.norm_backward_looped_kernel)
    loop_us = 0.45

    def find_tile(self) -> Tile:
        """By sweeps on an H200: what registers have room for beside a row's sums."""
        r, size, centred, operands = self.rows, self.element.itemsize, self.centred, len(self.read_first)
        if self.backward:
            return r.loop_tile(32 if centred and size < 8 else 16, operands)
        if operands > 1:
            return r.loop_tile(8 if centred and size == 2 else 16, operands)
        held = {2: 32, 4: 64, 8: 16}[size] if centred else 32
        return r.loop_tile(held, most_warps=16 if held == 64 else 0)

    def us(self, target: Target) -> float:
        single = SINGLE_PER_US[0 if not self.backward else 2 if self.rows.n > LONG else 1]
        us = max(super().us(target), self.single_us(single))
        return us + (self.accumulate_us(target) if self.gradients else 0.0)

    def unroll(self) -> int:
        return self.rows.unroll(self.tile, 4 if self.rows.vectors else max(2 // len(self.read_first), 1))

    def constants(self) -> dict[str, Any]:
        return {**super().constants(), "FULL": self.rows.n % (self.tile.block * self.unroll()) == 0}

    def main(self) -> list[Launch]:
        # (Left alone, ptxas may spill a few registers of f64's to fit another program.)
        most = registers_for(self.tile, 1) if self.element is ElementKind.F64 and not self.backward else 0
        accumulated = [self.accumulate()] if self.gradients else []
        return [self.launch(self.which[self.backward], registers=most), *accumulated]
