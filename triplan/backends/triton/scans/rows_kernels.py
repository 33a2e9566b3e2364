"""Scans, entry ``rows``: whole rows in registers, each element read once and written once.

Operands of shape [outer, lanes, n], their strides and ``blocks``: see ``common/rows_kernels``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import axis_offset, element_pointers, group_lanes, row_pointers
from triplan.backends.triton.scans.shared_kernels import compose, grouped_pointers, or_identity, scan


@jit
def scan_rows_kernel(
    x,
    out,
    x_strides,
    out_strides,
    sizes,
    lanes,
    n,
    blocks,
    PRODUCT: tl.constexpr,
    REVERSE: tl.constexpr,
    GROUP: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[k] = x[0] + ... + x[k] along each row; with REVERSE, x[k] + ... + x[n - 1]; with PRODUCT, products.

    x, out: [outer, lanes, n] of f16, bf16, f32, f64 or i64. A program holds a tile [ROWS, BLOCK] in COMPUTE, with
    BLOCK >= n.
    """
    outer, lane = group_lanes(tl.program_id(0), blocks, lanes, sizes, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    live = (lane < lanes) & (col < n)
    at = grouped_pointers(row_pointers(x, x_strides, outer, sizes, lane), axis_offset(col, x_strides[2]), GROUP)
    v = tl.load(at, mask=live, other=0).to(COMPUTE)
    y = scan(or_identity(v, live, PRODUCT), PRODUCT, REVERSE)
    tl.store(element_pointers(out, out_strides, outer, sizes, lane, col), y.to(out.dtype.element_ty), mask=live)


@jit
def cumprod_backward_rows_kernel(
    dout,
    x,
    out,
    dx,
    dout_strides,
    x_strides,
    out_strides,
    dx_strides,
    sizes,
    lanes,
    n,
    blocks,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx[k] = out[k - 1] * s[k], where s[k] = dout[k] + x[k + 1] * s[k + 1], along each row.

    dout, x, out, dx: [outer, lanes, n] of f16, bf16, f32 or f64. A program holds tiles [ROWS, BLOCK] in COMPUTE.
    """
    outer, lane = group_lanes(tl.program_id(0), blocks, lanes, sizes, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    inside = lane < lanes
    live = inside & (col < n)
    s = tl.load(element_pointers(dout, dout_strides, outer, sizes, lane, col), mask=live, other=0).to(COMPUTE)
    if BLOCK > 1:
        a = tl.load(element_pointers(x, x_strides, outer, sizes, lane, col + 1), mask=inside & (col + 1 < n), other=0)
        _, s = tl.associative_scan((a.to(COMPUTE), s), 1, compose, reverse=True)
        before = element_pointers(out, out_strides, outer, sizes, lane, col - 1)
        s = or_identity(tl.load(before, mask=live & (col > 0), other=0).to(COMPUTE), col > 0, True) * s
    tl.store(element_pointers(dx, dx_strides, outer, sizes, lane, col), s.to(dx.dtype.element_ty), mask=live)
