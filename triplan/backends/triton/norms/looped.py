"""``looped`` of the norms: a program loops along one row of any length.

Backward, a second launch accumulates the gradients of weight and bias, column by column.
"""

from __future__ import annotations

from typing import Any

from triplan.backends.runtime.launch import Int, Launch
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.rows import Tile, registers_for
from triplan.backends.triton.common.rows_entries import LoopedRows, is_backward
from triplan.backends.triton.norms import looped_kernels as kernels
from triplan.backends.triton.norms.parameters_kernels import norm_parameters_kernel
from triplan.backends.triton.norms.shared import OPS, NormEntry, gradients, is_centred, operands_read_twice
from triplan.descriptors.norms import NormDescriptor
from triplan.sku import ElementKind, Target


class NormLooped(LoopedRows[NormDescriptor], NormEntry):
    def tile(self, desc: NormDescriptor) -> Tile:
        """By sweeps on an H200: what registers have room for beside a row's sums. A program has one row."""
        r, size, centred, operands = self.rows(desc), desc.element.itemsize, is_centred(desc), operands_read_twice(desc)
        if r.across:
            return r.block_tile(desc.element, operands, alone=True)
        if is_backward(desc):
            return r.loop_tile(desc.element, 32 if centred and size < 8 else 16, operands)
        if operands > 1:
            return r.loop_tile(desc.element, 8 if centred and size == 2 else 16, operands)
        if centred and size == 4:
            return r.loop_tile(desc.element, 64, most_warps=16)
        return r.loop_tile(desc.element, 16 if centred and size == 8 else 32)

    def us(self, desc: NormDescriptor, tile: Tile, target: Target) -> float:
        accumulated = LAUNCH_US + self.rows(desc).count * self.traffic(desc).first / BYTES_PER_US
        return super().us(desc, tile, target) + (accumulated if gradients(desc) else 0.0)

    def main(self, desc: NormDescriptor, tile: Tile, unroll: int = 0) -> list[Launch]:
        """``unroll``: blocks loaded at a time; by default what ``Rows.unroll`` allows."""
        r, grid = self.rows(desc), self.programs(desc, tile)
        unroll = unroll or r.unroll(tile, 4 if r.vectors else max(2 // operands_read_twice(desc), 1))
        how: dict[str, Any] = {
            "UNROLL": unroll,
            "VECTOR": r.vector(desc.element, tile),
            "FULL": r.n % (tile.block * unroll) == 0,
        }
        if not is_backward(desc):
            # (Left alone, ptxas may spill a few registers of f64's to fit another program.)
            most = registers_for(tile, 1) if desc.element is ElementKind.F64 else 0
            return [self.launch(desc, kernels.norm_looped_kernel, grid, tile, registers=most, **how)]
        first = self.launch(desc, kernels.norm_backward_looped_kernel, grid, tile, **how)
        if not gradients(desc):
            return [first]
        strip, (programs, args) = self.strip_tile(desc), self.accumulating(desc)
        blocks = -(-r.n // strip.block)
        args["blocks"] = Int(blocks)
        return [first, self.launch(desc, norm_parameters_kernel, programs * blocks, strip, args)]


LOOPED = NormLooped()
LOOPED.register(*OPS)
