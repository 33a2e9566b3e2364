"""``looped`` of the norms: a program loops along one row of any length.

Backward, a second launch accumulates the gradients of weight and bias, column by column.
"""

from __future__ import annotations

from dataclasses import replace

from triplan.backends.runtime.launch import Arg, Int, Launch
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.rows import Tile, registers_for
from triplan.backends.triton.common.rows_entries import LoopedRows, is_backward
from triplan.backends.triton.norms import looped_kernels as kernels
from triplan.backends.triton.norms.parameters_kernels import norm_parameters_kernel
from triplan.backends.triton.norms.shared import (
    NORMS,
    OPS,
    gradients,
    is_centred,
    operands_read_twice,
    strip_tile,
)
from triplan.descriptors.norms import NormDescriptor
from triplan.sku import ElementKind, Target


class NormLooped(LoopedRows[NormDescriptor]):
    family = NORMS

    def tile(self, desc: NormDescriptor) -> Tile:
        """By sweeps on an H200: what registers have room for beside a row's sums."""
        element, centred, operands = desc.element, is_centred(desc), operands_read_twice(desc)
        r, size = NORMS.rows(desc), desc.element.itemsize
        if is_backward(desc):
            return r.loop_tile(element, 32 if centred and size < 8 else 16, operands)
        if operands > 1:
            return r.loop_tile(element, 8 if centred and size == 2 else 16, operands)
        if centred and size == 4:
            return r.loop_tile(element, 64, most_warps=16)
        return r.loop_tile(element, 16 if centred and size == 8 else 32)

    def shared_tile(self, desc: NormDescriptor, tile: Tile) -> Tile:
        return strip_tile(desc)

    def programs(self, desc: NormDescriptor, tile: Tile) -> int:
        return NORMS.rows(desc).count

    def us(self, desc: NormDescriptor, tile: Tile, target: Target) -> float:
        found = super().us(desc, replace(tile, rows=1), target)
        if gradients(desc):
            found += LAUNCH_US + NORMS.rows(desc).count * NORMS.traffic(desc).first / BYTES_PER_US
        return found

    def main(self, desc: NormDescriptor, tile: Tile, unroll: int = 0) -> list[Launch]:
        """``unroll``: blocks loaded at a time; by default as many as registers have room for."""
        r, grid = NORMS.rows(desc), self.programs(desc, tile)
        unroll = unroll or r.unroll(tile, 4 if r.vectors else max(2 // operands_read_twice(desc), 1))
        full = r.n % (tile.block * unroll) == 0
        if not is_backward(desc):
            which, vector = kernels.norm_looped_kernel, r.vector(desc.element, tile)
            # (Left alone, ptxas may spill a few registers of f64's to fit another program.)
            most = registers_for(tile, 1) if desc.element is ElementKind.F64 else 0
            return [self.launch(desc, which, grid, tile, max_registers=most, UNROLL=unroll, VECTOR=vector, FULL=full)]
        which, vector = kernels.norm_backward_looped_kernel, r.vector(desc.element, tile)
        first = self.launch(desc, which, grid, tile, UNROLL=unroll, VECTOR=vector, FULL=full)
        if not gradients(desc):
            return [first]
        strip = strip_tile(desc)
        partials, groups = NORMS.partials(desc, strip)
        blocks = -(-r.n // strip.block)
        args: dict[str, Arg] = {"each": Int(groups), "blocks": Int(blocks), **NORMS.lone_partials(desc, strip)}
        return [first, self.launch(desc, norm_parameters_kernel, partials * blocks, strip, args)]


LOOPED = NormLooped()
LOOPED.register(*OPS)
