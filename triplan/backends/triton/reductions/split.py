"""Kernel ``split``: lines are divided into chunks, which one launch reduces and a second merges, in order."""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch, Scratch
from triplan.backends.triton.common.card import OVERLAPPED_LAUNCH_US
from triplan.backends.triton.common.offsets import padded_bytes
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.reductions import split_kernels
from triplan.backends.triton.reductions.entries import reductions
from triplan.backends.triton.reductions.shared import plan_of
from triplan.descriptors.reductions import ReductionProblem
from triplan.sku import Support, Target

#: Limit of registers per thread in the kernel that merges accumulators.
MERGING_REGISTERS = 128


def applies(desc: ReductionProblem, target: Target) -> Support:
    found = plan_of(desc)
    return fits_grid(found.groups() * found.chunks)


def rank(desc: ReductionProblem, target: Target) -> float:
    return plan_of(desc).us() + OVERLAPPED_LAUNCH_US


def accumulators(desc: ReductionProblem) -> tuple[Scratch, Scratch | None, int]:
    """Where the workspace holds the first and the second accumulators of all chunks, and where it ends."""
    found = plan_of(desc)
    count, second = found.lanes * found.chunks, found.kind.second(found.compute)
    end = padded_bytes(count * found.compute.itemsize)
    if second is None:
        return Scratch(0, found.compute), None, end
    return Scratch(0, found.compute), Scratch(end, second), end + padded_bytes(count * second.itemsize)


def workspace(desc: ReductionProblem, target: Target) -> int:
    return accumulators(desc)[2]


@reductions("split", applies, rank, workspace, priority=1)
def split(desc: ReductionProblem, target: Target) -> list[Launch]:
    found = plan_of(desc)
    if found.lanes == 0:
        return []
    firsts, seconds, _ = accumulators(desc)
    given = {**found.arguments(), "firsts": firsts, "seconds": seconds}
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
