"""HOW an op is computed: the kernel table, the kernels, the reference, and what compiles and launches them."""

from triplan.backends import (
    reference as _reference,  # noqa: F401 (registers the references)
    triton as _triton,  # noqa: F401 (registers the kernels)
)
from triplan.backends.table import TABLE, KernelRow, KernelTable, kernel, reference
from triplan.backends.tuning import TuningTable

__all__ = ["TABLE", "KernelRow", "KernelTable", "TuningTable", "kernel", "reference"]
