"""Kernel of ``rows``: functions of operands whose rows are contiguous or broadcast, in tiles of rows and columns."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import quotient, tile_start, unravel
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


@jit
def _wrapped(
    inputs, scalars, outputs, point, live, row, column, columns, FUNCTION, ROWS_VARY, COLUMNS_VARY, VECTOR,
):  # fmt: skip
    """A block of ``wrapped_kernel``: vectors [BLOCK // VECTOR, VECTOR] that begin at ``point``, in rows ``row`` at
    columns ``column``, all [BLOCK // VECTOR]. live: where not None, the number of elements that exist."""
    lane = tl.arange(0, VECTOR)[None, :]
    places = point[:, None] + lane
    if live is not None:
        live = places < live
    values = ()
    for i in tl.static_range(len(inputs)):
        if ROWS_VARY[i] and COLUMNS_VARY[i]:
            at = places
        else:
            wraps = column[:, None] + lane >= columns
            at = tl.where(wraps, 1, 0)
            if ROWS_VARY[i]:
                at = row[:, None] + at
            elif COLUMNS_VARY[i]:
                at = column[:, None] + lane - at * columns
            else:
                at = at * 0
        if live is None:
            values = values + (tl.load(inputs[i] + at),)
        else:
            values = values + (tl.load(inputs[i] + at, mask=live, other=OTHER),)
    results = FUNCTION(values, scalars)
    for i in tl.static_range(len(outputs)):
        tl.store(outputs[i] + places, results[i], mask=live)


@jit
def wrapped_kernel(
    inputs,
    scalars,
    outputs,
    numel,
    by,
    FUNCTION: tl.constexpr,
    ROWS_VARY: tl.constexpr,
    COLUMNS_VARY: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """outputs[r, c] = FUNCTION(inputs[r, c], scalars), of packed matrices, row vectors and column vectors.

    inputs, outputs: any elements. Matrices are read and written as consecutive elements in vectors of VECTOR, which are
    aligned wherever rows begin; a vector is no longer than a row. The elements of row and column vectors are loaded one
    by one, and L1 holds them. by: the columns, as ``quotient`` has them. Only the last block is masked, as in
    ``flat_kernel``.
    """
    start = tl.program_id(0).to(POINT_TYPE) * BLOCK
    point = start + tl.arange(0, BLOCK // VECTOR) * VECTOR
    row = quotient(point, by)
    column = point - row * by[0]
    if start + BLOCK <= numel:
        _wrapped(
            inputs, scalars, outputs, point, None, row, column, by[0], FUNCTION, ROWS_VARY, COLUMNS_VARY, VECTOR
        )  # fmt: skip
    else:
        _wrapped(
            inputs, scalars, outputs, point, numel, row, column, by[0], FUNCTION, ROWS_VARY, COLUMNS_VARY, VECTOR
        )  # fmt: skip
