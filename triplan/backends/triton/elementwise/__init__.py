"""Elementwise ops: a table of jit functions, and the two kernels that evaluate them."""

from triplan.backends.triton.elementwise import flat, strided

__all__ = ["flat", "strided"]
