"""HOW an op is computed: the kernel table, the kernels, the reference, and what compiles and launches them."""

from triplan.backends.reference import run as _reference  # noqa: F401 (the package registers its entries)
from triplan.backends.table import TABLE, KernelRow, KernelTable, kernel, reference
from triplan.backends.triton import common as _triton  # noqa: F401 (the package registers its entries)
from triplan.backends.tuning import TuningTable

__all__ = ["TABLE", "KernelRow", "KernelTable", "TuningTable", "kernel", "reference"]
