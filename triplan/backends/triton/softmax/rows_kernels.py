"""softmax, log_softmax and their backward, entry ``rows``: whole rows in registers.

Operands of shape [outer, lanes, n], their strides and ``blocks``: see ``common/rows_kernels``.
The maximum ignores NaN, as the hardware's does. A NaN then enters the sum, and through it every element of its row.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.rows_kernels import (
    ONE_BASIC_BLOCK,
    element_pointers,
    exponential,
    group_lanes,
    rematerialize,
)
from triplan.backends.triton.softmax.shared_kernels import gradient_of, gradient_term, softmax_of


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
    """out = exp(x - max(x)) / sum(exp(x - max(x))) along each row; with LOG, its logarithm.

    x, out: [outer, lanes, n] of f16, bf16, f32 or f64. A program holds a tile [ROWS, BLOCK] in COMPUTE, BLOCK >= n.

    Each element is read once and written once. With NARROW, registers hold the 16-bit elements as loaded, and each
    use converts them to COMPUTE: two programs then fit on a multiprocessor.
    """
    outer, lane = group_lanes(tl.program_id(0), blocks, lanes, sizes, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    live = (lane < lanes) & (col < n)
    loaded = tl.load(element_pointers(x, x_strides, outer, sizes, lane, col), mask=live, other=-float("inf"))
    v = loaded.to(COMPUTE)
    top = tl.max(v, 1, keep_dims=True)
    if NARROW:
        v = rematerialize(loaded).to(COMPUTE)
    total = tl.sum(exponential(v - top), 1, keep_dims=True)
    if NARROW:
        # The exponentials are computed again too: as f32 they would not fit in registers.
        v = rematerialize(loaded, ONE_BASIC_BLOCK).to(COMPUTE)
    y = softmax_of(v, top, total, LOG)
    to = element_pointers(out, out_strides, outer, sizes, lane, col)
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
    """dx = out * (dout - sum(dout * out)) along each row; with LOG, dx = dout - exp(out) * sum(dout).

    dout, out, dx: [outer, lanes, n] of f16, bf16, f32 or f64. A program holds tiles [ROWS, BLOCK] in COMPUTE.

    Each element is read once and written once.
    """
    outer, lane = group_lanes(tl.program_id(0), blocks, lanes, sizes, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    live = (lane < lanes) & (col < n)
    dy = tl.load(element_pointers(dout, dout_strides, outer, sizes, lane, col), mask=live, other=0.0)
    y = tl.load(element_pointers(out, out_strides, outer, sizes, lane, col), mask=live, other=0.0)
    dy = dy.to(COMPUTE)
    y = y.to(COMPUTE)
    total = tl.sum(gradient_term(dy, y, LOG), 1, keep_dims=True)
    to = element_pointers(dx, dx_strides, outer, sizes, lane, col)
    tl.store(to, gradient_of(dy, y, total, LOG).to(dx.dtype.element_ty), mask=live)
