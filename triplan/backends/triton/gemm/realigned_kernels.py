"""Kernel of ``realigned``: copies of matrices between any strides."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.overlap import begin


@triton.jit
def realign_kernel(
    source,
    out,
    rows,
    columns,
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
    """out[i] = source[i] of ``rows`` by ``columns`` elements, for each matrix i of the batch.

    ``x_m``, ``x_n`` and ``x_batch`` are the strides of x's rows, columns and matrices; the last are None without a
    batch.
    """
    begin(OVERLAPS)
    program = tl.program_id(0)
    across = tl.cdiv(columns, COLUMNS)
    tiles = tl.cdiv(rows, ROWS) * across
    if out_batch is not None:
        product = (program // tiles).to(tl.int64)
        program = program % tiles
        source += product * source_batch
        out += product * out_batch
    row = (program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (program % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(source + row[:, None] * source_m + column[None, :] * source_n, mask=inside, other=0)
    tl.store(out + row[:, None] * out_m + column[None, :] * out_n, x, mask=inside)
