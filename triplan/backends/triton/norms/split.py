"""``split`` of the norms: each block of a row has its own program, for few and long rows.

Forward, the first launch reduces blocks of rows to statistics. Backward, the kernel that accumulates the gradients of
weight and bias reduces blocks of each row on its way, so that no operand is read a third time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from triplan.backends.runtime.launch import Int, Launch
from triplan.backends.triton.common.card import LAUNCH_US
from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.common.rows import Tile, registers_for, waves_us
from triplan.backends.triton.common.rows_entries import SplitRows, is_backward
from triplan.backends.triton.norms import split_kernels as kernels
from triplan.backends.triton.norms.parameters_kernels import norm_parameters_kernel
from triplan.backends.triton.norms.shared import OPS, NormEntry, is_centred, operands_read_twice
from triplan.descriptors.norms import NormDescriptor
from triplan.sku import ElementKind, Support, Target


class NormSplit(SplitRows[NormDescriptor], NormEntry):
    def tile(self, desc: NormDescriptor) -> Tile:
        return self.strip_tile(desc) if is_backward(desc) else self.finish_tile(desc)

    def finish_tile(self, desc: NormDescriptor) -> Tile:
        return self.rows(desc).block_tile(desc.element, operands_read_twice(desc))

    def finish_blocks(self, desc: NormDescriptor) -> int:
        return max(-(-self.rows(desc).n // self.finish_tile(desc).block), 1)

    def kernels(self, desc: NormDescriptor) -> tuple[Any, Any]:
        if is_backward(desc):
            return norm_parameters_kernel, kernels.norm_backward_finish_kernel
        return kernels.norm_partial_kernel, kernels.norm_finish_kernel

    def partials(self, desc: NormDescriptor) -> Sequence[str]:
        names = ("projections", "totals") if is_backward(desc) else ("squares", "centres", "rests")
        return names if is_centred(desc) else names[:1]

    def supports(self, desc: NormDescriptor, target: Target) -> Support:
        if self.rows(desc).across:
            return Support.no("neighbouring rows are adjacent in memory: their elements are read together")
        return super().supports(desc, target)

    def reduce_us(self, desc: NormDescriptor, tile: Tile, target: Target) -> float:
        if not is_backward(desc):
            return super().reduce_us(desc, tile, target)
        blocks, (partials, groups) = self.blocks(desc), self.partial_sums(desc)
        return waves_us(partials * blocks, groups * tile.rows * self.traffic(desc).first / blocks, target)

    def us(self, desc: NormDescriptor, tile: Tile, target: Target) -> float:
        return super().us(desc, tile, target) - LAUNCH_US  # the launches overlap

    def launches(self, desc: NormDescriptor, target: Target) -> Sequence[Launch]:
        """Each launch is placed while the one ahead of it ends, as all are short."""
        return [replace(launch, overlaps=True) for launch in super().launches(desc, target)]

    def main(self, desc: NormDescriptor, tile: Tile) -> list[Launch]:
        parts, pieces, (reduce, finish) = self.blocks(desc), self.finish_blocks(desc), self.kernels(desc)
        grid, last = self.rows(desc).count * pieces, self.finish_tile(desc)
        args, most = {"blocks": Int(pieces), "parts": Int(parts)}, {"BLOCKS": ceil_power(pieces)}
        written = self.launch(desc, finish, grid, last, args, **most, PARTS=ceil_power(parts))
        if not is_backward(desc):
            return [self.launch(desc, reduce, grid, tile, args), written]
        programs, given = self.accumulating(desc)
        # In f64, sums along rows and columns leave room for two programs; left alone, ptxas may spill to fit a fifth.
        registers = registers_for(tile, 2) if desc.element is ElementKind.F64 else 0
        given["blocks"] = Int(parts)
        return [self.launch(desc, reduce, programs * parts, tile, given, registers=registers), written]


SPLIT = NormSplit()
SPLIT.register(*OPS)
