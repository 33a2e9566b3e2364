"""Copies, by tiles of rows or transposed tiles, with optional maps of positions (flip, roll, pad); joins; and fills."""

from triplan.backends.triton.copies import fill, join, rows, transposed

__all__ = ["fill", "join", "rows", "transposed"]
