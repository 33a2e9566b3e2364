"""Entry ``atomic_reduce``: products and extremes by atomics, each contribution visited once.

Products of integers and extremes are the same in any order, so this is deterministic.
"""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.card import LAUNCH_US
from triplan.backends.triton.common.offsets import bits, values
from triplan.backends.triton.indexing import atomics, ordered_reduce, points_kernels as kernels
from triplan.backends.triton.indexing.costs import alike, index_us, meeting, most_meeting, reached, turn_us
from triplan.backends.triton.indexing.geometry import Geometry, geometry
from triplan.backends.triton.indexing.points import CONTENDING_PRODUCT, REPEATED_ELEMENTS, Point, joined, repeated
from triplan.backends.triton.indexing.registration import ADDED, entry
from triplan.backends.triton.indexing.traversals import elements_launch, rows_launch, status_launches
from triplan.descriptors import ScatterReduceDescriptor
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import Target

# From ``bench anywhere indexing``, seeds 1, 2, 3 and 51, on an H200:
#: Time of an extreme relative to an atomic addition: few extremes are new ones, and change nothing.
EXTREME = 0.55
#: Microseconds of a swap behind the load that it follows.
SWAPPED_US = 0.5
#: Microseconds from a swap of an element to the next that succeeds. From products of few factors (1:12, 3:87, 12:35 and
#: 13:13 of ``bench anywhere indexing``, whose factors are odd) on an H200, by a run that is not published.
ROUND_US = 0.45
#: Swaps per microsecond, where many programs try again. From five products, of which 27 to 757 meet in an element, on
#: an H200, by a run that is not published. (Older files of ``bench/results`` have even factors: products become 0.)
SWAPS_PER_US = 4.5e4
#: Microseconds for each two factors of a thread, which finds out whether they meet. From small tables with 16 and 8
#: factors a thread on an H200, by a run that is not published.
COMPARED_US = 1.6e-2
#: Programs of one warp that a multiprocessor holds.
RESIDENT = 32


def rank(desc: IndexingDescriptor, target: Target) -> float:
    g = geometry(desc)
    changed_us = atomics.scattered_us(g, desc.element.itemsize)
    if desc.op != "scatter_prod":
        return LAUNCH_US + index_us(g) + EXTREME * changed_us
    # Of those that meet in an element one succeeds at a time: a try takes the latency of a swap, and the element in
    # which most meet is done last; or all tries together take the throughput, of all programs or of the few parts of
    # the cache that hold a small table. On average each element that is visited at a time tries half as often as there
    # are others to meet.
    factors = joined(g, _point(desc))
    left = _left(g, factors)
    resident = left * min(g.numel, target.sm_count * RESIDENT * REPEATED_ELEMENTS)
    tries_us = resident * left * meeting(g) / 2 * max(1 / SWAPS_PER_US, turn_us(g, desc.element.itemsize))
    rounds_us = ROUND_US * (left * most_meeting(g) - 1)
    compared_us = COMPARED_US * factors * (factors - 1)
    return LAUNCH_US + index_us(g) + SWAPPED_US + compared_us + max(rounds_us, left * changed_us + tries_us)


def _left(g: Geometry, factors: int) -> float:
    """What is left of the factors once each thread has multiplied those of its ``factors`` that meet: if they have one
    index they surely do."""
    if factors == 1:
        return 1.0
    return (1.0 if alike(g) > 1 else reached(max(g.slots, 1), factors)) / factors


def numerics(desc: ScatterReduceDescriptor) -> str:
    """Of floats, NaN have other bits here than in ``ordered_reduce``, and at times zeros."""
    known = ordered_reduce.numerics(desc)
    return known.replace(".v", ".atomic.v") if desc.element.is_floating_point else known


def _point(desc: IndexingDescriptor) -> Point:
    """Products and extremes of 16 bits repeat until no other program was faster; for others there are atomics.

    Every factor changes the product, but only a new extreme the extreme: programs seldom meet there. Nor do those of
    products of fewer factors than places.
    """
    product, function, g = desc.op == "scatter_prod", FUNCTIONS[desc.op], geometry(desc)
    if product and meeting(g) > 1:
        return CONTENDING_PRODUCT
    return repeated(function) if product or desc.element.itemsize == 2 else Point(function)


def _register(op: str, elements: tuple[str, ...]) -> None:
    @entry(
        "atomic_reduce",
        (op,),
        elements=elements,
        rank=rank,
        guarantee=ordered_reduce.result_guarantee,
        numerics=numerics,
    )
    def launches(desc: ScatterReduceDescriptor, target: Target) -> list[Launch]:
        g, point = geometry(desc), _point(desc)
        before = status_launches(desc)
        if g.idle:
            return before
        # Element by element, programs that run at a time rarely meet in one row of the table.
        launch = rows_launch if g.fits_rows and not point.contends else elements_launch
        return [*before, launch(desc, point, values(g.dense), bits(g.table), desc.element.compute)]


FUNCTIONS = {
    "scatter_prod": kernels.multiply_point,
    "scatter_amax": kernels.max_point,
    "scatter_amin": kernels.min_point,
}
_register("scatter_prod", ("i32", "i64"))
_register("scatter_amax", ADDED)
_register("scatter_amin", ADDED)
