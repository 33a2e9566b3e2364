"""Copies, by tiles of rows or transposed tiles, with optional maps of positions (flip, roll, pad); and fills."""

from triplan.backends.triton.copies import fill, rows, transposed

__all__ = ["fill", "rows", "transposed"]
