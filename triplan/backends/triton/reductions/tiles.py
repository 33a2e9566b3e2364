"""Kernel ``tiles``: one launch; a program reduces whole lines."""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.reductions.entries import reductions
from triplan.backends.triton.reductions.shared import plan_of
from triplan.descriptors.reductions import ReductionProblem
from triplan.sku import Support, Target


def applies(desc: ReductionProblem, target: Target) -> Support:
    found = plan_of(desc)
    if found.chunks > 1:
        return Support.no(f"lines of {found.n} elements are divided into {found.chunks} chunks")
    return fits_grid(found.groups())


def rank(desc: ReductionProblem, target: Target) -> float:
    return plan_of(desc).us()


@reductions("tiles", applies, rank)
def tiles(desc: ReductionProblem, target: Target) -> list[Launch]:
    found = plan_of(desc)
    if found.lanes == 0:
        return []
    args = found.taken(found.kernel, {**found.arguments(), **dict.fromkeys(("firsts", "seconds", "chunk", "chunks"))})
    constants = found.taken(found.kernel, found.constants(found.tile))
    warps, most = found.tile.warps, found.registers()
    return [Launch(found.kernel, found.groups(), args, constants, warps, max_registers=most, fuses=False)]
