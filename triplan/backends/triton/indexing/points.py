"""Point functions with what a launch must know of them: how many elements and warps, and where pairs end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triplan.backends.runtime.launch import Arg, Int
from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.indexing import points_kernels as kernels
from triplan.backends.triton.indexing.geometry import Geometry
from triplan.descriptors import Operand
from triplan.sku import ElementKind

#: Elements of a program that repeats until its last element is done: four per thread of one warp. Measured on an H200:
#: of 32 to 512, in one warp or several, none is faster throughout.
REPEATED_ELEMENTS = 128
#: Elements that a program adds one by one, not in vectors: four per thread. In ``bench anywhere indexing --seed 1`` on
#: an H200 tiles of rows take twice as long with as many as suit vectors.
SINGLE_ELEMENTS = 512


@dataclass(frozen=True, slots=True)
class Point:
    """What happens at a point.

    Attributes:
        function: a ``@jit`` function of ``points_kernels`` or ``fixed_point_kernels`` (Triton is untyped).
        pairs: whether it adds to aligned pairs of elements, and must know where runs of the table end.
        elements: elements of a program; None: as many as suit the traversal.
        warps: warps of a program.
        joined: the function of several points of a thread, of which it makes those that meet one; None if it has none.
        contends: whether programs that meet in an element of the table wait for each other.
    """

    function: Any
    pairs: bool = False
    elements: int | None = None
    warps: int = 4
    joined: Any = None
    contends: bool = False


def repeated(function: Any) -> Point:
    """Of a function that repeats until the last element of the program is done."""
    return Point(function, elements=REPEATED_ELEMENTS, warps=1)


def single(function: Any) -> Point:
    """Of a function that adds elements one by one."""
    return Point(function, elements=SINGLE_ELEMENTS)


#: Products of which several meet in each element of the table.
CONTENDING_PRODUCT = Point(
    kernels.multiply_point,
    elements=REPEATED_ELEMENTS,
    warps=1,
    joined=kernels.multiply_joined_point,
    contends=True,
)


#: How a second offset follows: (along each dimension, along the indexed axes, last first).
PlaceStrides = tuple[list[Arg], tuple[Arg, ...]]

GATHER = Point(kernels.gather_point)
STORE = Point(kernels.store_point)
NOTHING = Point(kernels.no_point)
MARK_LAST = Point(kernels.mark_last_point, pairs=True)
STORE_LAST = Point(kernels.store_last_point, pairs=True)
# A thread can join additions where its points that follow each other meet: sorted indices choose a place many times,
# one after the other.
ADD = Point(kernels.atomic_point, joined=kernels.joined_point)
ADD_SINGLE = Point(kernels.atomic_point, elements=SINGLE_ELEMENTS, joined=kernels.joined_point)
ADD_PAIRS = Point(kernels.atomic_pair_point, pairs=True, elements=SINGLE_ELEMENTS, joined=kernels.joined_point)
#: How many points of a thread these are at most; and bytes of their elements. Of all points that its threads have, a
#: warp loads one each at a time: the further these lie apart, the more cache lines each load takes.
JOINED, JOINED_BYTES = 4, 16
#: Factors of a thread in one column, at most: of 16, 8 and 4 the one that never lost much, in products of 17 tables on
#: an H200, by a run that is not published.
FACTORS = 8


def addition(g: Geometry, vectors: bool) -> Point:
    """Atomic additions to the table; ``vectors``: each thread adds to an even number of adjacent elements.

    The hardware adds floats of up to 32 bits in vectors, those of 16 bits in pairs at least. Of these, elements without
    neighbours are added alone.
    """
    o = g.table
    half = o.element.is_floating_point and o.element.itemsize == 2
    if vectors and (o.alignment >= 4 if half else o.element is ElementKind.F32):
        return ADD
    if not half:
        return ADD_SINGLE
    unit = o.layout.unit_axis
    adjacent = _gapless(o) or (unit is not None and o.shape[unit] > 1)
    return ADD_PAIRS if adjacent else ADD_SINGLE


def pairs_inside(g: Geometry) -> bool:
    """Whether all aligned pairs lie inside the table."""
    return _gapless(g.table) and g.table.alignment >= 4 and g.table.numel % 2 == 0


def _gapless(o: Operand) -> bool:
    """Whether the operand's memory is one run of adjacent elements, in whatever order its axes are."""
    return o.layout.packed or bool(o.layout.order)


def run_length(g: Geometry, point: Point) -> Int | None:
    """The elements of a run of the table's adjacent elements; None where ``point`` need not know."""
    if not point.pairs or pairs_inside(g):
        return None
    unit = g.table.layout.unit_axis
    return Int(g.table.numel if _gapless(g.table) or unit is None else g.table.shape[unit], g.wide)


def place_strides(g: Geometry, point: Point) -> PlaceStrides | None:
    """How an element's place in its run follows.

    None where the place is the offset, or not asked for.
    """
    if run_length(g, point) is None or _gapless(g.table):
        return None

    def along(axis: int | None) -> Arg:
        return Int(int(axis == g.table.layout.unit_axis), True)

    return [along(a) for a in g.table_axes], tuple(along(a) for a in g.indexed)[::-1]


def joined(g: Geometry, point: Point) -> int:
    """The points of a thread of ``elements_kernel``, which joins those that meet: they follow each other, or, if
    ``point`` contends, follow each other in one column.

    One where there are fewer points than places: even sorted indices then seldom meet, and adjacent loads only cost.
    """
    if point.contends:
        return min(ceil_power(max(g.fold[1], 1)), FACTORS)
    if point.joined is None or not g.neighbours_meet or g.fold[1] < g.slots:
        return 1
    return min(JOINED, JOINED_BYTES // g.dense.element.itemsize)
