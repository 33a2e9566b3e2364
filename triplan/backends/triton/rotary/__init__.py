"""Rotary position embedding: one kernel for q and k (and a cache of k and v), both kinds of pairs, tables or angles."""

from triplan.backends.triton.rotary import ordered, tiles

__all__ = ["ordered", "tiles"]
