"""What the kernels of sorting share: integer keys in the order of the elements, and their digits.

Elements are read as integers and moved bit by bit: a NaN keeps its payload.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import axis_offset

#: Digits of the radix searches and sorts.
DIGITS = tl.constexpr(256)


@jit
def key_of(bits, BITS: tl.constexpr, INFINITY: tl.constexpr, DESCENDING: tl.constexpr):
    """Integers that ascend in the order that is wanted: of BITS significant bits, in i32, or i64 if BITS is 64.

    ``bits``: of floats, integers of their width, and INFINITY is that of infinity; otherwise the elements, and INFINITY
    is 0. Sign and magnitude become two's complement, in which -0.0 and 0.0 are one; a NaN becomes the largest integer.
    """
    largest: tl.constexpr = (1 << (BITS - 1)) - 1
    wide = bits.to(tl.int64 if BITS == 64 else tl.int32)
    if INFINITY > 0:
        magnitude = wide & largest
        key = tl.where(magnitude > INFINITY, largest, tl.where(wide < 0, -magnitude, magnitude))
    elif bits.dtype == tl.uint8:
        key = wide - 128
    else:
        key = wide
    if DESCENDING:
        key = ~key
    return key


@jit
def digit_of(key, shift, BITS: tl.constexpr):
    """The digit of ``key`` at bit ``shift``, i32; the highest one such that larger keys have larger digits."""
    return (((key >> shift) & 255) ^ tl.where(shift == BITS - 8, 128, 0)).to(tl.int32)


@jit
def kept_of(place, live, first, kept):
    """(Where places in order go, which are written): ``kept`` of them from ``first`` on, or all if that is None."""
    if first is not None:
        place = place - first
        live = live & (place >= 0) & (place < kept)
    return place, live


@jit
def load_keys(at, stride, col, known, BITS: tl.constexpr, INFINITY: tl.constexpr, DESCENDING: tl.constexpr):
    """The keys of the elements ``col`` of the row at ``at``; anything where they are not ``known``."""
    return key_of(tl.load(at + axis_offset(col, stride), mask=known, other=0), BITS, INFINITY, DESCENDING)
