"""Terms that the costs of several kernels share, in microseconds on an H200: only which kernel is cheaper matters.

Constants that are called fitted, beside the kernels, were fitted to runs of ``python -m bench determinism --rows`` and
``python -m bench indexing``. A test compares the choices that follow with the committed run,
``bench/results/determinism-nvidia-h200.json``. The indices are not known when planning: they are assumed to be spread
evenly over the table.
"""

from __future__ import annotations

from triplan.backends.triton.common.card import BYTES_PER_US, L2_BYTES, LAUNCH_US
from triplan.backends.triton.indexing.geometry import Geometry


def index_us(g: Geometry) -> float:
    """Microseconds to read all indices once."""
    return g.index.nbytes * g.index.count / BYTES_PER_US


def zero_us(g: Geometry) -> float:
    """Microseconds to fill the table with zeros; 0 where the op adds to what it holds."""
    return 0.0 if g.keeps else LAUNCH_US + g.table.nbytes / BYTES_PER_US


def miss_rate(nbytes: int) -> float:
    """The fraction of random accesses to a table of ``nbytes`` that misses the L2 cache."""
    return max(0.0, 1 - L2_BYTES / max(nbytes, 1))
