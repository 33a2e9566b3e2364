"""Elementwise ops: a table of jit functions, trees of them fused into one function, and the kernels that call it."""

from triplan.backends.triton.elementwise import flat, rows, strided, transposed

__all__ = ["flat", "rows", "strided", "transposed"]
