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
    # Blocks are [columns, rows]: where the compiler knows no stride, it lets consecutive threads access the first axis.
    row = ((program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS))[None, :]
    column = ((program % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[:, None]
    within = row < rows
    x = tl.load(source + row * source_m + column * source_n, mask=within & (column < source_columns), other=0)
    tl.store(out + row * out_m + column * out_n, x, mask=within & (column < out_columns))
