"""A copy between operands that are contiguous along different axes, by tiles."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.indexing.traversals_kernels import walked


@jit
def turned_kernel(
    source,
    out,
    rows,
    cols,
    width,
    sizes,
    source_strides,
    out_strides,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """out[m, r, c] = source[m, r, c], both of integers as wide as the element; 0 for c from cols to width - 1.

    ``rows`` and ``cols`` are extents, and m numbers the points of ``sizes``. Strides are (those of the others, along
    rows, along columns), of which None is 1: ``source`` is contiguous along rows, ``out`` along columns. So consecutive
    threads read along rows and write along columns, and exchange the tile in shared memory.
    """
    pid = tl.program_id(0)
    col_blocks = tl.cdiv(cols, BLOCK_COLS)
    row_blocks = tl.cdiv(rows, BLOCK_ROWS)
    # Programs that follow each other read adjacent rows of tiles.
    row = (pid % row_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[None, :]
    col = (pid // row_blocks % col_blocks * BLOCK_COLS + tl.arange(0, BLOCK_COLS))[:, None]
    rest = pid // (row_blocks * col_blocks)
    live = (row < rows) & (col < cols)
    x = tl.load(source + walked(rest, row, col, sizes, source_strides), mask=live, other=0)
    tl.store(out + walked(rest, row, col, sizes, out_strides), x, mask=(row < rows) & (col < width))
