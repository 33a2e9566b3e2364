"""Sums of columns, for the gradient of a bias: each program sums a chunk of rows, in a fixed order."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin


@jit
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
    GROUPS: tl.constexpr,
    ACC: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out[i, j] = the sum of x[r, j] over the chunk i * each <= r < (i + 1) * each of rows.

    ``x`` (rows, columns) has strides ``xm`` and ``xn``; ``out`` (chunks, columns) has ``out_m`` and ``out_n``. Each
    chunk has ``blocks`` programs, of BLOCK columns each. A program keeps GROUPS * ROWS sums per column, each of every
    so many-th row, and reduces them at the end. Where neither stride is 1, Triton has neighbouring threads load along
    the first axis, so that ROWS must be few.
    """
    begin(OVERLAPS)
    program = tl.program_id(0)
    chunk = (program // blocks).to(tl.int64)
    column = (program % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = chunk * each + tl.arange(0, ROWS)[:, None, None] + ROWS * tl.arange(0, GROUPS)[None, None, :]
    end = tl.minimum(chunk * each + each, rows)
    at = x + row * xm + column[None, :, None] * xn
    total = tl.zeros((ROWS, BLOCK, GROUPS), ACC)
    for start in range(0, each, GROUPS * ROWS):
        inside = (row + start < end) & (column < columns)[None, :, None]
        total += tl.load(at, mask=inside, other=0.0).to(ACC)
        at += GROUPS * ROWS * xm
    out_at = out + chunk * out_m + column * out_n
    tl.store(out_at, tl.sum(tl.sum(total, 2), 0).to(out.dtype.element_ty), mask=column < columns)
