"""What the entries that add by floating-point atomics share: when they apply, guarantee and cost."""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.triton.common.card import SECTOR, WARP_THREADS
from triplan.backends.triton.indexing.costs import SWAP_US, alike, meeting, miss_rate, reached, turns_us
from triplan.backends.triton.indexing.geometry import Geometry
from triplan.backends.triton.indexing.points import ADD_PAIRS, ADD_SINGLE, Point, pairs_inside
from triplan.backends.triton.indexing.sums import sum_guarantee, sum_numerics
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import SUPPORTED, ElementKind, PrecisionGuarantee, Support, Target

#: Fitted: bytes per microsecond that vector atomics add, where runs of elements share an index.
VECTOR_BYTES_PER_US = 1.75e6
#: Fitted: bytes per microsecond of the table's traffic (read and written) that misses the cache, in the same case.
MISSED_BYTES_PER_US = 6e6
#: Fitted: microseconds of one addition, where every element has an index of its own.
ADDITION_US = 11.6e-6
#: Fitted: microseconds by which ``atomic_elements`` comes sooner than ``atomic_rows`` to its first access.
SOONER_US = 0.25
#: Fitted: microseconds of one addition where neighbours share an index, so that a sector serves several additions; and
#: of one of 8 bytes, to ``bench anywhere indexing``, seeds 1 and 3.
SHARED_US, SHARED_WIDE_US = 3.5e-6, 5.8e-6
#: Bytes per microsecond of the table's traffic that misses the cache, in the same case. From 5.3e6 rows of 95 elements
#: of f32 on an H100.
MISSED_SHARED_BYTES_PER_US = 3e6
#: Fitted: microseconds that each sector of the table that is reached waits for memory, in the same case.
SECTOR_US = 35e-6
#: Microseconds of a lone addition of 16 bits at the end of a run of pairs, and of each that meets others there: it is a
#: compare-and-swap, but of one lane of a warp. From nine sums of bf16 and f16 with 2 to 58 of them in ``bench anywhere
#: indexing``, seeds 1, 2, 3, 12, 14 and 51, on an H200.
LONE_US, END_US = 0.4, 0.1


def applies(desc: IndexingDescriptor, target: Target) -> Support:
    """Whether the hardware has atomic additions of the element."""
    if desc.element is not ElementKind.BF16:
        return SUPPORTED
    if target.interpret:
        return Support.no("Triton's interpreter has no bf16 atomics")
    if target.arch == "sm80":
        return Support.no("sm80 has no bf16 atomic addition, only compare-and-swap loops")
    return SUPPORTED


def guarantee(desc: IndexingDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """For sums in the element itself, in no fixed order."""
    return sum_guarantee(desc, desc.element, ordered=False)


def numerics(desc: IndexingDescriptor) -> str | None:
    return sum_numerics(desc, None)


def vector_us(g: Geometry, itemsize: int) -> float:
    """Microseconds to add runs of elements that share an index into a table of ``itemsize`` bytes per element."""
    nbytes = g.numel * itemsize
    missed = 2 * nbytes * miss_rate(g.table.numel * itemsize)
    return nbytes / VECTOR_BYTES_PER_US + missed / MISSED_BYTES_PER_US


def shared_us(g: Geometry, itemsize: int) -> float:
    """Microseconds to add elements one by one whose neighbours share an index."""
    missed = 2 * g.numel * itemsize * miss_rate(g.table.numel * itemsize)
    return max(g.numel * _shared_us(itemsize), missed / MISSED_SHARED_BYTES_PER_US)


def added_us(g: Geometry, itemsize: int, joined: int = 1) -> float:
    """Microseconds of atomic additions, each with an index of its own, or of which neighbours take turns, but those of
    a thread, ``joined``, are one."""
    return max(scattered_us(g, itemsize), turns_us(g, itemsize) / joined)


def swaps_us(g: Geometry, point: Point) -> float:
    """Microseconds of lone 16-bit additions by ``point``: each that meets others waits for them.

    Where runs are shorter than a warp, several of its lanes may be at ends of runs, and it waits for the last of them.
    Strides of runs of even length are expected to be even, as in a transposed tensor: then no pair is divided.
    """
    if g.table.element.itemsize == 2 and point is ADD_SINGLE:
        return SWAP_US * alike(g)
    if point is not ADD_PAIRS or pairs_inside(g):
        return 0.0
    unit = g.table.layout.unit_axis
    if unit is not None and g.table.shape[unit] % 2 == 0 and g.table.alignment >= 4:
        return 0.0
    is_short = unit is not None and g.table.shape[unit] < WARP_THREADS
    return LONE_US + (SWAP_US if is_short else END_US) * meeting(g)


def scattered_us(g: Geometry, itemsize: int) -> float:
    """Microseconds to change elements, each or each few of which have an index of their own, in a table of ``itemsize``
    bytes per element."""
    sectors = max(g.table.numel / (SECTOR // itemsize), 1)
    each = ADDITION_US if g.full else max(ADDITION_US / max(g.fold[2], 1), _shared_us(itemsize))
    return each * g.numel + SECTOR_US * reached(sectors, g.numel)


def _shared_us(itemsize: int) -> float:
    return SHARED_US if itemsize <= 4 else SHARED_WIDE_US
