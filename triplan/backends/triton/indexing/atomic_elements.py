"""Entry ``atomic_elements``: atomic additions of operands of any strides, one point per lane."""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.card import L2_SHARE, LAUNCH_US, SECTOR
from triplan.backends.triton.common.offsets import values
from triplan.backends.triton.indexing import atomics
from triplan.backends.triton.indexing.costs import index_us, zero_us
from triplan.backends.triton.indexing.geometry import geometry
from triplan.backends.triton.indexing.registration import ADDED, SUMS, entry
from triplan.backends.triton.indexing.sums import first_launches
from triplan.backends.triton.indexing.traversals import elements_launch
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import Target

#: Fitted: microseconds per element where neighbours share an index, so that a sector serves several additions.
SHARED_US = 3.5e-6
#: Fitted: time relative to ``atomic_rows``, for a table that fits in the cache.
FITS_SLOWER = 1.01
#: Fitted: the same for a larger table: its sectors are fetched repeatedly, those of ``atomic_rows`` stay in the cache.
MISSES_SLOWER = 1.4


def rank(desc: IndexingDescriptor, target: Target) -> float:
    g = geometry(desc)
    if not g.full and g.fold[2] * g.dense.element.itemsize >= SECTOR:
        return zero_us(g) + LAUNCH_US + SHARED_US * g.numel
    slower = FITS_SLOWER if g.table.nbytes <= L2_SHARE else MISSES_SLOWER
    return zero_us(g) + LAUNCH_US + index_us(g) + slower * atomics.scattered_us(g, desc.element.itemsize)


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
    point = atomics.scattered_point(desc)
    return [*before, elements_launch(desc, point, values(g.dense), values(g.table), desc.element.compute)]
