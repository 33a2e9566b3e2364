"""Kernel ``small_tiles``: ``tiles`` of few results and many terms a step, for small problems."""

from __future__ import annotations

from triplan.backends.triton.conv.tiles import Tiles

Tiles("small_tiles", small=True).register(priority=2, version=2)
