"""The oracle and the CPU backend: plain torch, written from the definitions. Importing it registers every entry."""

from triplan.backends.reference import gemm, indexing, losses, norms, softmax

__all__ = ["gemm", "indexing", "losses", "norms", "softmax"]
