"""Loads and stores of tiles of any strides, of which neighbouring columns go to neighbouring lanes.

Where no axis of a tile is known to be contiguous, Triton 3.6 lets the lanes of a warp follow axis 0: each accesses
another row, and with it another sector. Such tiles are therefore loaded and stored as their transpose.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl


@triton.jit
def load_tile(at, mask, one, other):
    """The elements at the addresses ``at`` [rows, columns], 0 without ``mask``.

    ``one``, ``other``: strides of two axes, None for 1: if neither is None, no axis is known to be contiguous.
    """
    if one is None or other is None:
        v = tl.load(at, mask=mask, other=0.0)
    else:
        v = tl.trans(tl.load(tl.trans(at), mask=tl.trans(mask), other=0.0))
    return v


@triton.jit
def store_tile(at, v, mask, one, other):
    """Store ``v`` as the element that is at ``at``, where ``mask`` is true; strides as in ``load_tile``."""
    v = v.to(at.dtype.element_ty)
    if one is None or other is None:
        tl.store(at, v, mask=mask)
    else:
        tl.store(tl.trans(at), tl.trans(v), mask=tl.trans(mask))
