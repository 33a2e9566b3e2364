"""softmax, log_softmax and their backward, entry ``split``: each row divided among ``blocks`` programs.

Two launches: the ``partial`` kernel reduces each block of a row, the ``finish`` kernel merges the partial results of
the row and writes a block of the output. Every program merges them in the same order, so all get the same bits.

Operands of shape [outer, lanes, n] and their strides: see ``common/rows_kernels``. Partial results are [rows, blocks].
The maximum ignores NaN, as the hardware's does. A NaN then enters the sum, and through it every element of its row.
The first launch loads with ``evict_last``, to keep the rows in the cache for the second, which loads with
``evict_first``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import (
    axis_offset,
    merge_softmax_parts,
    row_pointers,
    store_softmax_part,
)
from triplan.backends.triton.softmax.shared_kernels import gradient_of, gradient_term, softmax_of


@jit
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
    """tops = max(x), totals = sum(exp(x - max(x))) of one block of one row.

    x: [outer, lanes, n] of f16, bf16, f32 or f64; tops, totals: [rows, blocks] of COMPUTE.
    """
    row = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    col = block * BLOCK + tl.arange(0, BLOCK)
    at = row_pointers(x, x_strides, row // lanes, sizes, row % lanes)
    v = tl.load(at + axis_offset(col, x_strides[2]), mask=col < n, other=-float("inf"), eviction_policy="evict_last")
    v = v.to(COMPUTE)
    store_softmax_part(v, tops, totals)


@jit
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
    """out = exp(x - top) / total for one block of one row; with LOG, its logarithm; top and total are the row's.

    x, out: [outer, lanes, n] of f16, bf16, f32 or f64; tops, totals: [rows, blocks] of COMPUTE; BLOCKS >= blocks.
    """
    row = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    top, total = merge_softmax_parts(tops, totals, row, blocks, BLOCKS)
    col = block * BLOCK + tl.arange(0, BLOCK)
    live = col < n
    at = row_pointers(x, x_strides, row // lanes, sizes, row % lanes)
    to = row_pointers(out, out_strides, row // lanes, sizes, row % lanes)
    v = tl.load(at + axis_offset(col, x_strides[2]), mask=live, other=0.0, eviction_policy="evict_first").to(COMPUTE)
    y = softmax_of(v, top, total, LOG)
    tl.store(to + axis_offset(col, out_strides[2]), y.to(out.dtype.element_ty), mask=live)


@jit
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
    """totals = sum(dout * out) of one block of one row; with LOG, sum(dout).

    dout, out: [outer, lanes, n] of f16, bf16, f32 or f64; totals: [rows, blocks] of COMPUTE.
    """
    row = tl.program_id(0) // blocks
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    live = col < n
    dout_at = row_pointers(dout, dout_strides, row // lanes, sizes, row % lanes)
    dy = tl.load(dout_at + axis_offset(col, dout_strides[2]), mask=live, other=0.0, eviction_policy="evict_last").to(
        COMPUTE
    )
    y = dy
    if not LOG:
        out_at = row_pointers(out, out_strides, row // lanes, sizes, row % lanes)
        y = tl.load(out_at + axis_offset(col, out_strides[2]), mask=live, other=0.0, eviction_policy="evict_last")
        y = y.to(COMPUTE)
    tl.store(totals + tl.program_id(0), tl.sum(gradient_term(dy, y, LOG), 0))


@jit
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
    """dx = out * (dout - total) for one block of one row; with LOG, dx = dout - exp(out) * total; total is the row's.

    dout, out, dx: [outer, lanes, n] of f16, bf16, f32 or f64; totals: [rows, blocks] of COMPUTE; BLOCKS >= blocks.
    """
    row = tl.program_id(0) // blocks
    part = tl.arange(0, BLOCKS)
    first = row.to(tl.int64) * blocks
    total = tl.sum(tl.load(totals + first + part, mask=part < blocks, other=0.0), 0)
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    live = col < n
    dout_at = row_pointers(dout, dout_strides, row // lanes, sizes, row % lanes)
    out_at = row_pointers(out, out_strides, row // lanes, sizes, row % lanes)
    to = row_pointers(dx, dx_strides, row // lanes, sizes, row % lanes)
    dy = tl.load(dout_at + axis_offset(col, dout_strides[2]), mask=live, other=0.0, eviction_policy="evict_first")
    y = tl.load(out_at + axis_offset(col, out_strides[2]), mask=live, other=0.0, eviction_policy="evict_first")
    g = gradient_of(dy.to(COMPUTE), y.to(COMPUTE), total, LOG)
    tl.store(to + axis_offset(col, dx_strides[2]), g.to(dx.dtype.element_ty), mask=live)
