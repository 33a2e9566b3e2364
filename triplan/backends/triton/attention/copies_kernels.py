"""Kernel of ``copies``: rows between any strides and a packed copy."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin


@jit
def _offsets(strides, row, middle, inner, columns, column):
    """Of ``row`` and ``column``. ``strides``: of (outer, middle, inner, column), the last None for 1; all None if
    packed."""
    if strides[0] is None:
        at = row.to(tl.int64) * columns + column
    else:
        own = row // inner
        at = (own // middle).to(tl.int64) * strides[0] + (own % middle).to(tl.int64) * strides[1]
        at += (row % inner).to(tl.int64) * strides[2]
        if strides[3] is None:
            at = at + column
        else:
            at = at + column.to(tl.int64) * strides[3]
    return at


@jit
def rows_copy_kernel(
    source,
    out,
    source_strides,
    out_strides,
    rows,
    middle,
    inner,
    source_columns,
    out_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURNED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out[i, :] = source[i, :] for each of ``rows`` (outer, middle, inner) rows.

    ``source`` has source_columns, ``out`` out_columns: what only ``source`` has is left out, what only ``out`` has is
    set to 0. The strides of one of the two are None: it is packed. TURNED: consecutive threads access a column of a
    block where the compiler knows no stride, else a row of it.
    """
    begin(OVERLAPS)
    across = tl.cdiv(out_columns, COLUMNS)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    # Where the compiler knows no stride, it lets consecutive threads access the first axis of a block.
    if TURNED:
        row = row[:, None]
        column = column[None, :]
    else:
        row = row[None, :]
        column = column[:, None]
    x = tl.load(
        source + _offsets(source_strides, row, middle, inner, source_columns, column),
        mask=(row < rows) & (column < source_columns),
        other=0,
    )
    at = out + _offsets(out_strides, row, middle, inner, out_columns, column)
    tl.store(at, x, mask=(row < rows) & (column < out_columns))
