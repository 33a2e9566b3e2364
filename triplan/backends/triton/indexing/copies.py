"""What the entries that only move elements share: their guarantees, cost, launches and registration."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.bounds import of_outputs, stored
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US, SECTOR
from triplan.backends.triton.common.offsets import bits
from triplan.backends.triton.indexing import points
from triplan.backends.triton.indexing.costs import index_us, miss_rate, queued_us, reached, spread, uneven
from triplan.backends.triton.indexing.geometry import Geometry, geometry
from triplan.backends.triton.indexing.points import Point
from triplan.backends.triton.indexing.registration import COPIED, GATHERS, STORES, Applies, Rank, entry
from triplan.backends.triton.indexing.traversals import status_launches
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import Duplicates, PrecisionGuarantee, Target

#: ``rows_launch`` or ``elements_launch``.
Traverse = Callable[..., Launch]

# From ``bench anywhere indexing``, seeds 1 to 3 and 51 on an H200:
#: Microseconds of a store to a sector of its own, and that a sector that misses the cache takes longer.
STORE_US, MISSED_US = 13e-6, 35e-6

# --- guarantees ---


def gather_guarantee(desc: IndexingDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Copies are exact."""
    return of_outputs(desc, PrecisionGuarantee.exact(desc.element))


def any_guarantee(desc: IndexingDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Of several writes to one element, any one wins."""
    return of_outputs(desc, stored(desc.element, Duplicates.ANY))


def last_guarantee(desc: IndexingDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Of several writes to one element, the one from the largest position wins."""
    return of_outputs(desc, stored(desc.element, Duplicates.LAST))


# --- cost, launches, registration ---


def copy_us(g: Geometry) -> float:
    """Microseconds to move each point's element, and to read the indices. What is read of the table again is cached."""
    moved = g.numel + min(g.numel, g.table.numel)
    return LAUNCH_US + moved * g.dense.element.itemsize / BYTES_PER_US + index_us(g)


def stores_us(g: Geometry, points: float) -> float:
    """Microseconds to store ``points`` elements, each with an index of its own, or whose neighbours lie apart; a warp's
    stores to a sector are one."""
    nbytes = g.table.nbytes
    stores = points if g.apart else points * spread(g, g.table.element.itemsize)
    missed = reached(nbytes / SECTOR, points) * miss_rate(nbytes)
    return max(STORE_US * (1 + uneven(nbytes)) * stores, queued_us(stores, nbytes)) + MISSED_US * missed


def copy_launches(desc: IndexingDescriptor, point: Point, traverse: Traverse) -> list[Launch]:
    """``point`` at every point, of the operands' bits."""
    g = geometry(desc)
    before = status_launches(desc)
    if g.idle:
        return before
    return [*before, traverse(desc, point, bits(g.dense), bits(g.table), desc.element.bits)]


def register(name: str, traverse: Traverse, rank: Rank, supports: Applies) -> None:
    """Register an entry that gathers, and one that stores; of several writes to one element any one wins."""

    @entry(
        name,
        GATHERS,
        elements=COPIED,
        supports=supports,
        rank=rank,
        guarantee=gather_guarantee,
        numerics=lambda desc: f"exact.{desc.element}",
    )
    def gather(desc: IndexingDescriptor, target: Target) -> list[Launch]:
        return copy_launches(desc, points.GATHER, traverse)

    @entry(name, STORES, elements=COPIED, supports=supports, rank=rank, guarantee=any_guarantee)
    def store(desc: IndexingDescriptor, target: Target) -> list[Launch]:
        return copy_launches(desc, points.STORE, traverse)
