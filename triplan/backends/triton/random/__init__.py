"""Random numbers: kernel ``groups`` for consecutive elements, ``rows`` for any strides and blocks of larger tensors."""

from triplan.backends.triton.random import groups, rows

__all__ = ["groups", "rows"]
