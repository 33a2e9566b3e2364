"""Entry ``atomic_last``: stores of which the last write to an element wins, each contribution visited twice.

Atomics first leave the largest position that points to an element in the workspace; then those positions are stored.
A maximum is the same in any order, so this is deterministic.
"""

from __future__ import annotations

import math

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch
from triplan.backends.triton.common.card import BYTES_PER_US, OVERLAPPED_LAUNCH_US
from triplan.backends.triton.common.fill import fill_launch
from triplan.backends.triton.common.offsets import I32_LIMIT, bits
from triplan.backends.triton.indexing import atomics, elements, ordered_last, points
from triplan.backends.triton.indexing.copies import copy_us, last_guarantee, stores_us
from triplan.backends.triton.indexing.costs import index_us, queued_us, reached, spread, uneven
from triplan.backends.triton.indexing.geometry import Geometry, geometry, index_alone
from triplan.backends.triton.indexing.points import PlaceStrides
from triplan.backends.triton.indexing.registration import COPIED, STORES, entry
from triplan.backends.triton.indexing.traversals import elements_launch, status_launches
from triplan.descriptors import packed_strides
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import ElementKind, Target

# From scatters of 4,000 to 65 million elements to evenly spread places in ``bench anywhere indexing``, seeds 12 to 20,
# on an H200:
#: Microseconds from an atomic maximum of a sector to the next.
MARK_US = 0.0125
#: How uneven the parts of the cache are to atomics, relative to stores.
MARK_UNEVEN = 0.5
#: Estimated gain from which on it is chosen. Of sorted indices the lanes of a warp reach few sectors: stores then take
#: a third of the time, but to find the last positions much of it. (Two scatters at seed 21.)
SURE = 1.25


def _owned(g: Geometry) -> tuple[int, ...]:
    """The shape of what has a last position of its own: an element, or where an index serves a slice, that slice."""
    return g.table.shape if g.full else g.extents


def _position(g: Geometry) -> ElementKind:
    """An integer that holds every position."""
    return ElementKind.I64 if g.index.numel >= I32_LIMIT else ElementKind.I32


def _places(g: Geometry) -> PlaceStrides:
    """How the place in ``_owned``, packed, follows from coordinates and indices."""
    strides = packed_strides(_owned(g))
    if not g.full:
        return [Int(0, True) for _ in g.sizes], tuple(Int(n, True) for n in strides)[::-1]
    along: list[Arg] = [Int(0 if a is None else strides[a], True) for a in g.table_axes]
    return along, tuple(Int(strides[a], True) for a in g.indexed)[::-1]


def workspace(desc: IndexingDescriptor, target: Target) -> int:
    g = geometry(desc)
    return 0 if g.idle else math.prod(_owned(g)) * _position(g).itemsize


def rank(desc: IndexingDescriptor, target: Target) -> float:
    g = geometry(desc)
    marked = g if g.full else index_alone(g)
    nbytes = workspace(desc, target)
    itemsize = _position(g).itemsize
    scattered = (1 + MARK_UNEVEN * uneven(nbytes)) * atomics.scattered_us(marked, itemsize)
    marks = max(scattered, queued_us(marked.numel * spread(marked, itemsize), nbytes, MARK_US))
    before = 2 * OVERLAPPED_LAUNCH_US + nbytes / BYTES_PER_US + index_us(g) + marks
    if not (g.full or g.apart):
        return before + elements.rank(desc, target)
    stored = stores_us(g, reached(g.table.numel, g.numel))
    return SURE * (before - elements.SOONER_US + copy_us(g) + stored)


@entry(
    "atomic_last",
    STORES,
    elements=COPIED,
    rank=rank,
    guarantee=last_guarantee,
    numerics=ordered_last.numerics,
    workspace=workspace,
)
def launches(desc: IndexingDescriptor, target: Target) -> list[Launch]:
    g = geometry(desc)
    before = status_launches(desc)
    if g.idle:
        return before
    last, element = Scratch(0, _position(g)), desc.element.bits
    marked = g if g.full else index_alone(g)
    fill = fill_launch(last, math.prod(_owned(g)), -1)
    mark = elements_launch(desc, points.MARK_LAST, last, last, element, g=marked, places=(last, _places(marked)))
    store = elements_launch(desc, points.STORE_LAST, bits(g.dense), bits(g.table), element, places=(last, _places(g)))
    return [*before, fill, mark, store]
