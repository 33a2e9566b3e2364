"""Terms that the costs of several kernels share, in microseconds on an H200: only which kernel is cheaper matters.

Constants that are called fitted, beside the kernels, were fitted to runs of ``python -m bench determinism --rows`` and
``python -m bench indexing``. A test compares the choices that follow with the committed run,
``bench/results/determinism-nvidia-h200.json``. The indices are not known when planning: they are assumed to be spread
evenly over the table.
"""

from __future__ import annotations

import math

from triplan.backends.triton.common.card import BYTES_PER_US, L2_BYTES, LAUNCH_US, SECTOR
from triplan.backends.triton.indexing.geometry import Geometry

#: Microseconds from a write to a sector to the next. From two scatters of 16-bit elements to 17 and 155 rows in ``bench
#: anywhere indexing --seed 12`` on an H200.
WRITE_US = 0.024


def index_us(g: Geometry) -> float:
    """Microseconds to read all indices once."""
    return g.index.nbytes * g.index.count / BYTES_PER_US


def zero_us(g: Geometry) -> float:
    """Microseconds to fill the table with zeros; 0 where the op adds to what it holds."""
    return 0.0 if g.keeps else LAUNCH_US + g.table.nbytes / BYTES_PER_US


def reached(places: float, points: float) -> float:
    """How many of ``places`` are expected to be reached by ``points`` that are spread evenly."""
    return places * -math.expm1(-points / places) if places else 0.0


def queued_us(writes: float, nbytes: int) -> float:
    """Microseconds of ``writes`` spread over a table of ``nbytes``, at least: those to one sector take turns."""
    return WRITE_US * writes / max(nbytes / SECTOR, 1)


def miss_rate(nbytes: int) -> float:
    """The fraction of random accesses to a table of ``nbytes`` that misses the L2 cache."""
    return max(0.0, 1 - L2_BYTES / max(nbytes, 1))
