"""The tests' oracle and the CPU backend, in plain torch. Importing it registers every reference."""

from triplan.backends.reference import gemm, indexing, losses, norms, softmax

__all__ = ["gemm", "indexing", "losses", "norms", "softmax"]
