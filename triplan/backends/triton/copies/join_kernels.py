"""Kernel of ``join``: tensors side by side."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit


@jit
def join_kernel(
    inputs,
    widths,
    strides,
    out,
    out_stride,
    rows,
    POINT_TYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """out[r, widths[0] + ... + widths[i - 1] + c] = inputs[i][r, c].

    inputs: [rows, widths[i]] of any element, whose rows are ``strides[i]`` apart; out: [rows, sum(widths)]. A program
    moves a tile of one input; the tiles of the same rows follow each other.
    """
    across = 0
    for i in tl.static_range(len(inputs)):
        across += tl.cdiv(widths[i], BLOCK_COLUMNS).to(tl.int32)
    row = (tl.program_id(0) // across).to(POINT_TYPE) * BLOCK_ROWS
    tile = tl.program_id(0) % across
    # The input that the tile is of, the first tile of that input, and where its columns begin in out.
    x, width, stride = inputs[0], widths[0], strides[0]
    first, begin = 0, widths[0] * 0
    next_tile, next_column = tl.cdiv(widths[0], BLOCK_COLUMNS).to(tl.int32), widths[0]
    for i in tl.static_range(1, len(inputs)):
        is_here = tile >= next_tile
        x, width = tl.where(is_here, inputs[i], x), tl.where(is_here, widths[i], width)
        stride = tl.where(is_here, strides[i], stride)
        first, begin = tl.where(is_here, next_tile, first), tl.where(is_here, next_column, begin)
        next_tile += tl.cdiv(widths[i], BLOCK_COLUMNS).to(tl.int32)
        next_column += widths[i]
    start = (tile - first).to(POINT_TYPE) * BLOCK_COLUMNS
    # Only the last tiles are masked: a mask whose length is not a multiple of 16 bytes narrows loads and stores.
    whole = (row + BLOCK_ROWS <= rows) & (start + BLOCK_COLUMNS <= width)
    row = (row + tl.arange(0, BLOCK_ROWS))[:, None]
    column = (start + tl.arange(0, BLOCK_COLUMNS))[None, :]
    x_at = x + (row * stride + column)
    out_at = out + (row * out_stride + (begin + column))
    if whole:
        tl.store(out_at, tl.load(x_at))
    else:
        live = (row < rows) & (column < width)
        tl.store(out_at, tl.load(x_at, mask=live), mask=live)


@jit
def join_columns_kernel(
    inputs,
    widths,
    strides,
    out,
    out_stride,
    rows,
    columns,
    POINT_TYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """out[r, widths[0] + ... + widths[i - 1] + c] = inputs[i][r, c].

    Operands as in ``join_kernel``; columns: sum(widths). For narrow inputs: a program moves a tile of out whose columns
    may come from several inputs. Each column finds its input once for all rows of the tile. Pointers and widths are
    passed without divisors, so that every access has one element.
    """
    across = tl.cdiv(columns, BLOCK_COLUMNS)
    row = (tl.program_id(0) // across).to(POINT_TYPE) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = (tl.program_id(0) % across).to(POINT_TYPE) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    x, stride, begin = inputs[0] + column, strides[0], widths[0]
    for i in tl.static_range(1, len(inputs)):
        is_here = column >= begin
        x = tl.where(is_here, inputs[i] + (column - begin), x)
        stride = tl.where(is_here, strides[i], stride)
        begin += widths[i]
    live = (row < rows)[:, None] & (column < columns)[None, :]
    # True but where an input ends. It makes neighbouring columns those of neighbouring threads.
    x_at = tl.max_contiguous(x[None, :] + row[:, None] * (stride + column * 0)[None, :], (1, BLOCK_COLUMNS))
    out_at = out + (row[:, None] * out_stride + column[None, :])
    tl.store(out_at, tl.load(x_at, mask=live), mask=live)
