"""Gather, scatter and their backward ops."""

from triplan.backends.triton.indexing import entries, fixed, sorted_sum

__all__ = ["entries", "fixed", "sorted_sum"]
