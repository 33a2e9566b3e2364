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
    element_pointers,
    exponential,
    group_lanes,
    load_rows,
    rematerialize,
    store_rows,
)
from triplan.backends.triton.softmax.shared_kernels import gradient_of, gradient_term, softmax_of


@jit
def _lives(lane, lanes, n, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """Which elements [ROWS, BLOCK] of each piece of the rows ``lane`` exist. All pieces but the last are whole."""
    lives = ()
    for i in tl.static_range(PIECES):
        live = lane < lanes
        if i == PIECES - 1:
            live = live & (tl.arange(0, BLOCK)[None, :] < n - i * BLOCK)
        lives = lives + (live,)
    return lives


@jit
def _loaded(at, lives, other, strides, BLOCK: tl.constexpr):
    """The pieces of the rows whose first pieces are ``at``; where there are several, each row is contiguous."""
    values = ()
    for i in tl.static_range(len(lives)):
        values = values + (load_rows(at + i * BLOCK, lives[i], other, strides, ""),)
    return values


@jit
def _converted(values, COMPUTE: tl.constexpr):
    """``values``, pieces [ROWS, BLOCK], in COMPUTE."""
    found = ()
    for i in tl.static_range(len(values)):
        found = found + (values[i].to(COMPUTE),)
    return found


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
    lives = _lives(lane, lanes, n, PIECES, BLOCK)
    loaded = _loaded(element_pointers(x, x_strides, outer, sizes, lane, col), lives, -float("inf"), x_strides, BLOCK)
    v = _converted(loaded, COMPUTE)
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
    lives = _lives(lane, lanes, n, PIECES, BLOCK)
    dy = _loaded(element_pointers(dout, dout_strides, outer, sizes, lane, col), lives, 0.0, dout_strides, BLOCK)
    y = _loaded(element_pointers(out, out_strides, outer, sizes, lane, col), lives, 0.0, out_strides, BLOCK)
    dy = _converted(dy, COMPUTE)
    y = _converted(y, COMPUTE)
    total = gradient_term(dy[0], y[0], LOG)
    for i in tl.static_range(1, PIECES):
        total += gradient_term(dy[i], y[i], LOG)
    total = tl.sum(total, 1, keep_dims=True)
    to = element_pointers(dx, dx_strides, outer, sizes, lane, col)
    for i in tl.static_range(PIECES):
        g = gradient_of(dy[i], y[i], total, LOG)
        store_rows(to + i * BLOCK, g.to(dx.dtype.element_ty), lives[i], dx_strides, "")
