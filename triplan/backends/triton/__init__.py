"""Triton kernels, one folder a family. Importing it registers every entry."""

from triplan.backends.triton import gemm, indexing, losses, norms, softmax

__all__ = ["gemm", "indexing", "losses", "norms", "softmax"]
