"""Sorted rows, entry ``radix``: a stable sort by one digit after the other, the lowest first, in three launches each.

``tiles_kernel`` sorts each tile by the digit, and counts; ``scan_kernel`` turns the counts into places, and
``scatter_kernel`` moves the elements of a tile there, whose equal digits then stand together and are stored together.
Every place is computed from integers, so that the result is deterministic. Elements travel as they are, and their keys
are computed anew in each pass: so the last pass writes the results.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import axis_offset
from triplan.backends.triton.sorting.shared_kernels import DIGITS, digit_of, key_of, load_keys


@jit
def bits_along(AXES: tl.constexpr, AXIS: tl.constexpr):
    """0 and 1 along ``AXIS`` of a hypercube of ``AXES`` axes."""
    return tl.reshape(tl.arange(0, 2), [1] * AXIS + [2] + [1] * (AXES - AXIS - 1))


@jit
def compared(cube, AXES: tl.constexpr, AXIS: tl.constexpr):
    """The smaller of two neighbours along ``AXIS`` at 0, the larger one at 1."""
    other = cube ^ tl.xor_sum(cube, AXIS, keep_dims=True)
    return tl.where(bits_along(AXES, AXIS) == 1, tl.maximum(cube, other), tl.minimum(cube, other))


@triton.constexpr_function
def axis_of(bit, axes, thread):
    """The axis of a hypercube that bit ``bit`` of a rank stands for: the lowest ``thread`` ones are its first axes."""
    return thread - 1 - bit if bit < thread else axes - 1 - (bit - thread)


@jit
def sorted_tickets(ticket, LOG: tl.constexpr, THREAD: tl.constexpr):
    """Distinct integers, [2**LOG], in ascending order: a bitonic network. Any i32 above -(2**31) may occur.

    In whatever order Triton reshapes them to a hypercube, it gives its last axes to the lanes, those before them to the
    warps, and the first ``THREAD`` ones to the registers of a thread. The lowest bits of a rank, along which a bitonic
    network compares most often, are those. Blocks that are to descend hold complements, so that each comparison is a
    minimum or maximum whose direction is known when compiling. (By instructions half of what tl.sort compiles to.)
    """
    cube = tl.reshape(ticket, [2] * LOG, can_reorder=True)
    for stage in tl.static_range(1, LOG + 1):
        if stage < LOG:
            flip = 0 - bits_along(LOG, axis_of(stage, LOG, THREAD))
            cube = cube ^ flip
        for step in tl.static_range(stage):
            cube = compared(cube, LOG, axis_of(stage - 1 - step, LOG, THREAD))
        if stage < LOG:
            cube = cube ^ flip
    return tl.reshape(tl.trans(tl.reshape(cube, [2**THREAD, 2 ** (LOG - THREAD)])), [2**LOG])


@jit
def larger(a, b):
    return tl.maximum(a, b)


@jit
def tiles_kernel(
    x,
    x_strides,
    lanes,
    counts,
    n,
    tiles,
    shift,
    BITS: tl.constexpr,
    INFINITY: tl.constexpr,
    DESCENDING: tl.constexpr,
    LOG: tl.constexpr,
    THREAD: tl.constexpr,
):
    """lanes[r, t] = the places of tile t of x[r] in the order of their digits at bit ``shift``, stably; and counts.

    counts[r, d, t] = occurrences of the digit d. x: [rows, n], as integers of their width; lanes: [rows, tiles, 2**LOG]
    of i16; counts: [rows, DIGITS, tiles + 1] of i32. A program takes a tile, and sorts tickets, of a digit and a place.
    """
    BLOCK: tl.constexpr = 2**LOG
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    of_digit = counts + row * DIGITS * (tiles + 1) + tile
    tl.store(of_digit + tl.arange(0, DIGITS) * (tiles + 1), tl.zeros((DIGITS,), tl.int32))
    tl.debug_barrier()  # other threads store the counts that are not 0

    lane = tl.arange(0, BLOCK)
    col = tile * BLOCK + lane
    key = load_keys(x + row * x_strides[0], x_strides[1], col, col < n, BITS, INFINITY, DESCENDING)
    # Distinct, and ascending in (digit, lane): their order is stable. Lanes behind the end of the row stay the last.
    digit = tl.where(col < n, digit_of(key, shift, BITS), DIGITS - 1)
    ticket = sorted_tickets(digit * BLOCK + lane, LOG, THREAD)
    tl.store(lanes + tl.program_id(0).to(tl.int64) * BLOCK + lane, (ticket % BLOCK).to(tl.int16))

    digit = ticket // BLOCK
    live = tl.minimum(n - tile * BLOCK, BLOCK)
    after = tl.gather(digit, (lane + 1) % BLOCK, 0)
    before = tl.gather(digit, (lane + BLOCK - 1) % BLOCK, 0)
    first = tl.associative_scan(tl.where(before != digit, lane, 0), 0, larger)
    is_last = ((after != digit) | (lane == live - 1)) & (lane < live)
    tl.store(of_digit + digit * (tiles + 1), lane - first + 1, mask=is_last)


@jit
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


@jit
def scatter_kernel(
    x,
    order,
    lanes,
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
    first pass, where positions still ascend; ``values`` is None where none are wanted. ``lanes`` are those of
    ``tiles_kernel``, ``counts`` its counts, scanned.
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
    source = first + tl.load(lanes + tl.program_id(0).to(tl.int64) * BLOCK + lane).to(tl.int32)
    bits = tl.load(x + row * x_strides[0] + axis_offset(source, x_strides[1]), mask=live, other=0)
    to = tl.gather(offset, digit_of(key_of(bits, BITS, INFINITY, DESCENDING), shift, BITS), 0) + lane
    if values is not None:
        tl.store(values + row * values_strides[0] + axis_offset(to, values_strides[1]), bits, mask=live)
    place = source
    if order is not None:
        place = tl.load(order + row * order_strides[0] + axis_offset(source, order_strides[1]), mask=live, other=0)
    place = place.to(indices.dtype.element_ty)
    tl.store(indices + row * indices_strides[0] + axis_offset(to, indices_strides[1]), place, mask=live)
