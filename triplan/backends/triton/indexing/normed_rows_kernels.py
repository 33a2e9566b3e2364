"""Rows of a table and their RMSNorm: each program holds a few whole rows."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.indices_kernels import report, resolve
from triplan.backends.triton.common.rows_kernels import axis_offset


@jit
def normed_rows_kernel(
    weight,
    index,
    norm_weight,
    rows,
    out,
    rstd,
    status,
    weight_strides,
    extent,
    count,
    n,
    inverse_n,
    eps,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WRAP: tl.constexpr,
    CLAMP: tl.constexpr,
):
    """rows = weight[index], out = rows * rstd * norm_weight, rstd = 1 / sqrt(mean(rows^2) + eps); bad indices give 0.

    weight: (extent, n), of any strides (None is 1); index, rstd: (count,); rows, out: (count, n); norm_weight: (n,), of
    the rows' element; rstd: COMPUTE. ``inverse_n``: 1 / n.
    """
    row = tl.program_id(0).to(count.dtype) * ROWS + tl.arange(0, ROWS)
    live = row < count
    at, inside = resolve(tl.load(index + row, mask=live, other=0), extent, live, WRAP, CLAMP)
    if status is not None:
        report(status, live & (inside == 0), row)
    column = tl.arange(0, BLOCK)
    used = column < n
    source = weight + axis_offset(at, weight_strides[0])[:, None] + axis_offset(column, weight_strides[1])[None, :]
    v = tl.load(source, mask=inside[:, None] & used[None, :], other=0)
    target = row.to(tl.int64)[:, None] * n + column[None, :]
    known = live[:, None] & used[None, :]
    tl.store(rows + target, v, mask=known)
    v = v.to(COMPUTE)
    scale = tl.rsqrt(tl.sum(v * v, 1) * inverse_n + eps)
    tl.store(rstd + row, scale, mask=live)
    w = tl.load(norm_weight + column, mask=used, other=0).to(COMPUTE)
    tl.store(out + target, (v * scale[:, None] * w[None, :]).to(out.dtype.element_ty), mask=known)
