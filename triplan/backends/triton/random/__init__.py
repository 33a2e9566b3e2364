"""Random numbers: groups of elements that share a counter, and elements one by one for any layout and block."""

from triplan.backends.triton.random import elements, groups

__all__ = ["elements", "groups"]
