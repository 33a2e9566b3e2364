"""Copies of operands for kernels that would read them slowly as they lie: matrices between any strides."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import unravel
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
    sizes,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out[i] = source[i] for each matrix i, numbered row-major over ``sizes``, as ``unravel`` has them.

    ``source`` (rows, source_columns), ``out`` (rows, out_columns): what only ``source`` has is left out, what only
    ``out`` has is set to 0. They differ by less than a vector, so that one of the two is read or written in vectors.
    ``x_m`` and ``x_n`` are the strides of x's rows and columns, ``x_batch`` those along ``sizes``; these are None where
    there is one matrix. Where one of the two is contiguous along rows and the other along columns, threads exchange a
    block in shared memory.
    """
    begin(OVERLAPS)
    copy_matrix(
        tl.program_id(0),
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
        sizes,
        ROWS,
        COLUMNS,
    )


@jit
def matrices_copy_kernel(
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
    sizes,
    programs,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """``matrix_copy_kernel`` of several operands, each of which has so many ``programs``.

    All arguments are tuples of one for each operand; strides of 1 are None.
    """
    begin(OVERLAPS)
    program = tl.program_id(0)
    for i in tl.static_range(len(source)):
        if (program >= 0) & (program < programs[i]):
            copy_matrix(
                program,
                source[i],
                out[i],
                rows[i],
                source_columns[i],
                out_columns[i],
                source_m[i],
                source_n[i],
                source_batch[i],
                out_m[i],
                out_n[i],
                out_batch[i],
                sizes[i],
                ROWS[i],
                COLUMNS[i],
            )
        program -= programs[i]


@jit
def _along(index, stride):
    """index * stride, which is None for 1."""
    found = index
    if stride is not None:
        found = index * stride
    return found


@jit
def copy_matrix(
    program,
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
    sizes,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Block ``program`` of ``matrix_copy_kernel``."""
    across = tl.cdiv(out_columns, COLUMNS)
    tiles = tl.cdiv(rows, ROWS) * across
    if sizes is not None:
        source += unravel(program // tiles, sizes, source_batch)
        out += unravel(program // tiles, sizes, out_batch)
        program = program % tiles
    # Blocks are [columns, rows]: where the compiler knows no stride, it lets consecutive threads access the first axis.
    row = ((program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS))[None, :]
    column = ((program % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[:, None]
    within = row < rows
    at = source + _along(row, source_m) + _along(column, source_n)
    x = tl.load(at, mask=within & (column < source_columns), other=0)
    tl.store(out + _along(row, out_m) + _along(column, out_n), x, mask=within & (column < out_columns))
