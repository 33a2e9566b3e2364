"""Kernel of ``rows``: copies in tiles of rows and columns; each row's address is computed from its number."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import load_tile, quotient, store_tile, tile_start
from triplan.backends.triton.copies.moves_kernels import FLIP, as_words, converted, is_inside, outside, place, source


@jit
def rows_kernel(
    x,
    value,
    out,
    dims,
    along,
    rows,
    diagonal,
    MAPS: tl.constexpr,
    MAP: tl.constexpr,
    X_UNIT: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    TRIANGLE: tl.constexpr,
    VALUE_TYPE: tl.constexpr,
    CAST: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """out[r, c] = x[m(r), m(c)], or ``value`` (0 if None) where x has no such element, for r over the points of dims.

    x, out: any elements. dims: (size, amount, extent of x, stride of x, stride of out) of each dimension of the rows,
    innermost first; along: the same for the columns, where X_UNIT and OUT_UNIT say that a stride is 1. MAPS and MAP
    select m. With TRIANGLE 1, elements with c - i > diagonal are 0 (with -1: < diagonal), i being the position along
    dims[0]. rows: None where there is one row.
    """
    columns = along[0]
    first_row, first_column = tile_start(rows, columns, POINT_TYPE, BLOCK_ROWS, BLOCK_COLUMNS)
    count = 1 if rows is None else rows
    row, column = first_row + tl.arange(0, BLOCK_ROWS), first_column + tl.arange(0, BLOCK_COLUMNS)
    x_row, out_row, row_inside = place(row, dims, MAPS)
    at = source(column, along, MAP)
    inside = row_inside[:, None] & is_inside(at, along, MAP)[None, :]
    x_at = x_row[:, None] + (at[None, :] if X_UNIT else (at * along[3])[None, :])
    out_at = out_row[:, None] + (column[None, :] if OUT_UNIT else (column * along[4])[None, :])
    x_at, out_at = x + x_at, out + out_at
    if value is None and TRIANGLE == 0:
        # Only the last tiles are masked: a mask whose length is not a multiple of 16 bytes narrows loads and stores.
        if (first_row + BLOCK_ROWS <= count) & (first_column + BLOCK_COLUMNS <= columns):
            store_tile(out_at, converted(load_tile(x_at, None, None, X_UNIT), out, CAST), None, OUT_UNIT)
        else:
            live = (row < count)[:, None] & (column < columns)[None, :]
            store_tile(out_at, converted(load_tile(x_at, live, None, X_UNIT), out, CAST), live, OUT_UNIT)
    elif TRIANGLE == 0:
        live = (row < count)[:, None] & (column < columns)[None, :]
        loaded = load_tile(x_at, live & inside, outside(x, value, VALUE_TYPE), X_UNIT)
        store_tile(out_at, converted(loaded, out, CAST), live, OUT_UNIT)
    else:
        position = row - quotient(row, dims[0][0]) * dims[0][0][0]
        nearest = first_column if TRIANGLE == 1 else first_column + BLOCK_COLUMNS - 1
        # The mask is per row, not per element: one that differs between columns would narrow the loads.
        needed = ((nearest - position) * TRIANGLE <= diagonal * TRIANGLE)[:, None]
        keep = (column[None, :] - position[:, None]) * TRIANGLE <= diagonal * TRIANGLE
        if (first_row + BLOCK_ROWS <= count) & (first_column + BLOCK_COLUMNS <= columns):
            loaded = load_tile(x_at, needed, 0, X_UNIT)
            store_tile(out_at, tl.where(keep, loaded, 0), None, OUT_UNIT)
        else:
            live = (row < count)[:, None] & (column < columns)[None, :]
            loaded = load_tile(x_at, live & needed, 0, X_UNIT)
            store_tile(out_at, tl.where(keep, loaded, 0), live, OUT_UNIT)


@jit
def triangle_kernel(
    x,
    out,
    rows,
    columns,
    numel,
    diagonal,
    TRIANGLE: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[i] = x[i] for i < numel, or 0 outside of the triangle, as ``rows_kernel`` has it, of packed matrices.

    x, out: any elements. rows, columns: of the matrices, see ``quotient``.
    """
    start = tl.program_id(0).to(POINT_TYPE) * BLOCK
    point = start + tl.arange(0, BLOCK)
    line = quotient(point, columns)
    row, column = line - quotient(line, rows) * rows[0], point - line * columns[0]
    keep = (point < numel) & ((column - row) * TRIANGLE <= diagonal * TRIANGLE)
    value = tl.load(x + point, mask=keep, other=0)
    if start + BLOCK <= numel:
        tl.store(out + point, value)
    else:
        tl.store(out + point, value, mask=point < numel)


