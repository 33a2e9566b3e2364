"""Sorted rows, entry ``radix``: a stable sort by one digit after the other, the lowest first, in three launches each.

``counts_kernel`` counts the digits of each tile, ``scan_kernel`` turns the counts into places, ``scatter_kernel`` moves
the elements of a tile there. Every place is computed from integers, so that the result is deterministic. Elements
travel as they are, and their keys are computed anew in each pass: so the last pass writes the results.

Within a tile, Triton's bitonic sort orders tickets, of a digit and a position.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.rows_kernels import axis_offset
from triplan.backends.triton.sorting.shared_kernels import DIGITS, digit_of, load_keys


@triton.jit
def counts_kernel(
    x,
    x_strides,
    counts,
    n,
    tiles,
    shift,
    BITS: tl.constexpr,
    INFINITY: tl.constexpr,
    DESCENDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """counts[r, d, t] = occurrences of the digit d at bit ``shift`` in tile t of x[r]. A program takes one tile.

    x: [rows, n], as integers of their width; counts: [rows, DIGITS, tiles + 1] of i32.
    """
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    col = tile * BLOCK + tl.arange(0, BLOCK)
    key = load_keys(x + row * x_strides[0], x_strides[1], col, col < n, BITS, INFINITY, DESCENDING)
    found = tl.histogram(digit_of(key, shift, BITS), DIGITS, mask=col < n)
    tl.store(counts + (row * DIGITS + tl.arange(0, DIGITS)) * (tiles + 1) + tile, found)


@triton.jit
def scan_kernel(counts, tiles, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """counts[l, t] = sum of counts[l, earlier tiles]; counts[l, tiles] = the sum over all.

    counts: [lines, tiles + 1] of i32. A program takes GROUP lines, BLOCK tiles of each at a time.
    """
    line = (tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP))[:, None]
    at = counts + line * (tiles + 1)
    before = tl.zeros((GROUP, 1), tl.int32)
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)[None, :]
        found = tl.load(at + tile, mask=tile < tiles, other=0)
        tl.store(at + tile, before + tl.cumsum(found, 1) - found, mask=tile < tiles)
        before += tl.sum(found, 1, keep_dims=True)
    tl.store(at + tiles, before)


@triton.jit
def scatter_kernel(
    x,
    order,
    values,
    indices,
    x_strides,
    order_strides,
    values_strides,
    indices_strides,
    counts,
    n,
    tiles,
    shift,
    BITS: tl.constexpr,
    INFINITY: tl.constexpr,
    DESCENDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """values[r], indices[r] = x[r] and order[r], stably sorted by the digits at bit ``shift``. A program takes a tile.

    x, values: [rows, n], as integers of their width; order, indices: [rows, n] of i32 or i64. ``order`` is None in the
    first pass, where positions still ascend; ``values`` is None where none are wanted. ``counts`` are scanned.
    """
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    of_digit = counts + (row * DIGITS + tl.arange(0, DIGITS)) * (tiles + 1)
    before = tl.load(of_digit + tile)
    total = tl.load(of_digit + tiles)
    # (The entry behind the last tile is the total, so that this is right for every tile.)
    here = tl.load(of_digit + tile + 1) - before
    # Where the elements of a digit go, less their places in the sorted tile.
    offset = tl.cumsum(total, 0) - total + before - (tl.cumsum(here, 0) - here)

    first = tile * BLOCK
    lane = tl.arange(0, BLOCK)
    live = first + lane < n
    x += row * x_strides[0]
    key = load_keys(x, x_strides[1], first + lane, live, BITS, INFINITY, DESCENDING)
    # Distinct, and ascending in (digit, lane): their order is stable. Lanes behind the end of the row stay the last.
    digit = tl.where(live, digit_of(key, shift, BITS), DIGITS - 1)
    ticket = tl.sort(digit * BLOCK + lane)
    source = first + ticket % BLOCK
    to = tl.gather(offset, ticket // BLOCK, 0) + lane
    if values is not None:
        bits = tl.load(x + axis_offset(source, x_strides[1]), mask=live, other=0)
        tl.store(values + row * values_strides[0] + axis_offset(to, values_strides[1]), bits, mask=live)
    place = source
    if order is not None:
        place = tl.load(order + row * order_strides[0] + axis_offset(source, order_strides[1]), mask=live, other=0)
    place = place.to(indices.dtype.element_ty)
    tl.store(indices + row * indices_strides[0] + axis_offset(to, indices_strides[1]), place, mask=live)
