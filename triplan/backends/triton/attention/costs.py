"""Estimated microseconds of attention, from its tiles and the steps in which they walk over keys or queries.

A multiprocessor multiplies one tile after another, or several at a time. A step multiplies a tile of queries by a block
of keys. It waits for what it reads and computes, so a short problem takes as long as the steps of its longest tile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from triplan.backends.triton.attention.arguments import (
    arithmetic,
    is_elementwise,
    padded_width,
    tiles_of_rows,
)
from triplan.backends.triton.common import card
from triplan.descriptors.attention import AttendingDescriptor
from triplan.sku import Target

#: How many times as long as in vectors of 16 bytes a row takes to load by single elements. By least squares over the
#: halves of bench/results/anywhere-attention-*.
SINGLE = 2.1
#: What this is more of elements that do not lie side by side, each of which takes a sector of 32 bytes.
APART = 6.7


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a launch multiplies its tiles.

    Attributes:
        begin_us: microseconds that a tile takes besides its steps.
        step_us: what a step takes besides its products: it waits for operands, and for what it just computed.
        teraflops: TFLOP/s of the products of a step, if each multiprocessor of an H200 has one tile.
        together: how many times as fast a multiprocessor is that has several tiles at once.
        start_us: what the launch takes besides its tiles.
        loads: bytes per microsecond that are loaded before they multiply; infinite if they are loaded meanwhile.
        scores: scores per microsecond whose exponentials a step computes after its products; half as many where it
            masks or caps them. Infinite where other warps multiply meanwhile.
    """

    begin_us: float
    step_us: float
    teraflops: float
    together: float = 1.0
    start_us: float = 0.0
    loads: float = math.inf
    scores: float = math.inf


@dataclass(frozen=True, slots=True)
class Work:
    """What a launch has to do.

    Attributes:
        tiles: of all heads.
        steps: those of the longest tile, and of the mean one.
        operations: floating-point operations of a step.
        scores: those of a step (``scores_of``).
        begin_bytes: what a tile loads by single elements before its steps (``tile_bytes``). Vectors, which are few and
            all under way at once, are part of ``Pace.begin_us``.
        step_bytes: what a step loads (``tile_bytes``).
    """

    tiles: int
    steps: tuple[float, float]
    operations: float
    scores: float
    begin_bytes: float
    step_bytes: float


def pace_of(desc: AttendingDescriptor, paces: Mapping[str, Pace]) -> Pace:
    """That of a kernel by pointers, by ``arithmetic``; those of ``elements`` where keys or values of halves are
    loaded one by one.

    Queries, too, may be loaded one by one; but this happens once, before the steps.
    """
    if desc.element.itemsize == 2 and any(is_elementwise(desc.operand(name)) for name in "kv"):
        return paces[f"elements {padded_width(desc)}"]
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


def scores_of(desc: AttendingDescriptor, tile: tuple[int, int]) -> float:
    """Scores of a step; twice as many where they are masked or capped, which takes about as many instructions."""
    more = desc.right is not None or desc.window_left is not None or desc.mask is not None or desc.softcap > 0
    return math.prod(tile) * (2.0 if more else 1.0)


def tile_bytes(
    desc: AttendingDescriptor, columns: Mapping[str, int], rows: int, among: int, vector: float = 1.0
) -> float:
    """Bytes that a tile of ``rows`` rows loads of some operands.

    An operand that is read by single elements counts as the bytes that vectors would load in the same time.

    Args:
        columns: elements of a row, by the operand's name.
        among: rows that there are. Those beyond are masked, which saves sectors but no instructions.
        vector: what a byte counts that is loaded in vectors.
    """
    found = 0.0
    for name, n in columns.items():
        o = desc.operand(name)
        found += n * rows * (SINGLE if is_elementwise(o) else vector)
        if not (o.layout.packed or o.layout.unit_axis == len(o.shape) - 1):
            found += n * min(rows, among) * APART
    return found * desc.element.itemsize


def launch_us(work: Work, pace: Pace, target: Target) -> float:
    """Estimated microseconds of a launch: of its longest tile, or of all that the busiest multiprocessor has."""
    step_us = pace.step_us + work.operations * card.SMS / (pace.teraflops * card.TERA_PER_US)
    step_us += work.scores / pace.scores + work.step_bytes / pace.loads
    begin_us = pace.begin_us + work.begin_bytes / pace.loads
    longest, mean = (begin_us + n * step_us for n in work.steps)
    busiest = math.ceil(work.tiles / target.sm_count) * mean / pace.together
    return card.LAUNCH_US + pace.start_us + max(longest, busiest)


