"""softmax, log_softmax and their backward, entry ``rows``: whole rows in registers.

Operands of shape [outer, lanes, n], their strides and ``blocks``: see ``common/rows_kernels``.
The maximum ignores NaN, as the hardware's does. A NaN then enters the sum, and through it every element of its row.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import (
    ONE_BASIC_BLOCK,
    converted_pieces,
    element_pointers,
    exponential,
    group_lanes,
    live_pieces,
    load_pieces,
    rematerialize,
    store_rows,
)
from triplan.backends.triton.softmax.shared_kernels import gradient_of, gradient_term, softmax_of


@jit
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
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
):
    """out = exp(x - max(x)) / sum(exp(x - max(x))) along each row; with LOG, its logarithm.

    x, out: [outer, lanes, n] of f16, bf16, f32 or f64. A program holds PIECES tiles [ROWS, BLOCK] in COMPUTE, side by
    side, which cover n.

    Each element is read once and written once. With NARROW, registers hold the 16-bit elements as loaded, and each
    use converts them to COMPUTE: two programs then fit on a multiprocessor. A row is then one piece.
    """
    outer, lane = group_lanes(tl.program_id(0), blocks, lanes, sizes, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    lives = live_pieces(lane < lanes, n, PIECES, BLOCK)
    loaded = load_pieces(
        element_pointers(x, x_strides, outer, sizes, lane, col), lives, -float("inf"), x_strides, BLOCK
    )
    v = converted_pieces(loaded, COMPUTE)
    top = v[0]
    for i in tl.static_range(1, PIECES):
        top = tl.maximum(top, v[i])
    top = tl.max(top, 1, keep_dims=True)
    if NARROW:
        v = (rematerialize(loaded[0]).to(COMPUTE),)
    total = exponential(v[0] - top)
    for i in tl.static_range(1, PIECES):
        total += exponential(v[i] - top)
    total = tl.sum(total, 1, keep_dims=True)
    if NARROW:
        # The exponentials are computed again too: as f32 they would not fit in registers.
        v = (rematerialize(loaded[0], ONE_BASIC_BLOCK).to(COMPUTE),)
    y = ()
    for i in tl.static_range(PIECES):
        y = y + (softmax_of(v[i], top, total, LOG),)
    to = element_pointers(out, out_strides, outer, sizes, lane, col)
    for i in tl.static_range(PIECES):
        store_rows(to + i * BLOCK, y[i].to(out.dtype.element_ty), lives[i], out_strides, "")


@jit
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
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx = out * (dout - sum(dout * out)) along each row; with LOG, dx = dout - exp(out) * sum(dout).

    dout, out, dx: [outer, lanes, n] of f16, bf16, f32 or f64. A program holds PIECES tiles [ROWS, BLOCK] in COMPUTE.

    Each element is read once and written once.
    """
    outer, lane = group_lanes(tl.program_id(0), blocks, lanes, sizes, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    lives = live_pieces(lane < lanes, n, PIECES, BLOCK)
    dy = load_pieces(element_pointers(dout, dout_strides, outer, sizes, lane, col), lives, 0.0, dout_strides, BLOCK)
    y = load_pieces(element_pointers(out, out_strides, outer, sizes, lane, col), lives, 0.0, out_strides, BLOCK)
    dy = converted_pieces(dy, COMPUTE)
    y = converted_pieces(y, COMPUTE)
    total = gradient_term(dy[0], y[0], LOG)
    for i in tl.static_range(1, PIECES):
        total += gradient_term(dy[i], y[i], LOG)
    total = tl.sum(total, 1, keep_dims=True)
    to = element_pointers(dx, dx_strides, outer, sizes, lane, col)
    for i in tl.static_range(PIECES):
        g = gradient_of(dy[i], y[i], total, LOG)
        store_rows(to + i * BLOCK, g.to(dx.dtype.element_ty), lives[i], dx_strides, "")
