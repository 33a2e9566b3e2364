"""Gather, scatter and their backward ops. Each module named after a kernel registers it; the others are shared."""

from triplan.backends.triton.indexing import (
    atomic_elements,
    atomic_f32,
    atomic_rows,
    elements,
    fixed_f16,
    fixed_scaled,
    ordered_last,
    ordered_sum,
    rows,
    scanned_sum,
    sorted_sum,
)

__all__ = [
    "atomic_elements",
    "atomic_f32",
    "atomic_rows",
    "elements",
    "fixed_f16",
    "fixed_scaled",
    "ordered_last",
    "ordered_sum",
    "rows",
    "scanned_sum",
    "sorted_sum",
]
