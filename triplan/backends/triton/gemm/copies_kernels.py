"""Kernel of ``copies``: matrices between any strides."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin


@jit
def matrix_copy_kernel(
    source,
    out,
    rows,
    source_columns,
    out_columns,
    source_m,
    source_n,
    source_batch,
    out_m,
    out_n,
    out_batch,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out[i] = source[i] for each matrix i of the batch.

    ``source`` (rows, source_columns), ``out`` (rows, out_columns): what only ``source`` has is left out, what only
    ``out`` has is set to 0. They differ by less than a vector, so that one of the two is read or written in vectors.
    ``x_m``, ``x_n`` and ``x_batch`` are the strides of x's rows, columns and matrices; the last are None without a
    batch.
    """
    begin(OVERLAPS)
    program = tl.program_id(0)
    across = tl.cdiv(out_columns, COLUMNS)
    tiles = tl.cdiv(rows, ROWS) * across
    if out_batch is not None:
        product = (program // tiles).to(tl.int64)
        program = program % tiles
        source += product * source_batch
        out += product * out_batch
    first_row = (program // across).to(tl.int64) * ROWS
    first_column = (program % across).to(tl.int64) * COLUMNS
    source += first_row * source_m + first_column * source_n
    out += first_row * out_m + first_column * out_n
    # Blocks are [columns, rows]: where the compiler knows no stride, it lets consecutive threads access the first axis.
    row, column = tl.arange(0, ROWS)[None, :], tl.arange(0, COLUMNS)[:, None]
    x_at = row.to(tl.int64) * source_m + column * source_n
    out_at = row.to(tl.int64) * out_m + column * out_n
    if (first_row + ROWS <= rows) & (first_column + COLUMNS <= tl.minimum(source_columns, out_columns)):
        # Without masks: of narrow elements, they take most of the instructions.
        tl.store(out + out_at, tl.load(source + x_at))
    else:
        within = first_row + row < rows
        x = tl.load(source + x_at, mask=within & (first_column + column < source_columns), other=0)
        tl.store(out + out_at, x, mask=within & (first_column + column < out_columns))
