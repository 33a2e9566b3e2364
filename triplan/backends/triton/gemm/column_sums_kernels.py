"""Sums of columns, for the gradient of a bias: each program adds up a block of rows, in one fixed order."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl


@triton.jit
def column_sums_kernel(
    x,
    out,
    rows,
    columns,
    each,
    blocks,
    xm,
    xn,
    out_m,
    out_n,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """out[line, column] = sum of x[row, column] over the ``each`` rows from line * each on.

    ``blocks`` programs a line, of BLOCK columns. Each adds every ROWS-th row to one sum, and the ROWS sums at the end.
    """
    program = tl.program_id(0)
    line = (program // blocks).to(tl.int64)
    column = (program % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = line * each + tl.arange(0, ROWS)
    end = tl.minimum(line * each + each, rows)
    at = x + row[:, None] * xm + column[None, :] * xn
    total = tl.zeros((ROWS, BLOCK), ACC)
    for start in range(0, each, ROWS):
        inside = (row + start < end)[:, None] & (column < columns)[None, :]
        total += tl.load(at, mask=inside, other=0.0).to(ACC)
        at += ROWS * xm
    place = out + line * out_m + column * out_n
    tl.store(place, tl.sum(total, 0).to(out.dtype.element_ty), mask=column < columns)
