"""Random numbers: kernel ``groups`` for consecutive elements, ``elements`` for blocks of larger tensors."""

from triplan.backends.triton.random import elements, groups

__all__ = ["elements", "groups"]
