"""Packed rows of 16-bit elements that begin between two vectors, read and written by vectors all the same.

A row is read from the aligned vector on that it begins in, up to the end of its last one; the elements beside it are
ignored. Behind the last row there may be no memory: what it has of that vector is read by itself. Vectors that lie
within the row are written as such, and the other elements by themselves. The bits of a row must not depend on where it
begins: each element is accumulated by itself, and accumulators are moved back before they are reduced.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit


@jit
def shifted_row(row, n, VECTOR: tl.constexpr):
    """(skipped, start, end) of one of packed rows of ``n`` elements: ``start`` is where the aligned vector of VECTOR
    elements begins in which the row does. Counted from there, the row is elements ``skipped`` up to ``end``.
    """
    skipped = (row % VECTOR) * (n % VECTOR).to(tl.int32) % VECTOR
    return skipped, tl.multiple_of(row.to(tl.int64) * n - skipped, VECTOR), n + skipped


@jit
def read_end(row, end, VECTOR: tl.constexpr):
    """The end of what is read by vectors: that of a ``shifted_row``. But behind the last row, which the last program
    has, there may be no memory: there it is the end of the last vector that is whole."""
    return tl.where(row == tl.num_programs(0) - 1, end // VECTOR * VECTOR, end)


@jit
def rest_elements(known, end, BLOCK: tl.constexpr):
    """(place, live) [BLOCK] of the elements from ``known``, a ``read_end``, up to ``end``: each where a loop over
    blocks would have it, so that it is added to the same accumulator."""
    place = known // BLOCK * BLOCK + tl.arange(0, BLOCK)
    return place, (place >= known) & (place < end)


@jit
def whole_vectors(place, skipped, end, VECTOR: tl.constexpr):
    """Which elements of a ``shifted_row`` are in a vector that lies within it."""
    vector = place // VECTOR * VECTOR
    return (vector >= skipped) & (vector <= end - VECTOR)


@jit
def other_elements(skipped, end, VECTOR: tl.constexpr):
    """(place, live) of the elements of a ``shifted_row`` that are in no whole vector: of the first one, and of the one
    that the row ends in."""
    place = tl.arange(0, 2 * VECTOR)
    place = tl.where(place < VECTOR, place, place - VECTOR + end // VECTOR * VECTOR)
    vector = place // VECTOR * VECTOR
    return place, (place >= skipped) & (place < end) & ((vector < skipped) | (vector > end - VECTOR))


@jit
def moved_back(accumulated, skipped, BLOCK: tl.constexpr):
    """Accumulators [BLOCK] of which number (k + skipped) % BLOCK has element k of a ``shifted_row``, by k % BLOCK."""
    return tl.gather(accumulated, (tl.arange(0, BLOCK) + skipped) % BLOCK, 0)
