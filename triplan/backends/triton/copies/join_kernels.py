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
