"""Copies: tiles of rows and transposed tiles, in which the positions of elements may be mapped; and fills."""

from triplan.backends.triton.copies import fill, rows, transposed

__all__ = ["fill", "rows", "transposed"]
