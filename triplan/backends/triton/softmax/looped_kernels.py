"""softmax, log_softmax and their backward: rows of any length, read block by block, twice.

Operands: see ``common/rows_kernels``. The maximum ignores NaN, as the hardware's does: a NaN then enters the sum of
exponentials, and through it every element of the row.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.rows_kernels import (
    along,
    exponential,
    lanes_of,
    rows_of,
    subtracted,
)
from triplan.backends.triton.softmax.shared_kernels import derived, finished, term


@triton.jit
def softmax_looped_kernel(
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
    VECTOR: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Rows block by block with a running maximum and sum (Milakov and Gimelshein, arXiv 1805.02867), then once more.

    Every VECTOR neighbours of a block, one thread's, have a maximum and a sum of their own, which meet at the end:
    while threads wait for each other nothing is on its way from memory. The second pass goes backwards: what was read
    last is still in the cache. Both have UNROLL blocks on their way at a time.
    """
    outer, lane = lanes_of(tl.program_id(0), blocks, lanes, sizes, ROWS)
    at = rows_of(x, x_strides, outer, sizes, lane)[:, :, None]
    to = rows_of(out, out_strides, outer, sizes, lane)[:, :, None]
    inside = (lane < lanes)[:, :, None]
    own = tl.arange(0, BLOCK // VECTOR)[None, :, None] * VECTOR + tl.arange(0, VECTOR)[None, None, :]
    top = tl.full((ROWS, BLOCK // VECTOR, 1), -float("inf"), COMPUTE)
    total = tl.zeros((ROWS, BLOCK // VECTOR, 1), COMPUTE)
    for start in range(0, n, BLOCK * UNROLL):
        for u in tl.static_range(UNROLL):
            col = start + u * BLOCK + own
            v = tl.load(
                at + along(col, x_strides[2]),
                mask=inside & (col < n),
                other=-float("inf"),
                eviction_policy="evict_last",
            ).to(COMPUTE)
            new = tl.maximum(top, tl.max(v, 2, keep_dims=True))
            base = subtracted(new)
            total = total * exponential(top - base) + tl.sum(exponential(v - base), 2, keep_dims=True)
            top = new
    best = tl.max(top, 1, keep_dims=True)
    total = tl.sum(total * exponential(top - subtracted(best)), 1, keep_dims=True)
    steps = tl.cdiv(n, BLOCK * UNROLL)
    for step in range(steps):
        kept = ()
        for u in tl.static_range(UNROLL):
            col = ((steps - 1 - step) * UNROLL + u) * BLOCK + own
            live = inside & (col < n)
            v = tl.load(at + along(col, x_strides[2]), mask=live, other=0.0, eviction_policy="evict_first")
            kept = kept + (v,)
        for u in tl.static_range(UNROLL):
            col = ((steps - 1 - step) * UNROLL + u) * BLOCK + own
            y = finished(kept[u].to(COMPUTE), best, total, LOG)
            tl.store(to + along(col, out_strides[2]), y.to(out.dtype.element_ty), mask=inside & (col < n))


@triton.jit
def softmax_backward_looped_kernel(
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
    UNROLL: tl.constexpr,
):
    """Rows block by block: the sum, in each column of the blocks, then, backwards, the gradients.

    Cached are the rows until they are read again; what is written makes no room for itself there.
    """
    outer, lane = lanes_of(tl.program_id(0), blocks, lanes, sizes, ROWS)
    dout_at = rows_of(dout, dout_strides, outer, sizes, lane)
    out_at = rows_of(out, out_strides, outer, sizes, lane)
    to = rows_of(dx, dx_strides, outer, sizes, lane)
    inside = lane < lanes
    total = tl.zeros((ROWS, BLOCK), COMPUTE)
    for start in range(0, n, BLOCK * UNROLL):
        for u in tl.static_range(UNROLL):
            col = start + u * BLOCK + tl.arange(0, BLOCK)[None, :]
            live = inside & (col < n)
            dy = tl.load(dout_at + along(col, dout_strides[2]), mask=live, other=0.0, eviction_policy="evict_last")
            dy = dy.to(COMPUTE)
            y = dy
            if not LOG:
                y = tl.load(out_at + along(col, out_strides[2]), mask=live, other=0.0, eviction_policy="evict_last")
                y = y.to(COMPUTE)
            total += term(dy, y, LOG)
    total = tl.sum(total, 1, keep_dims=True)
    steps = tl.cdiv(n, BLOCK * UNROLL)
    for step in range(steps):
        kept = ()
        for u in tl.static_range(UNROLL):
            col = ((steps - 1 - step) * UNROLL + u) * BLOCK + tl.arange(0, BLOCK)[None, :]
            live = inside & (col < n)
            dy = tl.load(dout_at + along(col, dout_strides[2]), mask=live, other=0.0, eviction_policy="evict_first")
            y = tl.load(out_at + along(col, out_strides[2]), mask=live, other=0.0, eviction_policy="evict_first")
            kept = kept + (dy, y)
        for u in tl.static_range(UNROLL):
            col = ((steps - 1 - step) * UNROLL + u) * BLOCK + tl.arange(0, BLOCK)[None, :]
            g = derived(kept[2 * u].to(COMPUTE), kept[2 * u + 1].to(COMPUTE), total, LOG)
            tl.store(
                to + along(col, dx_strides[2]),
                g.to(dx.dtype.element_ty),
                mask=inside & (col < n),
                eviction_policy="evict_first",
            )
