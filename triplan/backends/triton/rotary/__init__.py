"""Rotary position embedding: one kernel for q and k, both kinds of pairs, tables or computed angles."""

from triplan.backends.triton.rotary import tiles

__all__ = ["tiles"]
