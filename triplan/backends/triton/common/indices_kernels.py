"""Resolves negative and out-of-bounds indices, and records the lowest bad position."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.descriptors import fields

#: Value of ``status`` if no index is bad: larger than any position.
NO_BAD_INDEX = tl.constexpr(fields.NO_BAD_INDEX)


@jit
def resolve(index, extent, live, WRAP: tl.constexpr, CLAMP: tl.constexpr):
    """(position, inside): the position along an axis of ``extent`` elements, and whether it may be read or written.

    ``index``: integers of any shape, valid where ``live``. WRAP counts negative indices from the end. CLAMP replaces an
    index that is out of bounds by the nearest position; without it such an index is not inside.
    """
    if WRAP:
        index = tl.where(index < 0, index + extent, index)
    if CLAMP:
        index = tl.minimum(tl.maximum(index, 0), extent - 1)
        inside = live & (extent > 0)
    else:
        inside = live & (index >= 0) & (index < extent)
    return index, inside


@jit
def report(status, bad, position):
    """status = min(status, position where ``bad``).

    status: [1] of i64; bad, position: blocks of one shape. An atomic minimum does not depend on the order of programs.
    """
    first = tl.min(tl.where(bad, position.to(tl.int64), NO_BAD_INDEX))
    if first < NO_BAD_INDEX:
        tl.atomic_min(status, first, sem="relaxed")
