"""Kernel ``tiles``: one launch; a program reduces whole lines."""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.card import MAX_THREAD_REGISTERS
from triplan.backends.triton.reductions.entries import reductions
from triplan.backends.triton.reductions.shared import I64, POSITIONS, plan_of
from triplan.descriptors.reductions import ReductionProblem
from triplan.sku import SUPPORTED, Support, Target


def applies(desc: ReductionProblem, target: Target) -> Support:
    found = plan_of(desc)
    if found.chunks > 1:
        return Support.no(f"lines of {found.n} elements are divided into {found.chunks} chunks")
    if found.groups() >= 2**31:
        return Support.no(f"needs {found.groups()} programs; a grid holds fewer than 2**31")
    return SUPPORTED


def rank(desc: ReductionProblem, target: Target) -> float:
    return plan_of(desc).us()


@reductions("tiles", applies, rank)
def tiles(desc: ReductionProblem, target: Target) -> list[Launch]:
    found = plan_of(desc)
    if found.lanes == 0:
        return []
    args = found.taken(found.kernel, {**found.arguments(), "firsts": None, "seconds": None})
    constants = found.taken(found.kernel, found.constants(found.tile))
    # Left alone, ptxas spills a few registers of i64 and their positions, to raise occupancy.
    most = MAX_THREAD_REGISTERS if found.kind.accumulates in POSITIONS and found.compute is I64 else None
    tile = found.tile
    return [Launch(found.kernel, found.groups(), args, constants, tile.warps, max_registers=most, fuses=False)]
