"""``blocks`` of the losses' backward ops: each program writes one block of the gradient; no row is reduced."""

from __future__ import annotations

from typing import Any

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.rows import Tile, waves_us
from triplan.backends.triton.common.rows_entries import Entry
from triplan.backends.triton.losses import blocks_kernels as kernels
from triplan.backends.triton.losses.shared import LOSSES, elementwise_numerics, sums_weights
from triplan.descriptors.losses import LossDescriptor
from triplan.sku import ElementKind, Target

#: Elements of a row at most that a program holds whole, of several rows where they are shorter. Untuned.
MOST = 4096


class LossBlocks(Entry[LossDescriptor]):
    name = "blocks"
    family = LOSSES
    which: Any

    def programs(self, desc: LossDescriptor, tile: Tile) -> int:
        r = LOSSES.rows(desc)
        return r.programs(tile.rows) * max(-(-r.n // tile.block), 1)

    def idle(self, desc: LossDescriptor) -> bool:
        """(Rows of no classes have a status: their targets are bad.)"""
        return LOSSES.rows(desc).count == 0

    def us(self, desc: LossDescriptor, tile: Tile, target: Target) -> float:
        return waves_us(LOSSES.rows(desc).count, LOSSES.traffic(desc).second, target)

    def main(self, desc: LossDescriptor, tile: Tile) -> list[Launch]:
        return [self.launch(desc, self.which, self.programs(desc, tile), tile)]


class CrossEntropyBlocks(LossBlocks):
    which = kernels.cross_entropy_backward_kernel

    def tile(self, desc: LossDescriptor) -> Tile:
        r = LOSSES.rows(desc)
        tile = r.whole_tile(desc.element, 2 * MOST // (4 if desc.element is ElementKind.F64 else 1))
        return r.block_tile(desc.element) if tile is None or tile.block > MOST else tile

    def numerics(self, desc: LossDescriptor) -> str:
        """Elements are independent: neither tile nor layout changes them, but for the sum of the classes' weights."""
        weight = f".weight{min(desc.operand('weight').alignment, 16)}" if sums_weights(desc) else ""
        return f"{desc.op}.{self.name}.v1.{desc.element}{weight}"


class NllLossBlocks(LossBlocks):
    which = kernels.nll_loss_backward_kernel

    def tile(self, desc: LossDescriptor) -> Tile:
        r = LOSSES.rows(desc)
        return r.whole_tile(desc.element, MOST) or r.block_tile(desc.element)

    def numerics(self, desc: LossDescriptor) -> str:
        return elementwise_numerics(desc)


CrossEntropyBlocks().register("cross_entropy_backward")
NllLossBlocks().register("nll_loss_backward")
