"""Entry ``atomic_reduce``: products and extremes by compare-and-swap, each contribution visited once.

Products of integers and extremes are the same in any order, so this is deterministic.
"""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.card import LAUNCH_US
from triplan.backends.triton.common.offsets import bits, values
from triplan.backends.triton.indexing import atomics, ordered_reduce, points_kernels as points
from triplan.backends.triton.indexing.costs import index_us
from triplan.backends.triton.indexing.geometry import geometry
from triplan.backends.triton.indexing.registration import ADDED, entry
from triplan.backends.triton.indexing.traversals import Point, elements_launch, rows_launch, status_launches
from triplan.descriptors import ScatterReduceDescriptor
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import Target

#: Time relative to an atomic addition: a load, and a swap that may fail. Untuned.
SLOWER = 2.0


def rank(desc: IndexingDescriptor, target: Target) -> float:
    g = geometry(desc)
    return LAUNCH_US + index_us(g) + SLOWER * atomics.scattered_us(g, desc.element.itemsize)


def _register(op: str, elements: tuple[str, ...], point: Point) -> None:
    @entry(
        "atomic_reduce",
        (op,),
        elements=elements,
        rank=rank,
        guarantee=ordered_reduce.result_guarantee,
        numerics=ordered_reduce.numerics,
    )
    def launches(desc: ScatterReduceDescriptor, target: Target) -> list[Launch]:
        g = geometry(desc)
        before = status_launches(desc)
        if g.idle:
            return before
        launch = rows_launch if g.fits_rows else elements_launch
        return [*before, launch(desc, point, values(g.dense), bits(g.table), desc.element.compute)]


_register("scatter_prod", ("i32", "i64"), points.multiply_point)
_register("scatter_amax", ADDED, points.max_point)
_register("scatter_amin", ADDED, points.min_point)
