"""Indices: negative and bad ones resolved, and the lowest bad position recorded."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

#: ``status`` where no index was bad: no position can be this large.
NO_BAD_INDEX = tl.constexpr(2**63 - 1)


@triton.jit
def resolve(index, extent, live, WRAP: tl.constexpr, CLAMP: tl.constexpr):
    """The position along the axis, and whether it may be touched."""
    if WRAP:
        index = tl.where(index < 0, index + extent, index)
    if CLAMP:
        index = tl.minimum(tl.maximum(index, 0), extent - 1)
        inside = live & (extent > 0)
    else:
        inside = live & (index >= 0) & (index < extent)
    return index, inside


@triton.jit
def report(status, bad, position):
    """Lower ``status`` to the smallest bad position."""
    first = tl.min(tl.where(bad, position.to(tl.int64), NO_BAD_INDEX))
    if first < NO_BAD_INDEX:
        tl.atomic_min(status, first, sem="relaxed")
