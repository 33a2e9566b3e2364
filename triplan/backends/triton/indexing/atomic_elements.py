"""Entry ``atomic_elements``: atomic additions of operands of any strides, one point per lane."""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.card import L2_SHARE, LAUNCH_US
from triplan.backends.triton.common.offsets import values
from triplan.backends.triton.indexing import atomics
from triplan.backends.triton.indexing.costs import index_us, zero_us
from triplan.backends.triton.indexing.geometry import geometry
from triplan.backends.triton.indexing.points import addition, joined
from triplan.backends.triton.indexing.registration import ADDED, SUMS, entry
from triplan.backends.triton.indexing.sums import first_launches
from triplan.backends.triton.indexing.tiles import adds_vectors, plane, shares_sectors
from triplan.backends.triton.indexing.traversals import elements_launch
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import Target

#: Fitted: time relative to ``atomic_rows``, for a table that fits in the cache.
FITS_SLOWER = 1.01
#: Fitted: the same for a larger table: its sectors are fetched repeatedly, those of ``atomic_rows`` stay in the cache.
MISSES_SLOWER = 1.4


def rank(desc: IndexingDescriptor, target: Target) -> float:
    g, itemsize = geometry(desc), desc.element.itemsize
    point = addition(g, adds_vectors(g))
    swaps = atomics.swaps_us(g, point)
    sooner = zero_us(g) + LAUNCH_US - atomics.SOONER_US
    if adds_vectors(g) and not point.pairs:  # pairs at an odd address have one element each
        return sooner + atomics.vector_us(g, itemsize)
    if shares_sectors(g):
        return sooner + max(atomics.shared_us(g, itemsize), swaps)
    slower = FITS_SLOWER if g.table.nbytes <= L2_SHARE else MISSES_SLOWER
    together = 1 if plane(g, point) is not None else joined(g, point)
    return sooner + max(index_us(g) + slower * atomics.added_us(g, itemsize, together), swaps)


@entry(
    "atomic_elements",
    SUMS,
    elements=ADDED,
    supports=atomics.applies,
    rank=rank,
    guarantee=atomics.guarantee,
    numerics=atomics.numerics,
)
def launches(desc: IndexingDescriptor, target: Target) -> list[Launch]:
    g = geometry(desc)
    before = first_launches(desc)
    if g.idle:
        return before
    return [
        *before,
        elements_launch(desc, addition(g, adds_vectors(g)), values(g.dense), values(g.table), desc.element.compute),
    ]
