"""Sorted rows and their elements, entry ``rows``: whole rows in registers, in Triton's bitonic sort.

A key and its position are packed into one integer: these are distinct, so that their order is the stable one.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import load_tile
from triplan.backends.triton.common.rows_kernels import axis_offset
from triplan.backends.triton.sorting.shared_kernels import kept_of, key_of


@jit
def positions_in_order(key, live, BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The positions of the keys [ROWS, BLOCK] of each row in their stable order; those that are not ``live`` last.

    Of 64 bits the low half is sorted first, then the high one. ``tl.sort`` takes one integer an element.
    """
    lane = tl.zeros((ROWS, BLOCK), tl.int32) + tl.arange(0, BLOCK)[None, :]
    if BITS <= 16:
        packed = tl.where(live, key, 0x7FFF) * 65536 + lane
        place = tl.sort(packed, 1) & 0xFFFF
    elif BITS == 32:
        packed = (tl.where(live, key, 0x7FFFFFFF).to(tl.int64) << 32) + lane
        place = tl.sort(packed, 1).to(tl.int32)
    else:
        key = tl.where(live, key, 0x7FFFFFFFFFFFFFFF)
        # The low half has no sign: what remains is shifted to the range of signed integers.
        low = (key & 0xFFFFFFFF) - 0x80000000
        place = tl.sort((low << 32) + lane, 1).to(tl.int32)
        high = tl.gather(key >> 32, place, 1)
        place = tl.gather(place, tl.sort((high << 32) + lane, 1).to(tl.int32), 1)
    return place


@jit
def sort_rows_kernel(
    x,
    values,
    indices,
    x_strides,
    values_strides,
    indices_strides,
    rows,
    n,
    first,
    kept,
    BITS: tl.constexpr,
    INFINITY: tl.constexpr,
    DESCENDING: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """values[r], indices[r] = ``kept`` elements of x[r] in order from ``first`` on, and where they were: all if None.

    x: [rows, n]; values: [rows, kept] or None, both as integers of their width; indices: [rows, kept] of i64. A program
    takes ROWS rows.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    live = (row < rows) & (col < n)
    at = x + row * x_strides[0]
    # Consecutive threads have consecutive columns, whatever is adjacent: otherwise each step of the sort would go
    # through shared memory.
    bits = load_tile(at + axis_offset(col, x_strides[1]), live, 0, x_strides[1] is None)
    key = key_of(bits, BITS, INFINITY, DESCENDING)
    place = positions_in_order(key, live, BITS, ROWS, BLOCK)
    to, live = kept_of(col, live, first, kept)
    if values is not None:
        bits = tl.load(at + axis_offset(place, x_strides[1]), mask=live, other=0)
        tl.store(values + row * values_strides[0] + axis_offset(to, values_strides[1]), bits, mask=live)
    tl.store(indices + row * indices_strides[0] + axis_offset(to, indices_strides[1]), place.to(tl.int64), mask=live)
