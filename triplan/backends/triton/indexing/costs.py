"""Terms that the costs of several kernels share, in microseconds on an H200: only which kernel is cheaper matters.

Constants that are called fitted, beside the kernels, were fitted to runs of ``python -m bench determinism --rows`` and
``python -m bench indexing``. A test compares the choices that follow with the committed run,
``bench/results/determinism-nvidia-h200.json``. The indices are not known when planning: they are assumed to be spread
evenly over the table.
"""

from __future__ import annotations

import math

from triplan.backends.triton.common.card import BYTES_PER_US, L2_BYTES, SECTOR, WARP_THREADS
from triplan.backends.triton.indexing.geometry import Geometry
from triplan.backends.triton.indexing.points import ADD
from triplan.backends.triton.indexing.tiles import plane

#: Microseconds from a write to a sector to the next. From two scatters of 16-bit elements to 17 and 155 rows in ``bench
#: anywhere indexing --seed 12`` on an H200.
WRITE_US = 0.024
# From sums of 16, 32 and 64 bits of 3584 rows of 32 elements each, in ``bench anywhere indexing --seed 14`` on an H200:
#: Microseconds of a part of the L2 cache for an addition: about a clock.
TURN_US = 0.6e-3
#: Bytes of a table that lie in one such part.
PART_BYTES = 1024
#: Bytes of a table at which stores to it take twice as long as to a large one: its lines are spread over the parts of
#: the L2 cache by a hash, and the part that got the most of a few has far more than its share. From stores of 8 to 32
#: bits to tables of 0.1 to 26 MB in ``bench anywhere indexing``, seeds 1, 12 to 14 and 16, on an H200.
UNEVEN_BYTES = 0.15e6
#: Microseconds that a launch adds which fills or converts a small table: it waits for no index. From sums of few
#: contributions in ``bench anywhere indexing``, seeds 12, 13 and 14, on an H200.
FILL_US = 1.0
#: Microseconds of each of the compare-and-swaps that meet in one element. From two scatters of which all contributions
#: surely meet (757 products of i32, 113 sums of bf16) in ``bench anywhere indexing``, seeds 14 and 51, on an H200.
SWAP_US = 0.77


def index_us(g: Geometry) -> float:
    """Microseconds to read all indices once."""
    return g.index.nbytes * g.index.count / BYTES_PER_US


def zero_us(g: Geometry) -> float:
    """Microseconds to fill the table with zeros; 0 where the op adds to what it holds."""
    return 0.0 if g.keeps else FILL_US + g.table.nbytes / BYTES_PER_US


def folded_us(g: Geometry, nbytes: int) -> float:
    """Microseconds to clear and read ``nbytes`` for each element of the table, which are packed, and to add the sums to
    the table: where it lies across them, each element is in a sector of its own."""
    across = g.table.layout.unit_axis not in (None, len(g.table.shape) - 1)
    own = SECTOR if across else g.table.element.itemsize
    return g.table.numel * 2 * (nbytes + own) / BYTES_PER_US


def reached(places: float, points: float) -> float:
    """How many of ``places`` are expected to be reached by ``points`` that are spread evenly."""
    return places * -math.expm1(-points / places) if places else 0.0


def alike(g: Geometry) -> float:
    """How many contributions surely meet in an element: those that have one index."""
    return g.numel / max(g.once.numel, 1)


def meeting(g: Geometry) -> float:
    """How many contributions are expected to meet in an element."""
    return max(alike(g), g.fold[1] / max(g.slots, 1))


def most_meeting(g: Geometry) -> float:
    """How many contributions are expected to meet in the element that most of them meet in: the largest of
    ``g.table.numel`` counts, each of ``g.fold[1]`` contributions of which one in ``g.slots`` comes, or what surely
    meets."""
    mean = g.fold[1] / max(g.slots, 1)
    # The largest of n normal deviates is about sqrt(2 log(n / 4)).
    deviates = math.sqrt(2 * math.log(max(g.table.numel / 4, 1)))
    return max(alike(g), mean + deviates * math.sqrt(mean * (1 - 1 / max(g.slots, 1))))


def turns_us(g: Geometry, itemsize: int) -> float:
    """Microseconds, at least, of atomic additions to a table of ``itemsize`` bytes per element: a small table lies in
    few parts of the cache. They get each addition of a warp to another sector by itself; or each addition, if lanes
    surely meet in one element, or are likely to as a warp visits several rows of contributions to it."""
    if not g.scattered:
        return 0.0
    last = max((d for d, n in enumerate(g.sizes) if n > 1), default=0)
    if g.neighbours_meet:
        each = float(g.slots == 1 or g.index_axes[last] in g.index.layout.zero_axes)
    else:
        found = plane(g, ADD)
        each = 1.0 if found is not None and found.turned else spread(g, itemsize)
    return turn_us(g, itemsize) * g.numel * each


def turn_us(g: Geometry, itemsize: int) -> float:
    """Microseconds of one of many atomics on a table of ``itemsize`` bytes per element, at least: the parts of the
    cache that hold it work side by side."""
    return TURN_US / max(g.table.numel * itemsize / PART_BYTES, 1)


def queued_us(writes: float, nbytes: int, write_us: float = WRITE_US) -> float:
    """Microseconds of ``writes`` spread over a table of ``nbytes``, at least: those to one sector take turns."""
    return write_us * writes / max(nbytes / SECTOR, 1)


def spread(g: Geometry, itemsize: int) -> float:
    """How many sectors a lane reaches on average, in a table of ``itemsize`` bytes per element: the accesses of a warp
    to one sector are one."""
    near = g.slots * min(g.fold[2], WARP_THREADS) * itemsize / SECTOR
    return reached(near, WARP_THREADS) / WARP_THREADS


def uneven(nbytes: int) -> float:
    """How much longer than of a large table the accesses to a table of ``nbytes`` take, as a fraction."""
    return math.sqrt(UNEVEN_BYTES / max(nbytes, 1))


def miss_rate(nbytes: int) -> float:
    """The fraction of random accesses to a table of ``nbytes`` that misses the L2 cache."""
    return max(0.0, 1 - L2_BYTES / max(nbytes, 1))
