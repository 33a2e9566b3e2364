"""Kernel of ``transposed``: functions of operands of which some are contiguous along another axis."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import load_tile, steps, store_tile, unravel
from triplan.backends.triton.elementwise.flat_kernels import OTHER


@jit
def _steps(index, stride, KIND: tl.constexpr):
    """index * stride; KIND is the stride if that is a constant, else None."""
    return steps(index, stride) if KIND is None else index * KIND


@jit
def _offset(base, row, column, across, along, ROW_STRIDE, COLUMN_STRIDE):
    return base + _steps(row, across, ROW_STRIDE) + _steps(column, along, COLUMN_STRIDE)


@jit
def transposed_kernel(
    inputs,
    scalars,
    outputs,
    strides,
    across,
    along,
    sizes,
    rows,
    columns,
    FUNCTION: tl.constexpr,
    ROW_STRIDES: tl.constexpr,
    COLUMN_STRIDES: tl.constexpr,
    TURNED: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """outputs[m, r, c] = FUNCTION(inputs[m, r, c], scalars) for m over the points of ``sizes``.

    inputs, outputs: any elements. strides: of each input and output along ``sizes``, innermost first; across and along:
    the strides along r and c that are not constants of ROW_STRIDES and COLUMN_STRIDES. A TURNED input, which has unit
    stride along r, is loaded as [c, r], so that consecutive threads read consecutive elements, and transposed through
    shared memory.
    """
    column_blocks, row_blocks = tl.cdiv(columns, BLOCK_COLUMNS), tl.cdiv(rows, BLOCK_ROWS)
    tile = tl.program_id(0)
    matrix = (tile // (column_blocks * row_blocks)).to(POINT_TYPE)
    row = ((tile // column_blocks) % row_blocks).to(POINT_TYPE) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = (tile % column_blocks).to(POINT_TYPE) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    live = (row < rows)[:, None] & (column < columns)[None, :]
    turned_live = (column < columns)[:, None] & (row < rows)[None, :]
    values = ()
    for i in tl.static_range(len(inputs)):
        base = unravel(matrix, sizes, strides[i])
        if TURNED[i]:
            offset = _offset(
                base, row[None, :], column[:, None], across[i], along[i], ROW_STRIDES[i], COLUMN_STRIDES[i]
            )
            value = tl.trans(tl.load(inputs[i] + offset, mask=turned_live, other=OTHER))
        else:
            offset = _offset(
                base, row[:, None], column[None, :], across[i], along[i], ROW_STRIDES[i], COLUMN_STRIDES[i]
            )
            value = load_tile(inputs[i] + offset, live, OTHER, COLUMN_STRIDES[i] is not None)
        values = values + (value,)
    results = FUNCTION(values, scalars)
    for i in tl.static_range(len(outputs)):
        j: tl.constexpr = len(inputs) + i
        base = unravel(matrix, sizes, strides[j])
        offset = _offset(base, row[:, None], column[None, :], across[j], along[j], ROW_STRIDES[j], COLUMN_STRIDES[j])
        store_tile(outputs[i] + offset, results[i], live, COLUMN_STRIDES[j] is not None)
