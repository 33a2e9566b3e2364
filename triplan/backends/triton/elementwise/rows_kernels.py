"""Kernel of ``rows``: functions of operands whose rows are contiguous or broadcast, in tiles of rows and columns."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import tile_start, unravel
from triplan.backends.triton.elementwise.flat_kernels import OTHER


@jit
def rows_kernel(
    inputs,
    scalars,
    outputs,
    strides,
    sizes,
    rows,
    columns,
    FUNCTION: tl.constexpr,
    ROWS_VARY: tl.constexpr,
    COLUMNS_VARY: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """outputs[r, c] = FUNCTION(inputs[r, c], scalars) for r over the points of ``sizes`` and c < columns.

    inputs, outputs: any elements. strides: of each input and output along ``sizes``, innermost first; along c the
    stride is 1, or 0 where COLUMNS_VARY is False. An operand that varies along rows or columns only is loaded as a
    vector.
    """
    first_row, first_column = tile_start(rows, columns, POINT_TYPE, BLOCK_ROWS, BLOCK_COLUMNS)
    row, column = first_row + tl.arange(0, BLOCK_ROWS), first_column + tl.arange(0, BLOCK_COLUMNS)
    in_rows, in_columns = (row < rows)[:, None], (column < columns)[None, :]
    values = ()
    for i in tl.static_range(len(inputs)):
        if ROWS_VARY[i] and COLUMNS_VARY[i]:
            offset = unravel(row, sizes, strides[i])[:, None] + column[None, :]
            value = tl.load(inputs[i] + offset, mask=in_rows & in_columns, other=OTHER)
        elif ROWS_VARY[i]:
            value = tl.load(inputs[i] + unravel(row, sizes, strides[i])[:, None], mask=in_rows, other=OTHER)
        elif COLUMNS_VARY[i]:
            value = tl.load(inputs[i] + column[None, :], mask=in_columns, other=OTHER)
        else:
            value = tl.load(inputs[i])
        values = values + (value,)
    results = FUNCTION(values, scalars)
    for i in tl.static_range(len(outputs)):
        offset = unravel(row, sizes, strides[len(inputs) + i])[:, None] + column[None, :]
        tl.store(outputs[i] + offset, results[i], mask=in_rows & in_columns)
