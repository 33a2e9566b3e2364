"""Sorted rows and their elements, entry ``rows``: whole rows in registers, in Triton's bitonic sort.

A key and its position are packed into one integer: these are distinct, so that their order is the stable one.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import axis_offset
from triplan.backends.triton.sorting.shared_kernels import kept_of, key_of


@jit
def column_of(i, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """The column that is element ``i`` of a block: SPLIT columns that are BLOCK // SPLIT apart follow each other."""
    return i % SPLIT * (BLOCK // SPLIT) + i // SPLIT


@jit
def positions_in_order(key, live, BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
    """The columns of the keys [ROWS, BLOCK] of each row in their stable order; those that are not ``live`` last.

    The keys lie as ``column_of`` says. Of 64 bits the low half is sorted first, then the high one. ``tl.sort`` takes
    one integer an element.
    """
    lane = tl.zeros((ROWS, BLOCK), tl.int32) + tl.arange(0, BLOCK)[None, :]
    col = column_of(lane, SPLIT, BLOCK)
    if BITS <= 16:
        packed = tl.where(live, key, 0x7FFF) * 65536 + col
        place = tl.sort(packed, 1) & 0xFFFF
    elif BITS == 32:
        packed = (tl.where(live, key, 0x7FFFFFFF).to(tl.int64) << 32) + col
        place = tl.sort(packed, 1).to(tl.int32)
    else:
        key = tl.where(live, key, 0x7FFFFFFFFFFFFFFF)
        # The low half has no sign: what remains is shifted to the range of signed integers.
        low = (key & 0xFFFFFFFF) - 0x80000000
        place = tl.sort((low << 32) + col, 1).to(tl.int32)
        high = tl.gather(key >> 32, column_of(place, BLOCK // SPLIT, BLOCK), 1)  # (the inverse)
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
    SPLIT: tl.constexpr,
):
    """values[r], indices[r] = ``kept`` elements of x[r] in order from ``first`` on, and where they were: all if None.

    x: [rows, n]; values: [rows, kept] or None, both as integers of their width; indices: [rows, kept] of i64. A program
    takes ROWS rows. A thread reads SPLIT times as many elements as are adjacent to it in memory, and sorts them as
    neighbours: most steps of a sort are between neighbours, and within a thread they take registers alone.
    """
    EACH: tl.constexpr = BLOCK // SPLIT
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    # Of axes along which the compiler knows nothing to be adjacent, the first is that of consecutive threads; and those
    # that are left for the last one are in registers.
    col = tl.arange(0, EACH)[:, None, None] + tl.arange(0, SPLIT)[None, None, :] * EACH
    row = first_row + tl.arange(0, ROWS)[None, :, None]
    at = x + row * x_strides[0] + axis_offset(col, x_strides[1])
    if EACH == 1:  # each element has an access: told that they are adjacent, Triton would spread a row over a warp
        at = tl.max_contiguous(at, [1, 1, 1])
    bits = tl.load(at, mask=(row < rows) & (col < n), other=0).permute(1, 0, 2).reshape(ROWS, BLOCK)
    key = key_of(bits, BITS, INFINITY, DESCENDING)

    row = first_row + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    live = (row < rows) & (column_of(col, SPLIT, BLOCK) < n)
    place = positions_in_order(key, live, BITS, ROWS, BLOCK, SPLIT)
    to, live = kept_of(col, (row < rows) & (col < n), first, kept)
    if values is not None:
        at = x + row * x_strides[0] + axis_offset(place, x_strides[1])
        bits = tl.load(at, mask=live, other=0)
        tl.store(values + row * values_strides[0] + axis_offset(to, values_strides[1]), bits, mask=live)
    tl.store(indices + row * indices_strides[0] + axis_offset(to, indices_strides[1]), place.to(tl.int64), mask=live)
