"""softmax, log_softmax and their backward: whole rows in registers.

Operands: see ``common/rows_kernels``. The maximum ignores NaN, as the hardware's does: a NaN then enters the sum of
exponentials, and through it every element of the row.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.rows_kernels import (
    UNPARTED,
    again,
    along,
    exponential,
    lanes_of,
    rows_of,
)
from triplan.backends.triton.softmax.shared_kernels import derived, finished, term


@triton.jit
def softmax_rows_kernel(
    x,
    out,
    x_strides,
    out_strides,
    sizes,
    lanes,
    n,
    blocks,
    LOG: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Whole rows in registers: each element is read once and written once.

    With NARROW they are held as they are read, in 16 bits, for two programs' rows to be there at a time.
    """
    outer, lane = lanes_of(tl.program_id(0), blocks, lanes, sizes, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    live = (lane < lanes) & (col < n)
    at = rows_of(x, x_strides, outer, sizes, lane) + along(col, x_strides[2])
    kept = tl.load(at, mask=live, other=-float("inf"))
    v = kept.to(COMPUTE)
    top = tl.max(v, 1, keep_dims=True)
    if NARROW:
        v = again(kept).to(COMPUTE)
    total = tl.sum(exponential(v - top), 1, keep_dims=True)
    if NARROW:
        # The exponentials as well, rather than be kept: in f32 they would not fit.
        v = again(kept, UNPARTED).to(COMPUTE)
    y = finished(v, top, total, LOG)
    to = rows_of(out, out_strides, outer, sizes, lane) + along(col, out_strides[2])
    tl.store(to, y.to(out.dtype.element_ty), mask=live)


@triton.jit
def softmax_backward_rows_kernel(
    dout,
    out,
    dx,
    dout_strides,
    out_strides,
    dx_strides,
    sizes,
    lanes,
    n,
    blocks,
    LOG: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Whole rows in registers."""
    outer, lane = lanes_of(tl.program_id(0), blocks, lanes, sizes, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    live = (lane < lanes) & (col < n)
    dy = tl.load(rows_of(dout, dout_strides, outer, sizes, lane) + along(col, dout_strides[2]), mask=live, other=0.0)
    y = tl.load(rows_of(out, out_strides, outer, sizes, lane) + along(col, out_strides[2]), mask=live, other=0.0)
    dy = dy.to(COMPUTE)
    y = y.to(COMPUTE)
    total = tl.sum(term(dy, y, LOG), 1, keep_dims=True)
    to = rows_of(dx, dx_strides, outer, sizes, lane) + along(col, dx_strides[2])
    tl.store(to, derived(dy, y, total, LOG).to(dx.dtype.element_ty), mask=live)