@jit
def flat_kernel(
    x,
    value,
    out,
    dims,
    along,
    numel,
    MAPS: tl.constexpr,
    MAP: tl.constexpr,
    WORDS: tl.constexpr,
    SHIFT: tl.constexpr,
    VALUE_TYPE: tl.constexpr,
    CAST: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[i] = x[m(i)], or ``value`` where x has no such element, for i < numel: of a packed result.

    dims, along: as in ``rows_kernel``, without strides of out; along[0] as ``quotient`` takes it. Each element finds
    its source by itself. So loads have one element, but stores are vectors wherever rows begin.

    WORDS: where not 0, elements have so many bits and are moved by words of 32, in which numel, ``along`` and strides
    count. SHIFT: bits by which MAP moves elements besides the words of its amount. Each word of the result is then of
    two words of x, the first of which is in the cache: it is the second of the word before.
    """
    start = tl.program_id(0).to(POINT_TYPE) * BLOCK
    point = start + tl.arange(0, BLOCK)
    row, i = point * 0, point
    if dims is not None:
        row = quotient(point, along[0])
        i = point - row * along[0][0]
    x_row, _, row_inside = place(row, dims, MAPS)
    if WORDS != 0:
        out = as_words(out, tl.uint32)
    if start + BLOCK <= numel:
        loaded = mapped(x, value, x_row, row_inside, i, along, None, MAP, WORDS, SHIFT, VALUE_TYPE)
        tl.store(out + point, converted(loaded, out, CAST))
    else:
        live = point < numel
        loaded = mapped(x, value, x_row, row_inside, i, along, live, MAP, WORDS, SHIFT, VALUE_TYPE)
        tl.store(out + point, converted(loaded, out, CAST), mask=live)


@jit
def mapped(
    x,
    value,
    x_row,
    row_inside,
    i,
    along,
    live,
    MAP: tl.constexpr,
    WORDS: tl.constexpr,
    SHIFT: tl.constexpr,
    VALUE_TYPE: tl.constexpr,
):
    """What ``flat_kernel`` writes at positions ``i`` of rows that begin at ``x_row``; live: None where all are."""
    other = outside(x, value, VALUE_TYPE)
    if WORDS != 0:
        x = as_words(x, tl.uint32)
        other = other.to(tl.uint16 if WORDS == 16 else tl.uint8, bitcast=True).to(tl.uint32)
        other *= 0x00010001 if WORDS == 16 else 0x01010101
    found = fetched(x, value, x_row, row_inside, source(i, along, MAP), along, live, other, MAP)
    if SHIFT != 0:
        before = fetched(x, value, x_row, row_inside, source(i - 1, along, MAP), along, live, other, MAP)
        found = (found << SHIFT) | (before >> (32 - SHIFT))
    elif WORDS == 16 and MAP == FLIP:
        found = (found << 16) | (found >> 16)
    elif WORDS == 8 and MAP == FLIP:
        found = (found << 24) | ((found & 0xFF00) << 8) | ((found >> 8) & 0xFF00) | (found >> 24)
    return found


@jit
def fetched(x, value, x_row, row_inside, at, along, live, other, MAP: tl.constexpr):
    """x at positions ``at`` of the rows, or ``other``; live: None where all are."""
    x_at = x + (x_row + at * along[3])
    if value is None:
        found = tl.load(x_at, mask=live)
    else:
        inside = row_inside & is_inside(at, along, MAP)
        found = tl.load(x_at, mask=inside if live is None else inside & live, other=other)
    return found
