"""Elementwise ops: a table of jit functions, trees of them as one function, and the few kernels that evaluate it."""

from triplan.backends.triton.elementwise import flat, rows, strided, transposed

__all__ = ["flat", "rows", "strided", "transposed"]
