"""What the kernels of convolution share: where a tap reads, and the sum of parts."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import load_tile, quotient, store_tile
from triplan.backends.triton.common.overlap import begin


@jit
def offset(index, stride):
    """``index * stride`` in i64; a ``stride`` of None is 1."""
    return tl.cast(index, tl.int64) if stride is None else tl.cast(index, tl.int64) * stride


@jit
def load_near(at, mask, strides):
    """The values at addresses ``at`` [rows, columns], 0 without ``mask``; ``strides`` of rows and columns, None for 1.

    Consecutive threads read along the smaller stride. Where none is known, it is found when the kernel runs: of views
    such as every other channel of channels last, or every other column of channels first.
    """
    if strides[0] is None or strides[1] is None:
        found = tl.load(at, mask=mask, other=0.0)
    elif strides[0] <= strides[1]:
        found = load_tile(at, mask, 0.0, True)
    else:
        found = load_tile(at, mask, 0.0, False)
    return found


@jit
def store_near(at, value, mask, strides):
    """Store ``value`` [rows, columns] to the addresses ``at``; see ``load_near``."""
    if strides[0] is None or strides[1] is None:
        tl.store(at, value, mask=mask)
    elif strides[0] <= strides[1]:
        store_tile(at, value, mask, True)
    else:
        store_tile(at, value, mask, False)


@jit
def place_of(pixel, rows, columns):
    """(image, row, column) of ``pixel``; ``rows`` and ``columns`` are (size, multiplier, shift), see ``quotient``.

    A step finds this for each pixel that a thread reads: five divisions of i32 took longer than the step's products.
    """
    line = quotient(pixel, columns)
    image = quotient(line, rows)
    return image, line - image * rows[0], pixel - line * columns[0]


@jit
def first(index, stride, padding):
    """The row (or column) of x that tap 0 reads for a result; a ``stride`` of None is 1."""
    return (index if stride is None else index * stride) - padding


@jit
def within(index, extent):
    """Whether 0 <= ``index`` < ``extent``, of i32: below 0 it is unsigned larger than any extent."""
    return index.to(tl.uint32) < tl.cast(extent, tl.uint32)


@jit
def position(at, reach, extent, TRANSPOSED: tl.constexpr):
    """The row (or column) that a tap reads, and whether there is one. ``at`` is that of tap 0; TRANSPOSED: a tap of the
    gradient of x reads one ``reach`` rows before it, and not after."""
    found = at - reach if TRANSPOSED else at + reach
    return found, (found >= 0) & (found < extent)


@jit
def store_weight(out, out_strides, at, sums, inside, channels, kept, kernel_rows, kernel_columns):
    """out (filter, channel, tap row, tap column) = ``sums``, of the elements ``at`` of (filter, tap row, tap column,
    channel), packed.

    ``out`` has the first ``kept`` channels (None: all).
    """
    channel, rest = at % channels, at // channels
    column, rest = rest % kernel_columns, rest // kernel_columns
    row, rest = rest % kernel_rows, rest // kernel_rows
    place = offset(rest, out_strides[0]) + offset(channel, out_strides[1])
    place += offset(row, out_strides[2]) + offset(column, out_strides[3])
    if kept is not None:
        inside = inside & (channel < kept)
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)


@jit
def conv2d_fold_kernel(
    parts,
    out,
    out_strides,
    elements,
    count,
    channels,
    kernel_rows,
    kernel_columns,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out = the sum of ``count`` ``parts``: BLOCK of ``elements``; every PARTS-th in their order, then these sums.

    ``parts`` (part, filter, tap row, tap column, channel), packed, in the accumulator; ``out`` (filter, channel, tap
    row, tap column). PARTS loads wait together.
    """
    begin(OVERLAPS)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    lane = tl.arange(0, PARTS)
    of_lane = parts + lane.to(tl.int64)[:, None] * elements + at[None, :]
    sums = tl.zeros((PARTS, BLOCK), parts.dtype.element_ty)
    for part in range(0, count, PARTS):
        here = (part + lane < count)[:, None] & inside[None, :]
        sums += tl.load(of_lane + part * elements.to(tl.int64), mask=here, other=0.0)
    acc = tl.sum(sums, 0)
    store_weight(out, out_strides, at, acc, inside, channels, None, kernel_rows, kernel_columns)


@jit
def conv2d_fold_pieces_kernel(
    parts,
    out,
    out_strides,
    tiles,
    shares,
    lanes,
    boxes,
    tiles_filters,
    blocks,
    filters,
    taps,
    reduced,
    channels,
    kept,
    kernel_rows,
    kernel_columns,
    FILTERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = the sum of the pieces of a tile: BLOCK of its elements; every PARTS-th in their order, then these sums.

    ``parts``: the slots of ``conv2d_weight_wgmma_kernel``, which says what ``tiles``, ``shares``, ``lanes``, ``boxes``,
    ``tiles_filters``, ``blocks``, FILTERS and COLUMNS are. ``filters``, ``taps`` and ``reduced``: filters, taps, and
    channels under a tap, of what was multiplied. ``out``, ``channels``, ``kept`` and what follows: see
    ``store_weight``.
    """
    tl.static_assert(4096 % BLOCK == 0)
    AREA: tl.constexpr = FILTERS * COLUMNS * 4096
    tile, chunk = tl.program_id(0) // (AREA // BLOCK), tl.program_id(0) % (AREA // BLOCK)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    block = chunk * BLOCK // 4096
    column = tile // tiles_filters * COLUMNS + block % COLUMNS
    tap = column // blocks
    # Each lane that is a share's own is a piece. If the tile's last lane is left over, each share that has a part of it
    # has another piece: the ``first``-th to the ``last``-th share, whose steps, by ``begin_of``, lie in the lane.
    own = (shares - tile + tiles - 1) // tiles
    lane = (lanes - 1) * tiles + tile - shares
    pieces = own
    further = 0
    if lane >= 0:
        length = tl.cast(boxes // lanes, tl.int64)
        over = (lanes * tiles - shares) * length
        first = ((lane * length + 1) * shares + over - 1) // over
        last = ((lane + 1) * length * shares + over - 1) // over
        pieces += (last - first).to(tl.int32) + 1
        further = shares + lane + first.to(tl.int32) - 1 - own
    pieces = tl.where(tap < taps, pieces, 0)  # blocks behind the last tap are not written
    at_once = tl.arange(0, PARTS)
    sums = tl.zeros((PARTS, BLOCK), parts.dtype.element_ty)
    for piece in range(0, pieces, PARTS):
        number = piece + at_once
        slot = tl.where(number < own, tile + number * tiles, further + number).to(tl.int64)
        sums += tl.load(parts + slot[:, None] * AREA + at[None, :], mask=(number < pieces)[:, None], other=0.0)
    acc = tl.sum(sums, 0)
    within = at % 4096  # in blocks of 8 by 8, row by row
    filter_ = (tile % tiles_filters * FILTERS + block // COLUMNS) * 64 + within // 512 * 8 + within // 8 % 8
    channel = column % blocks * 64 + within // 64 % 8 * 8 + within % 8
    inside = (filter_ < filters) & (channel < reduced) & (tap < taps)
    place = (filter_ * taps + tap) * reduced + channel
    store_weight(out, out_strides, place, acc, inside, channels, kept, kernel_rows, kernel_columns)
