"""What each row of the indexing family costs, in microseconds on an H200: the figures that select compares.

Only which is smaller matters. The models were fitted to runs of ``python -m bench determinism --rows`` and ``bench
indexing``; ``tests/families/indexing/test_costs.py`` holds the choices that follow against the committed run,
``bench/results/determinism-nvidia-h200.json``. Indices are not known when planning: they are taken to be spread evenly.
"""

from __future__ import annotations

import math
from typing import Any

from triplan.backends.triton.indexing import sorting
from triplan.backends.triton.indexing.geometry import Geometry, geometry, keeps
from triplan.backends.triton.indexing.launches import L2_SHARE, ordered_tile
from triplan.backends.triton.indexing.segments import scanned_grid, sum_launches
from triplan.sku import Target

#: One launch within a stream of them, and bytes that stream through memory.
LAUNCH_US = 1.5
BYTES_PER_US = 4.0e6
#: Where tables begin to be met in memory rather than in the L2 cache, and what the cache fetches at a time.
L2_BYTES, SECTOR = 48 << 20, 32


def _indices(g: Geometry) -> float:
    return g.index.nbytes * g.index.count / BYTES_PER_US


def _zeros(desc: Any) -> float:
    return 0.0 if keeps(desc) else LAUNCH_US + geometry(desc).table.nbytes / BYTES_PER_US


def _missed(nbytes: int) -> float:
    """How much of a table that is met at random is not in the cache."""
    return max(0.0, 1 - L2_BYTES / max(nbytes, 1))


# --- copies ---


def rows_rank(desc: Any, target: Target) -> float:
    g = geometry(desc)
    return LAUNCH_US + 2 * g.numel * g.dense.element.itemsize / BYTES_PER_US + _indices(g)


def elements_rank(desc: Any, target: Target) -> float:
    return 1.5 * rows_rank(desc, target)


# --- atomic additions ---


def atomic_rows_rank(desc: Any, target: Target) -> float:
    g = geometry(desc)
    if g.full:
        return _zeros(desc) + LAUNCH_US + _indices(g) + _single_additions(g, SECTOR // g.dense.element.itemsize)
    return _zeros(desc) + LAUNCH_US + _vector_additions(g, g.dense.element.itemsize)


def atomic_elements_rank(desc: Any, target: Target) -> float:
    g = geometry(desc)
    if g.full or g.fold[2] * g.dense.element.itemsize < SECTOR:
        # Not stripe by stripe: what the cache does not hold is fetched again and again.
        spread = 1.01 if g.table.nbytes <= L2_SHARE else 1.4
        return (
            _zeros(desc) + LAUNCH_US + _indices(g) + spread * _single_additions(g, SECTOR // g.dense.element.itemsize)
        )
    return _zeros(desc) + LAUNCH_US + 3.5e-6 * g.numel


def atomic_f32_rank(desc: Any, target: Target) -> float:
    g = geometry(desc)
    added = _single_additions(g, SECTOR // 4) if g.full else _vector_additions(g, 4)
    # The f32 table is cleared and read, the op's own read and written.
    cleared = (4 + 4 + 2 * g.dense.element.itemsize) * g.table.numel / BYTES_PER_US
    return 3 * LAUNCH_US + _indices(g) + added + cleared


def _vector_additions(g: Geometry, itemsize: int) -> float:
    """Runs of elements that have one index."""
    nbytes = g.numel * itemsize
    return nbytes / 1.75e6 + 2 * nbytes * _missed(g.table.numel * itemsize) / 6e6


def _single_additions(g: Geometry, elements: int) -> float:
    """Elements each of an index of its own, into sectors of so many; the first of each sector waits for memory."""
    sectors = max(g.table.numel / elements, 1)
    return 11.6e-6 * g.numel + 35e-6 * sectors * -math.expm1(-g.numel / sectors)


# --- fixed point ---


def fixed_rank(desc: Any, passes: int, scratch: int, launches: int) -> float:
    """``passes`` over the contributions, with ``scratch`` bytes an element of the table."""
    g = geometry(desc)
    # A sum costs as much as 16 bytes of traffic where neighbours share a slot, 48 where each goes elsewhere.
    met = g.numel * (g.dense.element.itemsize + (48 if g.full else 16)) / BYTES_PER_US
    missed = 1 + _missed(g.table.numel * scratch) * (0.5 if g.full else 0.2)
    folded = g.table.numel * (2 * scratch + 2 * g.dense.element.itemsize) / BYTES_PER_US
    return launches * LAUNCH_US + passes * (met * missed + _indices(g)) + folded


# --- sorted segments ---


def sorted_rank(desc: Any, target: Target) -> float:
    s = sorting.view(desc)
    if s.g.idle:
        return LAUNCH_US
    dense = sorting.by_slot(desc, s)
    if s.count <= sorting.RANKED:
        order = LAUNCH_US + 0.0034 * s.count
    else:
        order = sorting.passes(s)[0] * (8.5 + 5.5e-5 * s.count)
    order += 3.5 if dense else 0.0
    written = s.slots if not keeps(desc) else min(s.slots, s.count) * 2
    if s.lanes > 1:
        added = (s.count + written) * s.lanes * s.g.dense.element.itemsize / BYTES_PER_US
    else:
        added = s.count * 4e-5 + s.slots * 2e-5 if dense else s.count * 1.8e-4
    return order + LAUNCH_US * len(sum_launches(desc)) + added


def scanned_rank(desc: Any, target: Target) -> float:
    # Each program looks at all keys, and a multiprocessor holds about eight of them.
    waves = scanned_grid(desc) / (8 * max(target.sm_count, 1))
    return _zeros(desc) + LAUNCH_US + 2.0 * max(waves, 1)


# --- owners that look at everything ---


def ordered_programs(g: Geometry) -> int:
    block_slots, block_lanes = ordered_tile(g)
    return -(-g.slots // block_slots) * -(-(g.fold[0] * g.fold[2]) // block_lanes)


def ordered_rank(desc: Any, target: Target) -> float:
    g = geometry(desc)
    # About 1,000 warp instructions a program and step, four issued a cycle and multiprocessor; 0.5 us of latency.
    issue = ordered_programs(g) * g.fold[1] * 1000 / (max(target.sm_count, 1) * 4 * 1700)
    return LAUNCH_US + max(issue, 0.5 * g.fold[1])
