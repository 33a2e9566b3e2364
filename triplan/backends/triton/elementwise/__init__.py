"""Elementwise ops: a table of maths over few kernels."""

from triplan.backends.triton.elementwise import flat, strided

__all__ = ["flat", "strided"]
