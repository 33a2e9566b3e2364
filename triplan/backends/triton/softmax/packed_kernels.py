"""softmax, log_softmax and their backward, entry ``packed``: short packed rows, one for each thread.

The maximum ignores NaN, as the hardware's does. A NaN then enters the sum, and through it every element of its row.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import exponential
from triplan.backends.triton.softmax.shared_kernels import gradient_of, gradient_term, softmax_of


@jit
def _load_packed(x, first, rows, n, other, COMPUTE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows ``first`` ... of ``rows`` packed rows, as [BLOCK, ROWS] of COMPUTE; ``other`` where there is no element.

    Consecutive threads read consecutive elements, wherever rows begin, and exchange them: each then has a row.
    """
    place, col = tl.arange(0, ROWS * BLOCK), tl.arange(0, BLOCK)[:, None]
    at = x + first.to(tl.int64) * n + place
    if first + ROWS <= rows:
        v = tl.load(at, mask=place < ROWS * n)  # (a multiple of a vector)
    else:
        v = tl.load(at, mask=place < (rows - first) * n)
    own = tl.arange(0, ROWS)[None, :] * n + col  # behind a row lie elements of the next, or of no row
    v = tl.reshape(tl.gather(v, tl.reshape(own, (ROWS * BLOCK,)), 0), (BLOCK, ROWS))
    return tl.where(col < n, v.to(COMPUTE), other)


@jit
def _store_packed(out, v, first, rows, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Store ``v`` [BLOCK, ROWS] where ``_load_packed`` reads it."""
    place = tl.arange(0, ROWS * BLOCK)
    # place // n, exact for places below 2**16. (Conversions between integers and floats take as long as exponentials.)
    row = tl.umulhi(place.to(tl.uint32), (place * 0).to(tl.uint32) + (0xFFFFFFFF // n.to(tl.uint32) + 1)).to(tl.int32)
    own = (place + row * (BLOCK - n)) & (ROWS * BLOCK - 1)  # row * BLOCK + place % n; behind the last row, of any
    v = tl.gather(tl.reshape(tl.trans(v), (ROWS * BLOCK,)), own, 0)
    at = out + first.to(tl.int64) * n + place
    if first + ROWS <= rows:
        tl.store(at, v, mask=place < ROWS * n)
    else:
        tl.store(at, v, mask=place < (rows - first) * n)


@jit
def softmax_packed_kernel(
    x,
    out,
    lanes,
    n,
    LOG: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = exp(x - max(x)) / sum(exp(x - max(x))) along each row; with LOG, its logarithm.

    x, out: [lanes, n] of f16, bf16, f32 or f64, packed; n <= BLOCK. A program holds ROWS rows in COMPUTE, a thread one.
    """
    first = tl.program_id(0).to(lanes.dtype) * ROWS
    v = _load_packed(x, first, lanes, n, -float("inf"), COMPUTE, ROWS, BLOCK)
    top = tl.max(v, 0, keep_dims=True)
    total = tl.sum(exponential(v - top), 0, keep_dims=True)
    y = softmax_of(v, top, total, LOG).to(out.dtype.element_ty)
    _store_packed(out, y, first, lanes, n, ROWS, BLOCK)


@jit
def softmax_backward_packed_kernel(
    dout,
    out,
    dx,
    lanes,
    n,
    LOG: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx = out * (dout - sum(dout * out)) along each row; with LOG, dx = dout - exp(out) * sum(dout).

    dout, out, dx: as x in ``softmax_packed_kernel``.
    """
    first = tl.program_id(0).to(lanes.dtype) * ROWS
    dy = _load_packed(dout, first, lanes, n, 0.0, COMPUTE, ROWS, BLOCK)
    y = _load_packed(out, first, lanes, n, 0.0, COMPUTE, ROWS, BLOCK)
    total = tl.sum(gradient_term(dy, y, LOG), 0, keep_dims=True)
    g = gradient_of(dy, y, total, LOG).to(dx.dtype.element_ty)
    _store_packed(dx, g, first, lanes, n, ROWS, BLOCK)
