"""Kernel of ``transposed``: copies of operands that are contiguous along different axes, by transposed tiles."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.copies.moves_kernels import converted, is_inside, outside, place, source


@jit
def transposed_kernel(
    x,
    value,
    out,
    dims,
    across,
    along,
    diagonal,
    MAPS: tl.constexpr,
    ACROSS: tl.constexpr,
    ALONG: tl.constexpr,
    TRIANGLE: tl.constexpr,
    VALUE_TYPE: tl.constexpr,
    CAST: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """out[m, r, c] = x[m, r, c], with maps, ``value`` and TRIANGLE as in ``rows_kernel``; m over the points of dims.

    across, along: (size, amount, extent of x, stride of x, stride of out) of r and of c. x has unit stride along r, out
    along c. A tile is loaded as [c, r], so that consecutive threads read consecutive elements, and transposed through
    shared memory.
    """
    rows, columns = across[0], along[0]
    column_blocks, row_blocks = tl.cdiv(columns, BLOCK_COLUMNS), tl.cdiv(rows, BLOCK_ROWS)
    tile = tl.program_id(0)
    x_at, out_at, inside = place((tile // (column_blocks * row_blocks)).to(POINT_TYPE), dims, MAPS)
    row = ((tile // column_blocks) % row_blocks).to(POINT_TYPE) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = (tile % column_blocks).to(POINT_TYPE) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    x_row, x_column = source(row, across, ACROSS), source(column, along, ALONG)
    read = (column < columns)[:, None] & (row < rows)[None, :]
    if value is not None:
        read = read & inside & is_inside(x_column, along, ALONG)[:, None] & is_inside(x_row, across, ACROSS)[None, :]
    if TRIANGLE != 0:
        read = read & ((column[:, None] - row[None, :]) * TRIANGLE <= diagonal * TRIANGLE)
    turned = x + x_at + ((x_column * along[3])[:, None] + x_row[None, :])
    if value is None and TRIANGLE == 0:
        loaded = tl.load(turned, mask=read)
    else:
        loaded = tl.load(turned, mask=read, other=outside(x, value, VALUE_TYPE))
    live = (row < rows)[:, None] & (column < columns)[None, :]
    to = out + out_at + ((row * across[4])[:, None] + column[None, :])
    # Converted before it is transposed: a narrower element means less traffic through shared memory.
    tl.store(to, tl.trans(converted(loaded, out, CAST)), mask=live)
