"""Sorted rows, entry ``block`` (Gluon): a program holds a row in registers, and sorts it by digits of 8 bits.

Between two digits the elements are exchanged in shared memory.
"""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import gl, gluon, thread_barrier
from triplan.backends.triton.common.rows_kernels import axis_offset
from triplan.backends.triton.sorting.ranking_kernels import COUNTERS, allocate_shared, exchanged, lanes_of, ranked
from triplan.backends.triton.sorting.shared_kernels import DIGITS, digit_of, kept_of, key_of


@gluon.jit
def sort_block_kernel(
    x,
    order,
    values,
    indices,
    x_strides,
    order_strides,
    values_strides,
    indices_strides,
    n,
    first,
    kept,
    BITS: gl.constexpr,
    INFINITY: gl.constexpr,
    DESCENDING: gl.constexpr,
    WARPS: gl.constexpr,
    ITEMS: gl.constexpr,
):
    """values[r], indices[r] = x[r] in stable order, and where its elements were; ``kept`` of them from ``first`` on, or
    all if that is None. A program takes a row.

    x: [rows, n]; values: [rows, kept] or None, both as integers of their width; indices: [rows, kept] of i64; order:
    None, or [rows, n], the positions that the elements had. n is at most 32 * WARPS * ITEMS.
    """
    TILE: gl.constexpr = 32 * WARPS * ITEMS
    WORD: gl.constexpr = 4 if BITS <= 16 else 8
    counters = allocate_shared(WARPS * COUNTERS + TILE * WORD)
    buffer = counters + WARPS * COUNTERS
    row = gl.program_id(0).to(gl.int64)
    warp, place = lanes_of(WARPS, ITEMS)
    # Elements behind the end of the row have the last digit in each pass, so that they stay the last ones.
    live = place < n
    bits = gl.load(x + row * x_strides[0] + axis_offset(place, x_strides[1]), mask=live, other=0)
    position = place
    for shift in range(0, BITS, 8):
        digit = gl.where(live, digit_of(key_of(bits, BITS, INFINITY, DESCENDING), shift, BITS), DIGITS - 1)
        rank, _, _ = ranked(digit, warp, counters, WARPS)
        if BITS <= 16:
            word = exchanged((position << 16) | (bits.to(gl.int32) & 0xFFFF), rank, place, buffer)
            position = (word >> 16) & 0xFFFF
            bits = word.to(bits.dtype)
        elif BITS == 32:
            word = exchanged((position.to(gl.int64) << 32) | (bits.to(gl.int64) & 0xFFFFFFFF), rank, place, buffer)
            position = (word >> 32).to(gl.int32)
            bits = word.to(bits.dtype)
        else:
            bits = exchanged(bits, rank, place, buffer)
            thread_barrier()  # all have read
            position = exchanged(position, rank, place, buffer)
    to, live = kept_of(place, live, first, kept)
    if values is not None:
        gl.store(values + row * values_strides[0] + axis_offset(to, values_strides[1]), bits, mask=live)
    if order is not None:
        at = order + row * order_strides[0] + axis_offset(position, order_strides[1])
        position = gl.load(at, mask=live, other=0)
    gl.store(indices + row * indices_strides[0] + axis_offset(to, indices_strides[1]), position.to(gl.int64), mask=live)
