"""``blocks`` of the losses' backward ops: each program writes one block of the gradient; no row is reduced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.rows import Tile, waves_us
from triplan.backends.triton.losses import blocks_kernels as kernels
from triplan.backends.triton.losses.shared import L, LossEntry, is_mean, rounded, smooths
from triplan.descriptors import CrossEntropyBackwardDescriptor, NllLossBackwardDescriptor
from triplan.sku import ElementKind, PrecisionGuarantee, Target

#: Elements of a row at most that a program holds whole, of several rows where they are shorter. Untuned.
MOST = 4096


class LossBlocks(LossEntry[L]):
    name = "blocks"
    which: Any

    def programs(self, desc: L, tile: Tile) -> int:
        return self.rows(desc).programs(tile.rows) * max(-(-self.rows(desc).n // tile.block), 1)

    def idle(self, desc: L) -> bool:
        """(Rows of no classes have a status: their targets are bad.)"""
        return self.rows(desc).count == 0

    def us(self, desc: L, tile: Tile, target: Target) -> float:
        return waves_us(self.rows(desc).count, self.traffic(desc).first + self.traffic(desc).second, target)

    def main(self, desc: L, tile: Tile) -> list[Launch]:
        return [self.launch(desc, self.which, self.programs(desc, tile), tile)]

    def gradient(self, desc: L, relative: int, of_terms: int) -> Mapping[str, PrecisionGuarantee]:
        """The guarantee, with the roundings of a denominator."""
        exact = self.counts_exactly(desc)
        relative += 0 if exact else self.roundings_over_rows(desc)
        order = exact and not self.roundings_over_classes(desc)
        return {"dx": rounded(desc, relative, of_terms, batch=not is_mean(desc), order=order)} | self.status(desc)


class CrossEntropyBlocks(LossBlocks[CrossEntropyBackwardDescriptor]):
    which = kernels.cross_entropy_backward_kernel

    def tile(self, desc: CrossEntropyBackwardDescriptor) -> Tile:
        r, most = self.rows(desc), 2 * MOST // (4 if desc.element is ElementKind.F64 else 1)
        tile = r.whole_tile(desc.element, most)
        return r.block_tile(desc.element) if tile is None or tile.block > MOST else tile

    def numerics(self, desc: CrossEntropyBackwardDescriptor) -> str:
        """Elements are independent: neither tile nor layout changes them, but for the sum of the classes' weights."""
        summed = smooths(desc) and desc.weight
        weight = f".weight{min(desc.operand('weight').alignment, 16)}" if summed else ""
        return f"{desc.op}.{self.name}.v1.{desc.element}{weight}"

    def guarantee(self, desc: CrossEntropyBackwardDescriptor) -> Mapping[str, PrecisionGuarantee]:
        """exp(x - lse): the difference has a rounding of the size of lse where the exponential is not small, and lse
        the forward op's roundings."""
        roundings = 24 + self.roundings_over_classes(desc)
        return self.gradient(desc, roundings, roundings)


class NllLossBlocks(LossBlocks[NllLossBackwardDescriptor]):
    which = kernels.nll_loss_backward_kernel
    elementwise = True

    def tile(self, desc: NllLossBackwardDescriptor) -> Tile:
        return self.rows(desc).whole_tile(desc.element, MOST) or self.rows(desc).block_tile(desc.element)

    def guarantee(self, desc: NllLossBackwardDescriptor) -> Mapping[str, PrecisionGuarantee]:
        """Products."""
        return self.gradient(desc, 8, 0)


CrossEntropyBlocks().register("cross_entropy_backward")
NllLossBlocks().register("nll_loss_backward")
