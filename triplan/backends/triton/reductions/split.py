"""Kernel ``split``: lines are divided into chunks, which one launch reduces and a second merges, in order."""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch, Scratch
from triplan.backends.triton.common.card import OVERLAPPED_LAUNCH_US
from triplan.backends.triton.common.offsets import padded_bytes
from triplan.backends.triton.reductions import split_kernels
from triplan.backends.triton.reductions.entries import reductions
from triplan.backends.triton.reductions.shared import I64, PAIRS, POSITIONS, plan_of
from triplan.descriptors.reductions import ReductionProblem
from triplan.sku import SUPPORTED, Support, Target

#: Limit of registers per thread in the kernel that merges accumulators.
MERGING_REGISTERS = 128


def applies(desc: ReductionProblem, target: Target) -> Support:
    found = plan_of(desc)
    programs = found.groups() * found.chunks
    return SUPPORTED if programs < 2**31 else Support.no(f"needs {programs} programs; a grid holds fewer than 2**31")


def rank(desc: ReductionProblem, target: Target) -> float:
    return plan_of(desc).us() + OVERLAPPED_LAUNCH_US


def _firsts(desc: ReductionProblem) -> int:
    found = plan_of(desc)
    return padded_bytes(found.lanes * found.chunks * found.compute.itemsize)


def workspace(desc: ReductionProblem, target: Target) -> int:
    found = plan_of(desc)
    if found.kind.accumulates not in PAIRS:
        return _firsts(desc)
    second = I64 if found.kind.accumulates in POSITIONS else found.compute
    return _firsts(desc) + padded_bytes(found.lanes * found.chunks * second.itemsize)


@reductions("split", applies, rank, workspace, priority=1)
def split(desc: ReductionProblem, target: Target) -> list[Launch]:
    found = plan_of(desc)
    if found.lanes == 0:
        return []
    seconds = None
    if found.kind.accumulates in PAIRS:
        seconds = Scratch(_firsts(desc), I64 if found.kind.accumulates in POSITIONS else found.compute)
    given = {**found.arguments(), "firsts": Scratch(0, found.compute), "seconds": seconds}
    launches = []
    merging = found.merging()
    for which, grid, tile in (
        (found.kernel, found.groups() * found.chunks, found.tile),
        (split_kernels.merge_kernel, -(-found.lanes // merging.rows), merging),
    ):
        is_first = which is found.kernel
        own = {**given, "out": None, "second": None} if is_first else {**given, "kept": given["all_kept"]}
        taken, constants = found.taken(which, own), found.taken(which, found.constants(tile))
        # Without a limit, ptxas spills registers when it merges variances, to raise occupancy.
        most = found.registers() if is_first else MERGING_REGISTERS
        launches.append(
            Launch(which, grid, taken, constants, tile.warps, overlaps=True, max_registers=most, fuses=False)
        )
    return launches
