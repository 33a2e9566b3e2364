"""Estimated microseconds of attention, from its tiles and the steps in which they walk over keys or queries.

A multiprocessor multiplies one tile after another, or several at a time. A step multiplies a tile of queries by a block
of keys. It waits for what it reads and computes, so a short problem takes as long as the steps of its longest tile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from triplan.backends.triton.attention.arguments import (
    MOST_WIDTH,
    arithmetic,
    is_elementwise,
    padded_width,
    tiles_of_rows,
)
from triplan.backends.triton.common import card
from triplan.descriptors.attention import AttendingDescriptor
from triplan.sku import Target


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a launch multiplies its tiles.

    Attributes:
        begin_us: microseconds that a tile takes besides its steps.
        step_us: what a step takes besides its products: it waits for operands, and for what it just computed.
        teraflops: TFLOP/s of the products of a step, if each multiprocessor of an H200 has one tile.
        together: how many times as fast a multiprocessor is that has several tiles at once.
        start_us: what the launch takes besides its tiles.
        loads: bytes per microsecond that a step loads before it multiplies; infinite if it loads meanwhile.
    """

    begin_us: float
    step_us: float
    teraflops: float
    together: float = 1.0
    start_us: float = 0.0
    loads: float = math.inf


def pace_of(desc: AttendingDescriptor, paces: Mapping[str, Pace]) -> Pace:
    """That of a kernel by pointers, by ``arithmetic``; of halves that are loaded one by one ``elements``, and ``wide
    elements`` of heads that then spill registers."""
    if desc.element.itemsize == 2 and any(is_elementwise(desc.operand(name)) for name in "qkv"):
        return paces["elements" if padded_width(desc) < MOST_WIDTH else "wide elements"]
    return paces[arithmetic(desc)]


def steps_of(desc: AttendingDescriptor, rows: int, others: int, tile: tuple[int, int]) -> tuple[float, float]:
    """Steps of the longest tile and of the mean one, which have ``tile[0]`` of ``rows`` (queries or keys), and take
    ``tile[1]`` at a time of the ``others`` that these meet."""
    met = others / max(desc.sequences or 1, 1)
    longest = math.ceil(met / tile[1])
    if desc.right is None and desc.window_left is None:
        return longest, longest
    if desc.right is not None and desc.window_left is not None:
        met = (desc.window_left + desc.right + 1.0) * desc.queries / max(rows, 1)
    elif desc.queries <= 2 * desc.keys:  # with fewer keys most queries may see all of them
        met *= math.ceil(rows / tile[0]) * tile[0] / max(2 * rows, 1)  # as many tiles, had the last one all its rows
    # Blocks begin and end beyond what the first and the last row of a tile meet.
    mean = min((met + max(tile) / 2) / tile[1], longest)
    return (longest if desc.right is None or desc.window_left is None else mean), mean


def launch_us(
    tiles: int, steps: tuple[float, float], operations: float, nbytes: float, pace: Pace, target: Target
) -> float:
    """Estimated microseconds of a launch: of its longest tile, or of all that the busiest multiprocessor has.

    ``steps``: of the longest and the mean tile. ``operations``, ``nbytes``: floating-point operations of a step, and
    bytes that it loads.
    """
    step_us = pace.step_us + operations * card.SMS / (pace.teraflops * card.TERA_PER_US) + nbytes / pace.loads
    longest, mean = (pace.begin_us + n * step_us for n in steps)
    busiest = math.ceil(tiles / target.sm_count) * mean / pace.together
    return card.LAUNCH_US + pace.start_us + max(longest, busiest)


def forward_us(
    desc: AttendingDescriptor, target: Target, tile: tuple[int, int], columns: tuple[int, int], pace: Pace
) -> float:
    """Estimated microseconds of the forward op. ``tile``: queries of a tile, and keys of its steps; ``columns``: of a
    key and of a value."""
    tiles = tiles_of_rows(desc, desc.queries, tile[0]) * desc.batch * desc.heads
    steps = steps_of(desc, desc.queries, desc.keys, tile)
    nbytes = tile[1] * sum(columns) * desc.element.itemsize
    return streamed_us(desc) + launch_us(tiles, steps, 2.0 * math.prod(tile) * sum(columns), nbytes, pace, target)


def backward_us(
    desc: AttendingDescriptor,
    target: Target,
    of_queries: tuple[int, int],
    of_keys: tuple[int, int],
    columns: tuple[int, int],
    pace: Pace,
) -> float:
    """Estimated microseconds of the launches for dq and for dk and dv.

    ``of_queries``: queries of a tile of dq, and keys of its steps. ``of_keys``: keys of a tile of dk and dv, and
    queries of its steps. ``columns``: of a key and of a value.
    """
    key, value = columns
    row = (key + value) * desc.element.itemsize
    tiles = tiles_of_rows(desc, desc.queries, of_queries[0]) * desc.batch * desc.heads
    steps = steps_of(desc, desc.queries, desc.keys, of_queries)
    operations = 2.0 * math.prod(of_queries) * (2 * key + value)
    found = launch_us(tiles, steps, operations, of_queries[1] * row, pace, target)
    tiles = tiles_of_rows(desc, desc.keys, of_keys[0]) * desc.batch * desc.key_heads
    longest, mean = steps_of(desc, desc.keys, desc.queries, of_keys)
    steps, operations = (longest * desc.group, mean * desc.group), 4.0 * math.prod(of_keys) * (key + value)
    return streamed_us(desc) + found + launch_us(tiles, steps, operations, of_keys[1] * row, pace, target)


def streamed_us(desc: AttendingDescriptor) -> float:
    """Microseconds of streaming all operands but the mask. Costs add them: tiles wait for their first operands."""
    return sum(o.nbytes for o in desc.operands() if o.is_tensor and o.name != "mask") / card.BYTES_PER_US
