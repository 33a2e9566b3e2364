"""Entry ``sorted_sum``: deterministic sums over sorted segments.

The indices are sorted in the workspace; then each slot of the table adds its contributions in ascending order, in f32
for half types, and writes once. Contributions are read once and sums written once, and no two programs contend for an
element of the table. The sort depends on the indices alone: it can be prepared once for many runs. Contributions that
lie across the contiguous axis of memory are copied first (``turned``).

In ``bench/results/determinism-nvidia-h200.csv`` it is faster than atomics on large problems with one index per slice,
unless the indices are distinct or sorted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from triplan.backends.runtime.launch import Launch
from triplan.backends.table import Preparation
from triplan.backends.triton.common.card import BYTES_PER_US, L2_BYTES_PER_US, LAUNCH_US, SECTOR
from triplan.backends.triton.common.fill import fill_launch, fold_launch
from triplan.backends.triton.common.offsets import I32_LIMIT
from triplan.backends.triton.indexing import segments, turned
from triplan.backends.triton.indexing.atomics import SECTOR_US
from triplan.backends.triton.indexing.costs import miss_rate, reached
from triplan.backends.triton.indexing.geometry import Geometry, geometry
from triplan.backends.triton.indexing.registration import ADDED, SUMS, entry
from triplan.backends.triton.indexing.sorting import CHUNK, Sorted, buffers, sort_launches, sorted_view, summed_view
from triplan.backends.triton.indexing.sums import first_launches
from triplan.backends.triton.indexing.traversals import status_launches
from triplan.descriptors.fields import NO_BAD_INDEX
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import SUPPORTED, Support, Target

#: Fitted: microseconds per contribution of ranking by comparing all pairs.
RANK_US = 0.0034
#: Microseconds before the first comparison. From ``bench anywhere indexing``, seeds 1, 2, 12, 13 and 14, on an H200.
RANKED_US = 1.4
#: Fitted: microseconds per pass of the radix sort.
PASS_US = 8.5
#: Fitted: microseconds per contribution in each pass of the radix sort.
PASS_KEY_US = 5.5e-5
#: Fitted: microseconds to find where slots start.
STARTS_US = 3.5
#: Fitted: microseconds per contribution of sums of single elements, where programs are launched for slots.
ELEMENT_US = 4e-5
#: The same in every row but the first: programs of other rows have read the order.
AGAIN_US = 6e-6
#: Time relative to packed operands. This and AGAIN_US: fitted to ``bench anywhere indexing --seed 1`` on an H200.
WALKED = 2.5
#: Fitted: microseconds per slot in the same case.
SLOT_US = 2e-5
#: Microseconds that a program waits for each contribution, of which it loads few at a time. By hand, from sums of 13 to
#: 51 rows of 129 to 32000 elements a slot in ``bench anywhere indexing``, seeds 2, 3, 12, 13, 14 and 15, on an H200.
TERM_US = 0.25
#: Fitted: microseconds per contribution of sums of single elements, where programs are launched for contributions.
POSITION_US = 1.8e-4


def applies(desc: IndexingDescriptor, target: Target) -> Support:
    s = sorted_view(desc)
    if max(s.slots + 1, s.count, s.outer) >= I32_LIMIT:
        return Support.no(f"keys have 31 bits; the problem has {s.slots} keys and {s.count} contributions")
    return SUPPORTED if s.g.idle else segments.fits_grids(desc)


def rank(desc: IndexingDescriptor, target: Target) -> float:
    s = sorted_view(desc)
    if s.g.idle:
        return LAUNCH_US
    sort = s.passes * (PASS_US + PASS_KEY_US * s.count) if s.radix else LAUNCH_US + RANKED_US + RANK_US * s.count
    sort += STARTS_US if s.by_slot else 0.0
    copy = turned.copy_us(s.g) - LAUNCH_US if turned.copied(s.g) else 0.0
    zeros = 0.0 if s.by_slot or s.g.keeps else s.g.table.nbytes / BYTES_PER_US
    s = summed_view(desc)
    launched = LAUNCH_US * len(segments.sum_launches(desc))
    return sort + launched + copy + zeros + _sum_us(desc, s) + _waits_us(desc, s)


def _waits_us(desc: IndexingDescriptor, s: Sorted) -> float:
    """Microseconds in which a program waits for the contributions that it adds one after another: those of the first
    chunk of each of its slots, and before that, in another launch, those of a later chunk."""
    each = s.count / max(s.slots, 1)
    if s.inner == 1 or each < 2:  # (The first two of a slot are loaded together.)
        return 0.0
    turns = min(s.slots, segments.LOOP) if segments.is_wide(desc, s) else 1
    return TERM_US * (turns * min(each, CHUNK) + min(max(each - CHUNK, 0), CHUNK))


def _sum_us(desc: IndexingDescriptor, s: Sorted) -> float:
    walked = 1.0 if s.g.packed else turned.ACROSS if turned.lies_across(s.g) else WALKED
    if s.inner > 1:
        written = (1 + s.g.keeps) * _written(s)
        row = s.inner * s.g.dense.element.itemsize
        row += SECTOR - math.gcd(row, SECTOR)  # on average, in whole sectors: rows begin at multiples of this divisor
        if _repeats(s.g):
            return s.outer * row * (s.count / L2_BYTES_PER_US + walked * written / BYTES_PER_US)
        if s.g.table.layout.unit_axis in s.slot_axes:
            return walked * s.count * s.outer * row / BYTES_PER_US + apart_us(s)
        lanes = segments.idle_lanes(desc, s)
        return walked * lanes * (s.count + written) * s.outer * row / BYTES_PER_US
    if s.by_slot:
        element_us = ELEMENT_US if s.outer == 1 else AGAIN_US
        return walked * (element_us * s.count + SLOT_US * s.slots) * s.outer
    return walked * POSITION_US * s.count * s.outer


def _written(s: Sorted) -> float:
    """Slots that are written: all, where programs are launched for slots of a table that keeps nothing."""
    return s.slots if s.by_slot and not s.g.keeps else reached(s.slots, s.count)


def apart_us(s: Sorted) -> float:
    """Microseconds to write sums of which neighbours lie in different sectors: those of other slots are adjacent. What
    the table holds is fetched at least once."""
    itemsize = s.g.table.element.itemsize
    sectors = s.lanes * reached(max(s.slots * itemsize / SECTOR, 1), _written(s))
    written = SECTOR_US * miss_rate(s.g.table.numel * itemsize) + SECTOR / L2_BYTES_PER_US
    return sectors * (written + SECTOR_US + SECTOR / L2_BYTES_PER_US if s.g.keeps else written)


def _repeats(g: Geometry) -> bool:
    """Whether all contributions to a table are one row in memory, which caches keep."""
    axes = [g.dense_axes[d] for d in g.loop if g.sizes[d] > 1]
    return bool(axes) and all(axis in g.dense.layout.zero_axes for axis in axes)


def workspace(desc: IndexingDescriptor, target: Target) -> int:
    return 0 if geometry(desc).idle else buffers(desc).nbytes


# --- prepared indices ---


def prepared_size(desc: IndexingDescriptor, target: Target) -> int:
    return 0 if geometry(desc).idle else buffers(desc, stored=True).stored_nbytes


def prepare(desc: IndexingDescriptor, target: Target) -> list[Launch]:
    if geometry(desc).idle:
        return []
    status = buffers(desc, stored=True).status
    reset = [] if status is None else [fill_launch(status, 1, NO_BAD_INDEX)]
    return [*reset, *sort_launches(desc, stored=True)]


def prepared_launches(desc: IndexingDescriptor, target: Target) -> Sequence[Launch]:
    if geometry(desc).idle:
        return launches(desc, target)
    status = buffers(desc, stored=True).status
    # The bad index that the sort found is bad in every run.
    report = [] if status is None else [fold_launch(status, desc.operand("status"), keep=False)]
    return [*report, *segments.sum_launches(desc, stored=True)]


@entry(
    "sorted_sum",
    SUMS,
    elements=ADDED,
    supports=applies,
    rank=rank,
    guarantee=segments.guarantee,
    numerics=segments.numerics,
    workspace=workspace,
    preparation=Preparation(prepared_size, prepare, prepared_launches),
)
def launches(desc: IndexingDescriptor, target: Target) -> list[Launch]:
    if geometry(desc).idle:
        return first_launches(desc)
    return [*status_launches(desc), *sort_launches(desc), *segments.sum_launches(desc)]
