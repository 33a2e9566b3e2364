"""``split`` of the norms: each block of a row has its own program, for few and long rows.

Forward, the first launch reduces blocks of rows to statistics. Backward, the kernel that accumulates the gradients of
weight and bias reduces blocks of each row on its way, so that no operand is read a third time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.rows_entries import SplitRows
from triplan.backends.triton.common.tiles import Tile, registers_for
from triplan.backends.triton.norms import split_kernels as kernels
from triplan.backends.triton.norms.parameters_kernels import norm_parameters_kernel
from triplan.backends.triton.norms.shared import OPS, NormEntry
from triplan.descriptors.norms import NormDescriptor
from triplan.sku import ElementKind, Target

#: Accesses of single elements in a microsecond where no vectors are loaded: forward, backward, and with gradients of
#: weight or bias; and backward of rows with gaps, and forward of centred ones, which have two sums. (This and what
#: follows: from drawn problems on an H200.)
SINGLE_PER_US, GAPPED_PER_US, CENTRED_PER_US = (1.7e6, 1.5e6, 1.1e6), 6e5, 1.4e6
#: Microseconds that programs take longer backward, with gradients of weight or bias or where rows are crossed: where
#: rows lie in several ways; and of contiguous rows, for each word that a thread loads by itself, and for each warp, as
#: these wait for each other.
ODD_US, ODD_WORD_US, ODD_WARP_US = 1.5, 0.02, 0.007
#: Elements of a short row, and microseconds of each launch after the first backward of rows of at most as many.
SHORT_ROW, LATER_US = 144, 0.35
#: Microseconds of the roots and quotients of f64 forward, which are many instructions, in the last launch's programs.
F64_US = 1.0
#: Microseconds of a program at least on a multiprocessor: however few its warps, it waits for the launch ahead of it.
LEAST_US = 0.16
#: ``turned_per_us`` backward where rows that are read are contiguous in one operand, and adjacent in the other.
MIXED_PER_US = 900.0
#: The same of more than 16 bits where rows are crossed, and not centred.
CROSSED_WIDE_PER_US = 850.0
#: How much longer than estimated centred rows with a residual take forward where no vectors are loaded: two operands
#: are read twice.
RESIDUAL = 1.3


class NormSplit(SplitRows, NormEntry, ops=OPS):
    versions, overlaps, held = (3, 5), True, (1, 2)
    turned_per_us: Sequence[float] = (2800.0, 1450.0, 1450.0)
    sku_version = 2  # of many blocks, several rows are taken together, and merged apart
    reduced = (kernels.norm_partial_kernel, norm_parameters_kernel)
    merged = (kernels.norm_merge_kernel, kernels.norm_backward_merge_kernel)
    which = (kernels.norm_finish_kernel, kernels.norm_backward_finish_kernel)

    def __init__(self, desc: NormDescriptor) -> None:
        super().__init__(desc)
        mixed = len({self.rows.is_adjacent(o) for o in self.read_first}) > 1
        if self.rows.crossed and not self.centred:
            self.turned_per_us = (*self.turned_per_us[:2], CROSSED_WIDE_PER_US)
        if self.gradients and self.tile.rows > 1 and mixed:
            self.turned_per_us = [MIXED_PER_US] * 3

    def find_tile(self) -> Tile:
        return self.partials_tile() if self.backward else super().find_tile()

    def partials_tile(self) -> Tile:
        return self.tiles[0] if self.tiles[0].rows > 1 else super().partials_tile()

    def constants(self) -> dict[str, Any]:
        return super().constants() | {"PART": self.tile.block}

    def partials(self) -> tuple[str, ...]:
        names = ("projections", "totals") if self.backward else ("squares", "centres", "rests")
        return names if self.centred else names[:1]

    def later_us(self) -> float:
        return LATER_US if self.backward and self.rows.n <= SHORT_ROW else super().later_us()

    def reduce_us(self, target: Target) -> float:
        return self.accumulate_us(target) if self.backward else super().reduce_us(target)

    def busy_us(self, programs: int, target: Target) -> float:
        return max(super().busy_us(programs, target), programs * LEAST_US / target.sm_count)

    def us(self, target: Target) -> float:
        us = max(super().us(target), self.busy_us(self.programs(), target))
        if self.tiles[1].rows == 1:
            gapped = self.backward and not self.rows.unit
            per_us = GAPPED_PER_US if gapped else SINGLE_PER_US[self.backward + bool(self.gradients)]
            per_us = CENTRED_PER_US if self.centred and not self.backward else per_us
            us = max(us, self.single_us(per_us, self.rows.count))
        r, tile = self.rows, self.tile
        if not self.backward:
            us *= RESIDUAL if self.centred and self.residual and not self.rows.vectors else 1.0
            return us + (F64_US if self.element is ElementKind.F64 else 0.0)
        if r.vectors or not (self.gradients or r.crossed):
            return us
        if not r.unit:
            # (Programs of one short row have few warps, which exchange nothing and wait once.)
            once = not self.several() and self.each == 1 and r.n <= SHORT_ROW
            return us + (ODD_US if (r.crossed or r.across) and not once else 0.0)
        words = tile.rows * tile.block * self.compute.itemsize / (4 * 32 * tile.warps)
        singly = sum(r.begins_between(o, 16) for o in self.moved) / len(self.moved)
        return us + (ODD_WORD_US + ODD_WARP_US * tile.warps) * words * singly

    def reduce(self) -> Launch:
        # In f64, sums along rows and columns leave room for two programs, of turned blocks for one; left alone, ptxas
        # may spill to fit a fifth.
        programs = 1 if self.tiles[0].rows > 1 else 2
        registers = registers_for(self.tile, programs) if self.element is ElementKind.F64 else 0
        return self.accumulate(registers) if self.backward else super().reduce()
