"""Scans, entry ``looped``: rows of any length, block by block, each element read once and written once.

Operands of shape [outer, lanes, n], their strides and ``blocks``: see ``common/rows_kernels``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import (
    axis_offset,
    group_lanes,
    load_rows,
    row_pointers,
    store_rows,
)
from triplan.backends.triton.scans.shared_kernels import (
    combine,
    edge,
    grouped_pointers,
    maps,
    or_identity,
    scan,
    scan_before,
    store_gradients,
)


@jit
def _load(at, strides, block, live, n, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Block number ``block`` of the rows at ``at`` that are ``live``; 0 where there is no element."""
    col = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    found = grouped_pointers(at, axis_offset(col, strides[2]), GROUP)
    return load_rows(found, live & (block >= 0) & (col < n), 0, strides, "")


@jit
def scan_looped_kernel(
    x,
    out,
    x_strides,
    out_strides,
    sizes,
    lanes,
    n,
    blocks,
    PRODUCT: tl.constexpr,
    REVERSE: tl.constexpr,
    AHEAD: tl.constexpr,
    GROUP: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[k] = x[0] + ... + x[k] along each row; with REVERSE, x[k] + ... + x[n - 1]; with PRODUCT, products.

    x, out: [outer, lanes, n] of f16, bf16, f32, f64 or i64; they may be the same memory. A program scans ROWS rows in
    blocks of BLOCK elements; with AHEAD it loads each before it scans the previous one, as scans wait for threads.
    """
    outer, lane = group_lanes(tl.program_id(0), blocks, lanes, sizes, ROWS)
    at = row_pointers(x, x_strides, outer, sizes, lane)
    to = row_pointers(out, out_strides, outer, sizes, lane)
    carried = tl.full((ROWS, 1), PRODUCT, COMPUTE)
    steps = tl.cdiv(n, BLOCK)
    if AHEAD:
        following = _load(at, x_strides, steps - 1 if REVERSE else 0, lane < lanes, n, BLOCK, GROUP)
    for step in range(steps):
        block = step
        if REVERSE:
            block = steps - 1 - step
        if AHEAD:
            v = following
            following = _load(at, x_strides, block - 1 if REVERSE else block + 1, lane < lanes, n, BLOCK, GROUP)
        else:
            v = _load(at, x_strides, block, lane < lanes, n, BLOCK, GROUP)
        col = block * BLOCK + tl.arange(0, BLOCK)[None, :]
        live = (lane < lanes) & (col < n)
        y = combine(carried, scan(or_identity(v.to(COMPUTE), live, PRODUCT), PRODUCT, REVERSE), PRODUCT)
        store_rows(to + axis_offset(col, out_strides[2]), y.to(out.dtype.element_ty), live, out_strides, "")
        carried = edge(y, BLOCK, REVERSE)


@jit
def _elements(at, strides, first, number, REVERSE: tl.constexpr):
    """Addresses of the elements behind the ``first`` ones, by ``number``, of the rows that begin at ``at``.

    (The products are added in this order: those of ``number`` are the same in all threads.)
    """
    offset, more = axis_offset(first, strides[2]), axis_offset(number, strides[2])
    return at - offset - more if REVERSE else at + offset + more


@jit
def _load_elements(at, strides, first, number, inside, n, REVERSE: tl.constexpr):
    """The elements at ``_elements`` of the rows that are ``inside``; 0 where there is none."""
    return tl.load(_elements(at, strides, first, number, REVERSE), mask=inside & (number < n - first), other=0)


@jit
def scan_across_kernel(
    x,
    out,
    x_strides,
    out_strides,
    sizes,
    lanes,
    n,
    blocks,
    PRODUCT: tl.constexpr,
    REVERSE: tl.constexpr,
    AHEAD: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
):
    """out[k] = x[0] + ... + x[k] along each row; with REVERSE, x[k] + ... + x[n - 1]; with PRODUCT, products.

    x, out: [outer, lanes, n] of f16, bf16, f32, f64 or i64, whose neighbouring rows are adjacent; they may be the same
    memory. A program scans ROWS rows in blocks of RUNS runs of RUN elements; with AHEAD it loads each block before it
    scans the previous one.

    Threads and warps lie along ROWS, which are adjacent, and then along RUNS: each thread has whole runs, and scans
    them without the others. In a tile [ROWS, BLOCK] it would have columns far apart, each of which waits for those of
    other warps. Rows that are scanned from their ends are read backward: to reverse a scan, Triton exchanges each
    element between threads.
    """
    outer, lane = group_lanes(tl.program_id(0), blocks, lanes, sizes, ROWS)
    lane = tl.expand_dims(lane, 2)
    inside = lane < lanes
    at = row_pointers(x, x_strides, outer, sizes, lane)
    to = row_pointers(out, out_strides, outer, sizes, lane)
    if REVERSE:
        at += axis_offset(n - 1, x_strides[2])
        to += axis_offset(n - 1, out_strides[2])
    first = tl.arange(0, RUNS)[None, :, None].to(n.dtype) * RUN
    number = tl.arange(0, RUN)[None, None, :]
    carried = tl.full((ROWS, 1, 1), PRODUCT, COMPUTE)
    if AHEAD:
        following = _load_elements(at, x_strides, first, number, inside, n, REVERSE)
    for _ in range(tl.cdiv(n, RUNS * RUN)):
        live = inside & (number < n - first)
        if AHEAD:
            v = following
            following = _load_elements(at, x_strides, first + RUNS * RUN, number, inside, n, REVERSE)
        else:
            v = _load_elements(at, x_strides, first, number, inside, n, REVERSE)
        y = scan(or_identity(v.to(COMPUTE), live, PRODUCT), PRODUCT, False, 2)
        total, before = scan_before(edge(y, RUN, False, 2), PRODUCT)
        y = combine(combine(carried, before, PRODUCT), y, PRODUCT)
        tl.store(_elements(to, out_strides, first, number, REVERSE), y.to(out.dtype.element_ty), mask=live)
        carried = combine(carried, edge(total, RUNS, False, 1), PRODUCT)
        first += RUNS * RUN


@jit
def cumprod_backward_looped_kernel(
    dout,
    x,
    out,
    dx,
    dout_strides,
    x_strides,
    out_strides,
    dx_strides,
    sizes,
    lanes,
    n,
    blocks,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx[k] = out[k - 1] * s[k], where s[k] = dout[k] + x[k + 1] * s[k + 1], along each row.

    dout, x, out, dx: [outer, lanes, n] of f16, bf16, f32 or f64. A program scans ROWS rows from their end, in blocks of
    BLOCK elements, and carries the first s of the previous block.
    """
    outer, lane = group_lanes(tl.program_id(0), blocks, lanes, sizes, ROWS)
    dout_at = row_pointers(dout, dout_strides, outer, sizes, lane)
    x_at = row_pointers(x, x_strides, outer, sizes, lane)
    out_at = row_pointers(out, out_strides, outer, sizes, lane)
    to = row_pointers(dx, dx_strides, outer, sizes, lane)
    inside = lane < lanes
    carried = tl.zeros((ROWS, 1), COMPUTE)
    steps = tl.cdiv(n, BLOCK)
    for step in range(steps):
        col = (steps - 1 - step) * BLOCK + tl.arange(0, BLOCK)[None, :]
        a, b = maps(dout_at, x_at, dout_strides, x_strides, col, n, inside, COMPUTE)
        s = b + a * carried
        store_gradients(out_at, to, out_strides, dx_strides, col, n, inside, s)
        carried = edge(s, BLOCK, True)
