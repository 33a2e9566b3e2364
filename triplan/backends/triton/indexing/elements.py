"""Entry ``elements``: gathers and stores of operands of any strides, one point per lane.

Stores that always meet, because the index has stride 0 where they differ, would wait for each other: any of them may
win, so that only the first is made.
"""

from __future__ import annotations

from triplan.backends.runtime.launch import Arg, Launch
from triplan.backends.triton.common.card import L2_BYTES, L2_SHARE, LAUNCH_US
from triplan.backends.triton.indexing.copies import copy_us, register, stores_us
from triplan.backends.triton.indexing.geometry import Geometry, geometry, stripes_stay
from triplan.backends.triton.indexing.points import Point
from triplan.backends.triton.indexing.registration import STORES, always
from triplan.backends.triton.indexing.traversals import elements_launch
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import ElementKind, Target

# From ``bench anywhere indexing``: seeds 1 to 3 on an H200, seed 4 on an H100.
#: Microseconds that a program of ``rows`` takes longer to its first access.
SOONER_US = 0.3
#: Microseconds of an element, besides moving it: where one index serves a row, each lane reads it and its own address.
#: (Set by hand: of what seeds 1 to 20 of an H200 say, so that select agrees with the measured times.)
ELEMENT_US = 0.8e-6
#: Time relative to ``rows``, where every element has an index; and if only ``rows`` finds the table's sectors in the
#: cache, as it visits stripes that stay there. Stores that miss the cache in either take as long in either.
SLOWER, MISSES_SLOWER = 1.05, 1.5


def visited(desc: IndexingDescriptor) -> Geometry:
    """The points that are visited."""
    g = geometry(desc)
    return g.once if desc.op in STORES else g


def rank(desc: IndexingDescriptor, target: Target) -> float:
    g = visited(desc)
    moved = copy_us(g) - LAUNCH_US
    if desc.op in STORES and g.apart:
        moved = max(moved, stores_us(g, g.numel))
    if not g.full:
        return LAUNCH_US - SOONER_US + moved + ELEMENT_US * g.numel
    kept = L2_SHARE
    if desc.op in STORES:
        moved, kept = max(moved, stores_us(g, g.numel)), L2_BYTES  # spread programs reach all of the table all the time
    if g.table.nbytes <= kept:
        slower = SLOWER
    elif stripes_stay(g):
        slower = MISSES_SLOWER
    else:
        slower = 1.0 if desc.op in STORES else SLOWER
    return LAUNCH_US - SOONER_US + slower * moved


def launch(desc: IndexingDescriptor, point: Point, dense: Arg, table: Arg, compute: ElementKind) -> Launch:
    return elements_launch(desc, point, dense, table, compute, g=visited(desc))


register("elements", launch, rank, always)