def forward_us(
    desc: AttendingDescriptor,
    target: Target,
    tile: tuple[int, int],
    columns: tuple[int, int],
    pace: Pace,
    persistent: bool = False,
) -> float:
    """Estimated microseconds of the forward op. ``tile``: queries of a tile, and keys of its steps; ``columns``: of a
    key and of a value; ``persistent``: whether programs load a tile while they compute another."""
    key, value = columns
    work = Work(
        tiles=tiles_of_rows(desc, desc.queries, tile[0]) * desc.batch * desc.heads,
        steps=steps_of(desc, desc.queries, desc.keys, tile),
        operations=2.0 * math.prod(tile) * (key + value),
        scores=scores_of(desc, tile),
        begin_bytes=tile_bytes(desc, {"q": key}, tile[0], desc.queries, 0.0),
        step_bytes=tile_bytes(desc, {"k": key, "v": value}, tile[1], desc.keys, 0.0),
    )
    return _exposed_us(desc, work.tiles, launch_us(work, pace, target), persistent, target)


def backward_us(
    desc: AttendingDescriptor,
    target: Target,
    of_queries: tuple[int, int],
    of_keys: tuple[int, int],
    columns: tuple[int, int],
    pace: Pace,
    persistent: bool = False,
) -> float:
    """Estimated microseconds of the launches for dq and for dk and dv.

    ``of_queries``: queries of a tile of dq, and keys of its steps. ``of_keys``: keys of a tile of dk and dv, and
    queries of its steps. ``columns``, ``persistent``: as in ``forward_us``.
    """
    key, value = columns
    longest, mean = steps_of(desc, desc.keys, desc.queries, of_keys)
    for_dq = Work(
        tiles=tiles_of_rows(desc, desc.queries, of_queries[0]) * desc.batch * desc.heads,
        steps=steps_of(desc, desc.queries, desc.keys, of_queries),
        operations=2.0 * math.prod(of_queries) * (2 * key + value),
        scores=scores_of(desc, of_queries),
        begin_bytes=tile_bytes(desc, {"q": key, "out": value, "dout": value}, of_queries[0], desc.queries, 0.0),
        step_bytes=tile_bytes(desc, {"k": key, "v": value}, of_queries[1], desc.keys),
    )
    for_keys = Work(
        tiles=tiles_of_rows(desc, desc.keys, of_keys[0]) * desc.batch * desc.key_heads,
        steps=(longest * desc.group, mean * desc.group),
        operations=4.0 * math.prod(of_keys) * (key + value),
        scores=scores_of(desc, of_keys),
        begin_bytes=tile_bytes(desc, {"k": key, "v": value}, of_keys[0], desc.keys, 0.0),
        step_bytes=tile_bytes(desc, {"q": key, "dout": value}, of_keys[1], desc.queries),
    )
    both = launch_us(for_dq, pace, target) + launch_us(for_keys, pace, target)
    return _exposed_us(desc, for_dq.tiles, both, persistent, target)


def streamed_us(desc: AttendingDescriptor) -> float:
    """Microseconds of streaming all operands but the mask.

    Where another axis of a result is contiguous, as of a transposed one, each element takes about as long as reading
    and writing its sector, the rest of which other programs write (bench/results/anywhere-attention-*).
    """
    found = 0.0
    for o in desc.operands():
        if o.is_tensor and o.name != "mask":
            apart = o.is_written and not o.layout.packed and o.layout.unit_axis not in (None, len(o.shape) - 1)
            found += 2 * card.SECTOR * o.numel if apart else o.nbytes
    return found / card.BYTES_PER_US


def _exposed_us(desc: AttendingDescriptor, tiles: int, us: float, persistent: bool, target: Target) -> float:
    """Microseconds of streaming, and of launches for ``tiles`` that compute for ``us``. Tiles wait for their operands;
    but a persistent program loads those of its next tile while it computes one."""
    streamed = streamed_us(desc)
    if not persistent:
        return streamed + us
    return max(streamed, us + streamed / max(math.ceil(tiles / target.sm_count), 1))
