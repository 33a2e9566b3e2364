"""softmax, log_softmax and their backward: each row split between programs, in two launches.

The first launch reduces each block of a row, the second merges the blocks' results and writes the output.
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
    rows_of,
    subtracted,
)
from triplan.backends.triton.softmax.shared_kernels import derived, finished, term


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
