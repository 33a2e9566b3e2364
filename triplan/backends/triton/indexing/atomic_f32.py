"""Entry ``atomic_f32``: sums of half types by atomic additions to an f32 copy of the table in the workspace."""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.runtime.launch import Launch, Scratch
from triplan.backends.triton.common.card import L2_SHARE, LAUNCH_US
from triplan.backends.triton.common.fill import fill_launch, fold_launch
from triplan.backends.triton.common.offsets import padded_bytes, values
from triplan.backends.triton.indexing import atomics, points
from triplan.backends.triton.indexing.atomic_elements import FITS_SLOWER, MISSES_SLOWER
from triplan.backends.triton.indexing.costs import FILL_US, folded_us, index_us
from triplan.backends.triton.indexing.geometry import geometry
from triplan.backends.triton.indexing.registration import HALF, SUMS, entry
from triplan.backends.triton.indexing.sums import first_launches, sum_guarantee
from triplan.backends.triton.indexing.traversals import scratch_launch, status_launches
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import ElementKind, PrecisionGuarantee, Target

F32_BYTES = ElementKind.F32.itemsize


def guarantee(desc: IndexingDescriptor) -> Mapping[str, PrecisionGuarantee]:
    return sum_guarantee(desc, ElementKind.F32, ordered=False)


def rank(desc: IndexingDescriptor, target: Target) -> float:
    g = geometry(desc)
    if g.scattered:
        slower = MISSES_SLOWER if g.table.numel * F32_BYTES > L2_SHARE else FITS_SLOWER
        added = slower * atomics.added_us(g, F32_BYTES)
    else:
        added = atomics.vector_us(g, F32_BYTES)
    return LAUNCH_US + 2 * FILL_US + index_us(g) + added + folded_us(g, F32_BYTES)


def workspace(desc: IndexingDescriptor, target: Target) -> int:
    g = geometry(desc)
    return padded_bytes(g.table.numel * F32_BYTES) if g.numel else 0


@entry("atomic_f32", SUMS, elements=HALF, rank=rank, guarantee=guarantee, workspace=workspace)
def launches(desc: IndexingDescriptor, target: Target) -> list[Launch]:
    g = geometry(desc)
    if g.idle:
        return first_launches(desc)
    sums = Scratch(0, ElementKind.F32)
    return [
        *status_launches(desc),
        fill_launch(sums, g.table.numel, 0),
        scratch_launch(desc, points.ADD, values(g.dense), sums, ElementKind.F32),
        fold_launch(sums, g.table, g.keeps),
    ]
