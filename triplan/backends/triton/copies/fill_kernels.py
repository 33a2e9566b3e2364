"""Kernel of ``fill``: results that are computed from numbers alone."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import store_tile, tile_start, unravel


@jit
def _numbers(start, step, at, NUMBER_TYPE, CAST, OUT):
    """start + at * step in NUMBER_TYPE, as OUT; start if ``step`` is None. CAST: see ``moves_kernels.converted``."""
    value = tl.full(at.shape, start, NUMBER_TYPE)
    if step is not None:
        value += at.to(NUMBER_TYPE) * tl.full(at.shape, step, NUMBER_TYPE)
    if CAST == "bool":
        value = value != 0
    elif CAST == "f32":
        value = value.to(tl.float32)
    return value.to(OUT)


@jit
def _row_offset(row, sizes, strides):
    """See ``unravel``; 0 where there is one row."""
    return (row * 0).to(tl.int64) if sizes is None else unravel(row, sizes, strides)


@jit
def _before(at, VECTOR: tl.constexpr):
    """Elements between the addresses ``at`` and multiples of 16 bytes before them."""
    return (at.to(tl.int64) & 15).to(tl.int32) // (16 // VECTOR)


@jit
def _vectors(start, step, row_at, vector, live, columns, NUMBER_TYPE, CAST, VECTOR: tl.constexpr):
    """Write the vectors ``vector`` elements behind the multiples of 16 bytes at or before ``row_at``, if rows hold them
    whole. All [N, 1]; rows begin at ``row_at`` and have ``columns`` elements."""
    OUT: tl.constexpr = row_at.dtype.element_ty
    lane, before = tl.arange(0, VECTOR)[None, :], _before(row_at, VECTOR)
    column = vector - before
    value = _numbers(start, step, column + lane, NUMBER_TYPE, CAST, OUT)
    whole = live & (column >= 0) & (column + VECTOR <= columns)
    # Of one row, row_at - before is a scalar in all but shape; Triton fails to compile a hint of two axes on it.
    tl.store(tl.multiple_of(row_at - before + vector, (16, 16)) + lane, value, mask=whole)


@jit
def _ends(start, step, row_at, live, columns, NUMBER_TYPE, CAST, VECTOR: tl.constexpr):
    """Write what ``_vectors`` leaves of the rows at ``row_at`` [ROWS, 1]."""
    OUT: tl.constexpr = row_at.dtype.element_ty
    lane, before = tl.arange(0, VECTOR)[None, :], _before(row_at, VECTOR)
    head = tl.where(before == 0, 0, VECTOR - before)
    value = _numbers(start, step, lane + before * 0, NUMBER_TYPE, CAST, OUT)
    tl.store(row_at + lane, value, mask=live & (lane < head) & (lane < columns))
    tail = (columns + before) // VECTOR * VECTOR - before + lane
    value = _numbers(start, step, tail, NUMBER_TYPE, CAST, OUT)
    tl.store(row_at + tail, value, mask=live & (tail >= head) & (tail < columns))


@jit
def numbers_kernel(
    start,
    step,
    out,
    sizes,
    strides,
    along,
    rows,
    columns,
    NUMBER_TYPE: tl.constexpr,
    CAST: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    SHIFTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """out[r, c] = start + c * step for r over the points of ``sizes``; out[r, c] = start if ``step`` is None.

    start, step: scalars of NUMBER_TYPE; out: any type (bool as i8), of ``strides`` along ``sizes``, innermost dimension
    first, and ``along`` (None: 1) along the columns. rows, sizes, strides: None where there is one row.

    Only the last tiles are masked: a mask whose length is not a multiple of 16 bytes would narrow all stores. With
    SHIFTS, which is for contiguous rows that begin or end anywhere, the vectors within a row are stored as such, and
    its ends one by one.
    """
    OUT: tl.constexpr = out.dtype.element_ty
    VECTOR: tl.constexpr = 128 // OUT.primitive_bitwidth
    first_row, first = tile_start(rows, columns, POINT_TYPE, BLOCK_ROWS, BLOCK_COLUMNS)
    count = 1 if rows is None else rows
    if SHIFTS:
        VECTORS: tl.constexpr = BLOCK_COLUMNS // VECTOR
        number = tl.arange(0, BLOCK_ROWS * VECTORS)[:, None]
        row, vector = first_row + number // VECTORS, first + number % VECTORS * VECTOR
        row_at = out + _row_offset(row, sizes, strides)
        _vectors(start, step, row_at, vector, row < count, columns, NUMBER_TYPE, CAST, VECTOR)
        if first == 0:
            line = (first_row + tl.arange(0, BLOCK_ROWS))[:, None]
            line_at = out + _row_offset(line, sizes, strides)
            _ends(start, step, line_at, line < count, columns, NUMBER_TYPE, CAST, VECTOR)
    else:
        row = first_row + tl.arange(0, BLOCK_ROWS)
        column = first + tl.arange(0, BLOCK_COLUMNS)
        value = _numbers(start, step, column, NUMBER_TYPE, CAST, OUT)
        value = tl.broadcast_to(value[None, :], (BLOCK_ROWS, BLOCK_COLUMNS))
        step_at = column if along is None else column * along
        to = out + (_row_offset(row, sizes, strides)[:, None] + step_at[None, :])
        if (first_row + BLOCK_ROWS <= count) & (first + BLOCK_COLUMNS <= columns):
            store_tile(to, value, None, along is None)
        else:
            store_tile(to, value, (row < count)[:, None] & (column < columns)[None, :], along is None)
