"""The launch of ``ordered_kernel``, in which each table element has one owner; what its two entries share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import triton.language as tl

from triplan.backends.runtime.launch import Int, Launch, Ptr
from triplan.backends.triton.common.card import LAUNCH_US, MAX_THREAD_REGISTERS
from triplan.backends.triton.common.offsets import I32_LIMIT, TL, ceil_power
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.indexing import ordered_kernels as kernels
from triplan.backends.triton.indexing.arguments import Walk, axis_arguments, policy, traversal_arguments
from triplan.backends.triton.indexing.geometry import Geometry, geometry
from triplan.backends.triton.indexing.traversals import status_launches
from triplan.descriptors import Operand
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import ElementKind, Support, Target

#: Most slots per program: 16 spill where strides are unknown.
MAX_SLOTS = 8
#: Fewest lanes per program. Untuned.
MIN_LANES = 16
#: Most lanes per program. Untuned.
MAX_LANES = 128
#: Steps whose indices and contributions are loaded at a time. Untuned.
UNROLL = 4
#: Warp instructions that a multiprocessor issues per microsecond: 4 per cycle at 1,700 MHz.
SM_INSTRUCTIONS_PER_US = 4 * 1700
# Fitted to ``bench anywhere indexing``, seed 2, on an H200, by a script that is not published:
#: Warp instructions that a program issues per step, and for each element that it owns.
STEP_INSTRUCTIONS, ELEMENT_INSTRUCTIONS = 500, 0.54
#: Microseconds of latency per step, of which several are loaded together, and for each such element.
STEP_US, ELEMENT_US = 0.14, 2.4e-4
#: Time of a step where every element is written, so that none records whether it was hit; relative to others.
UNRECORDED = 0.43


def tile(g: Geometry) -> tuple[int, int]:
    """(slots, lanes) of the table that one program owns."""
    lanes = g.fold[0] * g.fold[2]
    block_slots = min(max(ceil_power(g.slots), 1), MAX_SLOTS)
    return block_slots, min(max(ceil_power(lanes), MIN_LANES), MAX_LANES)


def programs(g: Geometry) -> int:
    block_slots, block_lanes = tile(g)
    return -(-g.slots // block_slots) * -(-(g.fold[0] * g.fold[2]) // block_lanes)


def applies(desc: IndexingDescriptor, target: Target) -> Support:
    return fits_grid(programs(geometry(desc)))


def rank(desc: IndexingDescriptor, target: Target) -> float:
    """Microseconds. Every program visits every step: the instructions of all, or the latency of one, is the limit. The
    latency is that of the most lanes: with fewer, threads have nothing to do, and others take as long."""
    g = geometry(desc)
    steps = g.fold[1] * (1.0 if g.keeps else UNRECORDED)
    elements = math.prod(tile(g))
    instructions = programs(g) * (STEP_INSTRUCTIONS + ELEMENT_INSTRUCTIONS * elements)
    issue_us = instructions / (target.sm_count * SM_INSTRUCTIONS_PER_US)
    return LAUNCH_US + max(issue_us, STEP_US + ELEMENT_US * tile(g)[0] * MAX_LANES) * steps


def ordered_launches(
    desc: IndexingDescriptor,
    step: Any,
    pointer: Callable[[Operand], Ptr],
    compute: ElementKind,
) -> list[Launch]:
    """The jit function ``step`` at every point; ``pointer`` says how the operands' elements are read."""
    g = geometry(desc)
    before = status_launches(desc)
    if g.table.numel == 0 or (g.numel == 0 and g.keeps):
        return before
    lanes = Walk(g, [d for d in range(len(g.sizes)) if d not in g.loop])
    steps = Walk(g, g.loop)
    block_slots, block_lanes = tile(g)
    big = max(g.slots, lanes.numel, steps.numel) >= I32_LIMIT
    launch = Launch(
        kernels.ordered_kernel,
        max(1, programs(g)),
        {
            **traversal_arguments(desc, g),
            **axis_arguments(g),
            "dense": pointer(g.dense),
            "table": pointer(g.table),
            "slots": Int(g.slots, big),
            "lanes": Int(lanes.numel, big),
            "steps": Int(steps.numel, big),
            "lane_sizes": lanes.sizes(),
            "lane_dense": lanes.dense(),
            "lane_table": lanes.table(),
            "lane_index": lanes.index(),
            "lane_position": lanes.position(),
            "step_sizes": steps.sizes(),
            "step_dense": steps.dense(),
            "step_index": steps.index(),
            "step_position": steps.position(),
        },
        {
            **policy(desc, g),
            "STEP": step,
            "KEEP": g.keeps,
            "POINT_TYPE": tl.int64 if big else tl.int32,
            "COMPUTE": TL[compute],
            "BLOCK_SLOTS": block_slots,
            "BLOCK_LANES": block_lanes,
            "UNROLL": min(UNROLL, ceil_power(max(steps.numel, 1))),
        },
        max_registers=MAX_THREAD_REGISTERS,  # left alone, ptxas spills a few to raise occupancy
    )
    return [*before, launch]
