"""Rotary position embedding: one kernel for q and k, pairs of either kind, tables and computed angles."""

from triplan.backends.triton.rotary import tiles

__all__ = ["tiles"]
