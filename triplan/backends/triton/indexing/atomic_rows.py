"""Entry ``atomic_rows``: atomic additions of packed operands, by tiles of whole rows."""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.card import LAUNCH_US
from triplan.backends.triton.common.offsets import values
from triplan.backends.triton.indexing import atomics, points_kernels as points
from triplan.backends.triton.indexing.costs import index_us, zero_us
from triplan.backends.triton.indexing.geometry import geometry
from triplan.backends.triton.indexing.registration import ADDED, SUMS, entry, rows_apply
from triplan.backends.triton.indexing.sums import first_launches
from triplan.backends.triton.indexing.traversals import rows_launch
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import Support, Target


def applies(desc: IndexingDescriptor, target: Target) -> Support:
    support = rows_apply(desc, target)
    return atomics.applies(desc, target) if support else support


def rank(desc: IndexingDescriptor, target: Target) -> float:
    g, itemsize = geometry(desc), desc.element.itemsize
    added = index_us(g) + atomics.scattered_us(g, itemsize) if g.full else atomics.vector_us(g, itemsize)
    return zero_us(g) + LAUNCH_US + added


@entry(
    "atomic_rows",
    SUMS,
    elements=ADDED,
    supports=applies,
    rank=rank,
    guarantee=atomics.guarantee,
    numerics=atomics.numerics,
)
def launches(desc: IndexingDescriptor, target: Target) -> list[Launch]:
    g = geometry(desc)
    before = first_launches(desc)
    if g.idle:
        return before
    vectors = not g.full and g.fold[2] % 2 == 0
    point = points.atomic_point if vectors else atomics.scattered_point(desc)
    return [*before, rows_launch(desc, point, values(g.dense), values(g.table), desc.element.compute)]
