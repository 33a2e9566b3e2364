"""Entry ``atomic_rows``: atomic additions of packed operands, by tiles of whole rows."""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.card import LAUNCH_US
from triplan.backends.triton.common.offsets import values
from triplan.backends.triton.indexing import atomics
from triplan.backends.triton.indexing.costs import index_us, zero_us
from triplan.backends.triton.indexing.geometry import Geometry, geometry
from triplan.backends.triton.indexing.points import ADD, Point, addition
from triplan.backends.triton.indexing.registration import ADDED, SUMS, entry, rows_apply
from triplan.backends.triton.indexing.sums import first_launches
from triplan.backends.triton.indexing.traversals import rows_launch, rows_tile
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import Support, Target

#: Time of an addition to a pair of elements, relative to one of 32 bits. Fitted to ``bench anywhere indexing``, seed 1.
PAIRS_SLOWER = 2.0


def applies(desc: IndexingDescriptor, target: Target) -> Support:
    support = rows_apply(desc, target)
    return atomics.applies(desc, target) if support else support


def rank(desc: IndexingDescriptor, target: Target) -> float:
    g, itemsize = geometry(desc), desc.element.itemsize
    point = _addition(g)
    if g.full:
        added = index_us(g) + atomics.added_us(g, itemsize)
    elif point is ADD:
        added = atomics.vector_us(g, itemsize)
    else:
        cols = rows_tile(desc, point)[1]
        lanes = -(-g.fold[2] // cols) * cols / max(g.fold[2], 1)
        added = atomics.shared_us(g, itemsize) * lanes * (PAIRS_SLOWER if point.pairs else 1.0)
    return zero_us(g) + LAUNCH_US + max(added, atomics.swaps_us(g, point))


def _addition(g: Geometry) -> Point:
    return addition(g, vectors=not g.full and g.fold[2] % 2 == 0)


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
    return [*before, rows_launch(desc, _addition(g), values(g.dense), values(g.table), desc.element.compute)]
