"""softmax, log_softmax and their backward, entry ``split``: each row divided among ``blocks`` programs.

Two launches: the ``partial`` kernel reduces each block of a row, the ``finish`` kernel merges the partial results of
the row and writes a block of the output. Every program merges them in the same order, so all get the same bits. Where
neighbouring rows are adjacent in an operand, a program has a block of ROWS neighbours: it moves whole sectors, and
turns the tile between its threads. If each of these programs would merge many results, a ``merge`` kernel does so
between the two launches, once for each row.

Operands of shape [outer, lanes, n] and their strides: see ``common/rows_kernels``; ``groups``: groups of ROWS lanes at
one outer point. Partial results are [rows, blocks].
The maximum ignores NaN, as the hardware's does. A NaN then enters the sum, and through it every element of its row.
The first launch loads with ``evict_last``, to keep the rows in the cache for the second, which loads with
``evict_first``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import (
    element_pointers,
    group_lanes,
    load_rows,
    merge_softmax_parts,
    store_rows,
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
    groups,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """tops = max(x), totals = sum(exp(x - max(x))) of one block of ROWS rows.

    x: [outer, lanes, n] of f16, bf16, f32 or f64; tops, totals: [rows, blocks] of COMPUTE.
    """
    block = tl.program_id(0) % blocks
    outer, lane = group_lanes(tl.program_id(0) // blocks, groups, lanes, sizes, ROWS)
    inside = lane < lanes
    col = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = element_pointers(x, x_strides, outer, sizes, lane, col)
    v = load_rows(at, inside & (col < n), -float("inf"), x_strides, "evict_last").to(COMPUTE)
    row = outer.to(tl.int64) * lanes + lane
    store_softmax_part(v, tops, totals, row * blocks + block, inside)


@jit
def softmax_merge_kernel(tops, totals, row_tops, row_totals, blocks, BLOCK: tl.constexpr):
    """row_tops = max(tops), row_totals = sum(totals * exp(tops - row_tops)) of one row.

    tops, totals: [rows, blocks], row_tops, row_totals: [rows] of COMPUTE; BLOCK >= blocks.
    """
    row = tl.program_id(0) + tl.arange(0, 1)
    top, total = merge_softmax_parts(tops, totals, row, row >= 0, blocks, BLOCK)
    tl.store(row_tops + row, top)
    tl.store(row_totals + row, total)


@jit
def softmax_backward_merge_kernel(totals, row_totals, blocks, BLOCK: tl.constexpr):
    """row_totals = sum(totals) of one row. totals: [rows, blocks], row_totals: [rows] of COMPUTE; BLOCK >= blocks."""
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    total = tl.load(totals + row.to(tl.int64) * blocks + part, mask=part < blocks, other=0.0)
    tl.store(row_totals + row, tl.sum(total, 0))


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
    pieces,
    groups,
    LOG: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """out = exp(x - top) / total for one of ``pieces`` blocks of ROWS rows; with LOG, its logarithm; top and total are
    a row's.

    x, out: [outer, lanes, n] of f16, bf16, f32 or f64; tops, totals: [rows, blocks] of COMPUTE; BLOCKS >= blocks.
    """
    outer, lane = group_lanes(tl.program_id(0) // pieces, groups, lanes, sizes, ROWS)
    inside = lane < lanes
    top, total = merge_softmax_parts(tops, totals, outer.to(tl.int64) * lanes + lane, inside, blocks, BLOCKS)
    col = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = inside & (col < n)
    at = element_pointers(x, x_strides, outer, sizes, lane, col)
    v = load_rows(at, live, 0.0, x_strides, "evict_first").to(COMPUTE)
    y = softmax_of(v, top, total, LOG)
    to = element_pointers(out, out_strides, outer, sizes, lane, col)
    store_rows(to, y.to(out.dtype.element_ty), live, out_strides, "")


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
    groups,
    LOG: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """totals = sum(dout * out) of one block of ROWS rows; with LOG, sum(dout).

    dout, out: [outer, lanes, n] of f16, bf16, f32 or f64; totals: [rows, blocks] of COMPUTE.
    """
    block = tl.program_id(0) % blocks
    outer, lane = group_lanes(tl.program_id(0) // blocks, groups, lanes, sizes, ROWS)
    inside = lane < lanes
    col = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = inside & (col < n)
    at = element_pointers(dout, dout_strides, outer, sizes, lane, col)
    dy = load_rows(at, live, 0.0, dout_strides, "evict_last").to(COMPUTE)
    y = dy
    if not LOG:
        at = element_pointers(out, out_strides, outer, sizes, lane, col)
        y = load_rows(at, live, 0.0, out_strides, "evict_last").to(COMPUTE)
    total = tl.sum(gradient_term(dy, y, LOG), 1, keep_dims=True)
    row = outer.to(tl.int64) * lanes + lane
    tl.store(totals + row * blocks + block, total, mask=inside)


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
    pieces,
    groups,
    LOG: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """dx = out * (dout - total) for one of ``pieces`` blocks of ROWS rows; with LOG, dx = dout - exp(out) * total;
    total is a row's.

    dout, out, dx: [outer, lanes, n] of f16, bf16, f32 or f64; totals: [rows, blocks] of COMPUTE; BLOCKS >= blocks.
    """
    outer, lane = group_lanes(tl.program_id(0) // pieces, groups, lanes, sizes, ROWS)
    inside = lane < lanes
    part = tl.arange(0, BLOCKS)[None, :]
    first = (outer.to(tl.int64) * lanes + lane) * blocks
    total = tl.load(totals + first + part, mask=inside & (part < blocks), other=0.0)
    total = tl.sum(total, 1, keep_dims=True)
    col = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = inside & (col < n)
    at = element_pointers(dout, dout_strides, outer, sizes, lane, col)
    dy = load_rows(at, live, 0.0, dout_strides, "evict_first").to(COMPUTE)
    at = element_pointers(out, out_strides, outer, sizes, lane, col)
    y = load_rows(at, live, 0.0, out_strides, "evict_first").to(COMPUTE)
    to = element_pointers(dx, dx_strides, outer, sizes, lane, col)
    store_rows(to, gradient_of(dy, y, total, LOG).to(dx.dtype.element_ty), live, dx_strides, "")
