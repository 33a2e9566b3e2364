"""softmax, log_softmax and their adjoints: rows held whole, rows in a loop, and rows split between programs.

Each operand comes with (outer strides, lane stride, step along the row); see ``rows_kernels``. The maximum ignores NaN,
as the hardware's does: a NaN then enters the sum, and through it the whole row.
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
    subtracted,
)


@triton.jit
def finished(v, top, total, LOG: tl.constexpr):
    """The result from an element, its row's maximum and its row's sum of exponentials."""
    v = v - top
    return v - tl.log(total) if LOG else exponential(v) * (1.0 / total)


# --- forward ---


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
def softmax_partial_kernel(
    x,
    tops,
    totals,
    x_strides,
    sizes,
    lanes,
    n,
    blocks,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Maximum and sum of one block of one row, of which there are ``blocks`` a row."""
    row = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    col = block * BLOCK + tl.arange(0, BLOCK)
    at = rows_of(x, x_strides, row // lanes, sizes, row % lanes)
    v = tl.load(at + along(col, x_strides[2]), mask=col < n, other=-float("inf"), eviction_policy="evict_last")
    v = v.to(COMPUTE)
    top = tl.max(v, 0)
    tl.store(tops + tl.program_id(0), top)
    tl.store(totals + tl.program_id(0), tl.sum(exponential(v - subtracted(top)), 0))


@triton.jit
def softmax_finish_kernel(
    x,
    out,
    tops,
    totals,
    x_strides,
    out_strides,
    sizes,
    lanes,
    n,
    blocks,
    LOG: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The rest for one block, from all partial results of its row, which every program adds up in the same order."""
    row = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    part = tl.arange(0, BLOCKS)
    known = part < blocks
    first = row.to(tl.int64) * blocks
    part_tops = tl.load(tops + first + part, mask=known, other=-float("inf"))
    part_totals = tl.load(totals + first + part, mask=known, other=0.0)
    top = tl.max(part_tops, 0)
    total = tl.sum(part_totals * exponential(part_tops - subtracted(top)), 0)
    col = block * BLOCK + tl.arange(0, BLOCK)
    live = col < n
    at = rows_of(x, x_strides, row // lanes, sizes, row % lanes)
    to = rows_of(out, out_strides, row // lanes, sizes, row % lanes)
    v = tl.load(at + along(col, x_strides[2]), mask=live, other=0.0, eviction_policy="evict_first").to(COMPUTE)
    y = finished(v, top, total, LOG)
    tl.store(to + along(col, out_strides[2]), y.to(out.dtype.element_ty), mask=live)


# --- backward ---


@triton.jit
def term(dy, y, LOG: tl.constexpr):
    """What a row's sum is made of."""
    return dy if LOG else dy * y


@triton.jit
def derived(dy, y, total, LOG: tl.constexpr):
    """The gradient of an element from its row's sum."""
    return dy - exponential(y) * total if LOG else y * (dy - total)


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


@triton.jit
def softmax_backward_partial_kernel(
    dout,
    out,
    totals,
    dout_strides,
    out_strides,
    sizes,
    lanes,
    n,
    blocks,
    LOG: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of one block of one row."""
    row = tl.program_id(0) // blocks
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    live = col < n
    dout_at = rows_of(dout, dout_strides, row // lanes, sizes, row % lanes)
    dy = tl.load(dout_at + along(col, dout_strides[2]), mask=live, other=0.0, eviction_policy="evict_last").to(COMPUTE)
    y = dy
    if not LOG:
        out_at = rows_of(out, out_strides, row // lanes, sizes, row % lanes)
        y = tl.load(out_at + along(col, out_strides[2]), mask=live, other=0.0, eviction_policy="evict_last")
        y = y.to(COMPUTE)
    tl.store(totals + tl.program_id(0), tl.sum(term(dy, y, LOG), 0))


@triton.jit
def softmax_backward_finish_kernel(
    dout,
    out,
    dx,
    totals,
    dout_strides,
    out_strides,
    dx_strides,
    sizes,
    lanes,
    n,
    blocks,
    LOG: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The gradients of one block, from all partial sums of its row."""
    row = tl.program_id(0) // blocks
    part = tl.arange(0, BLOCKS)
    first = row.to(tl.int64) * blocks
    total = tl.sum(tl.load(totals + first + part, mask=part < blocks, other=0.0), 0)
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    live = col < n
    dout_at = rows_of(dout, dout_strides, row // lanes, sizes, row % lanes)
    out_at = rows_of(out, out_strides, row // lanes, sizes, row % lanes)
    to = rows_of(dx, dx_strides, row // lanes, sizes, row % lanes)
    dy = tl.load(dout_at + along(col, dout_strides[2]), mask=live, other=0.0, eviction_policy="evict_first")
    y = tl.load(out_at + along(col, out_strides[2]), mask=live, other=0.0, eviction_policy="evict_first")
    g = derived(dy.to(COMPUTE), y.to(COMPUTE), total, LOG)
    tl.store(to + along(col, dx_strides[2]), g.to(dx.dtype.element_ty), mask=live)
