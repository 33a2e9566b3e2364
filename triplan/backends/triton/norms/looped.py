"""``looped`` of the norms: a program loops along one row of any length.

Backward, a second launch accumulates the gradients of weight and bias, column by column.
"""

from __future__ import annotations

from typing import Any

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.rows_entries import LoopedRows
from triplan.backends.triton.common.tiles import Tile, registers_for
from triplan.backends.triton.norms import looped_kernels as kernels
from triplan.backends.triton.norms.shared import OPS, NormEntry
from triplan.sku import ElementKind, Target


class NormLooped(LoopedRows, NormEntry, ops=OPS):
    def find_tile(self) -> Tile:
        """By sweeps on an H200: what registers have room for beside a row's sums. A program has one row."""
        r, size, centred, operands = self.rows, self.element.itemsize, self.centred, self.read_first
        if r.across:
            return r.block_tile(operands, alone=True)
        if self.backward:
            return r.loop_tile(32 if centred and size < 8 else 16, operands)
        if operands > 1:
            return r.loop_tile(8 if centred and size == 2 else 16, operands)
        held = {2: 32, 4: 64, 8: 16}[size] if centred else 32
        return r.loop_tile(held, most_warps=16 if held == 64 else 0)

    def us(self, target: Target) -> float:
        return super().us(target) + (self.accumulate_us(target) if self.gradients else 0.0)

    def main(self, unroll: int = 0) -> list[Launch]:
        """``unroll``: blocks loaded at a time; by default what ``Rows.unroll`` allows."""
        r, tile = self.rows, self.tile
        unroll = unroll or r.unroll(tile, 4 if r.vectors else max(2 // self.read_first, 1))
        how: dict[str, Any] = {"UNROLL": unroll, "VECTOR": r.vector(tile), "FULL": r.n % (tile.block * unroll) == 0}
        if not self.backward:
            # (Left alone, ptxas may spill a few registers of f64's to fit another program.)
            most = registers_for(tile, 1) if self.element is ElementKind.F64 else 0
            return [self.launch(kernels.norm_looped_kernel, registers=most, **how)]
        accumulated = [self.accumulate()] if self.gradients else []
        return [self.launch(kernels.norm_backward_looped_kernel, **how), *accumulated]
