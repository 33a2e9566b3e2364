"""Scans, entry ``split``: each row is divided among ``blocks`` programs, which reduce and later scan a block each; or
ROWS neighbouring rows are.

Every program of the second combines the totals of the blocks before its own; where these are many,
``scan_looped_kernel`` scans the totals of each row between the two launches. For operands of shape [outer, lanes, n]
and their strides see ``common/rows_kernels``. The first launch loads with ``evict_last``, to keep the rows in the L2
cache for the last one, which loads with ``evict_first``. The backward is divided likewise: between its launches
``carry_maps_kernel`` composes the maps of blocks.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import allow_next, wait_for_previous
from triplan.backends.triton.common.rows_kernels import axis_offset, row_pointers
from triplan.backends.triton.scans.shared_kernels import (
    combine,
    compose,
    edge,
    grouped_pointers,
    maps,
    or_identity,
    scan,
    store_gradients,
)


@jit
def block_of(blocks, lanes, ROWS: tl.constexpr):
    """(outer point, lane, number of the block, number of its total) of a program. Of several rows, lanes and totals are
    [ROWS, 1]; a lane past the last one is ``lanes`` or more."""
    block = tl.program_id(0) % blocks
    if ROWS == 1:
        row = tl.program_id(0) // blocks
        outer, lane, total = row // lanes, row % lanes, tl.program_id(0)
    else:
        group, groups = tl.program_id(0) // blocks, tl.cdiv(lanes, ROWS)
        outer = group // groups
        lane = (group % groups).to(lanes.dtype) * ROWS + tl.arange(0, ROWS)[:, None]
        total = (outer * lanes + lane).to(tl.int64) * blocks + block
    return outer, lane, block, total


@jit
def multiply(a, b):
    """a * b"""
    return a * b


@jit
def total_of(v, PRODUCT: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of ``v`` [ROWS, BLOCK] along rows; with PRODUCT, the products, as [ROWS, 1]. (A product of neighbours
    is one that a scan has, too; one of others might leave the range of floats.)"""
    if PRODUCT and v.dtype.is_floating():
        total = edge(scan(v, PRODUCT, False), BLOCK, False)
    elif PRODUCT:
        total = tl.reduce(v, 1, multiply, keep_dims=True)
    else:
        total = tl.sum(v, 1, keep_dims=True)
    return total


@jit
def scan_totals_kernel(
    x,
    totals,
    x_strides,
    sizes,
    lanes,
    n,
    blocks,
    PRODUCT: tl.constexpr,
    GROUP: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """totals = the sum of one block of a row; with PRODUCT, the product.

    x: [outer, lanes, n] of f16, bf16, f32, f64 or i64; totals: [rows, blocks] of COMPUTE.
    """
    wait_for_previous(OVERLAPS)
    allow_next(OVERLAPS)
    outer, lane, block, to = block_of(blocks, lanes, ROWS)
    col = block.to(n.dtype) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = col < n if ROWS == 1 else (col < n) & (lane < lanes)
    at = row_pointers(x, x_strides, outer, sizes, lane)
    scans: tl.constexpr = PRODUCT and x.dtype.element_ty.is_floating()  # see ``total_of``
    at = grouped_pointers(at, axis_offset(col, x_strides[2]), GROUP if scans else 1)
    v = tl.load(at, mask=live, other=0, eviction_policy="evict_last")
    v = or_identity(v.to(COMPUTE), live, PRODUCT)
    total = total_of(v, PRODUCT, BLOCK)
    if ROWS == 1:
        tl.store(totals + to + tl.zeros((1, 1), tl.int32), total)
    else:
        tl.store(totals + to, total, mask=lane < lanes)


@jit
def scan_finish_kernel(
    x,
    out,
    totals,
    x_strides,
    out_strides,
    sizes,
    lanes,
    n,
    blocks,
    PRODUCT: tl.constexpr,
    REVERSE: tl.constexpr,
    GROUP: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out[k] = x[0] + ... + x[k] for one block of a row; with REVERSE, x[k] + ... + x[n - 1]; with PRODUCT,
    products.

    x, out: [outer, lanes, n] of f16, bf16, f32, f64 or i64; totals: [rows, blocks] of COMPUTE; BLOCKS >= blocks. With
    BLOCKS of 0 they are already scanned: the total of the neighbouring block covers all elements before this block.
    """
    outer, lane, block, total = block_of(blocks, lanes, ROWS)
    col = block.to(n.dtype) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = col < n if ROWS == 1 else (col < n) & (lane < lanes)
    at = row_pointers(x, x_strides, outer, sizes, lane)
    to = row_pointers(out, out_strides, outer, sizes, lane)
    at = grouped_pointers(at, axis_offset(col, x_strides[2]), GROUP)
    v = tl.load(at, mask=live, other=0, eviction_policy="evict_first")
    own = scan(or_identity(v.to(COMPUTE), live, PRODUCT), PRODUCT, REVERSE)
    wait_for_previous(OVERLAPS)
    if BLOCKS == 0:
        found = block + 1 < blocks if REVERSE else block > 0
        if ROWS > 1:
            found = found & (lane < lanes)
        before = tl.load(totals + total + (1 if REVERSE else -1), mask=found, other=PRODUCT)
    else:
        part = tl.arange(0, BLOCKS)[None, :]
        found = (part > block) & (part < blocks) if REVERSE else part < block
        if ROWS > 1:
            found = found & (lane < lanes)
        before = or_identity(tl.load(totals + (total - block) + part, mask=found, other=0), found, PRODUCT)
        before = total_of(before, PRODUCT, BLOCKS)
    y = combine(before, own, PRODUCT)
    tl.store(to + axis_offset(col, out_strides[2]), y.to(out.dtype.element_ty), mask=live)


@jit
def block_maps_kernel(
    dout,
    x,
    factors,
    terms,
    dout_strides,
    x_strides,
    sizes,
    lanes,
    n,
    blocks,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """s[first] = terms + factors * s[last + 1] for one block of a row, where s[k] = dout[k] + x[k + 1] * s[k + 1].

    dout, x: [outer, lanes, n] of f16, bf16, f32 or f64; factors, terms: [rows, blocks] of COMPUTE. ROWS is 1.
    """
    outer, lane, block, number = block_of(blocks, lanes, ROWS)
    dout_at = row_pointers(dout, dout_strides, outer, sizes, lane)
    x_at = row_pointers(x, x_strides, outer, sizes, lane)
    col = block.to(n.dtype) * BLOCK + tl.arange(0, BLOCK)[None, :]
    a, b = maps(dout_at, x_at, dout_strides, x_strides, col, n, lane < lanes, COMPUTE)
    one = tl.zeros((1, 1), tl.int32)
    tl.store(factors + number + one, edge(a, BLOCK, True))
    tl.store(terms + number + one, edge(b, BLOCK, True))


@jit
def carry_maps_kernel(factors, terms, blocks, COMPUTE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """terms[j] += factors[j] * terms[j + 1], from the last block of each row on.

    factors, terms: [rows, blocks] of COMPUTE. A program composes the maps of a row, BLOCK blocks at a time; ROWS is 1.
    """
    first = tl.program_id(0).to(tl.int64) * blocks
    carried = tl.zeros((1, 1), COMPUTE)
    steps = tl.cdiv(blocks, BLOCK)
    for step in range(steps):
        block = (steps - 1 - step) * BLOCK + tl.arange(0, BLOCK)[None, :]
        live = block < blocks
        a = tl.load(factors + first + block, mask=live, other=0)
        b = tl.load(terms + first + block, mask=live, other=0)
        a, b = tl.associative_scan((a, b), 1, compose, reverse=True)
        s = b + a * carried
        tl.store(terms + first + block, s, mask=live)
        carried = edge(s, BLOCK, True)


@jit
def cumprod_backward_finish_kernel(
    dout,
    x,
    out,
    dx,
    terms,
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
    """dx[k] = out[k - 1] * s[k] for one block of a row, where s[k] = dout[k] + x[k + 1] * s[k + 1].

    dout, x, out, dx: [outer, lanes, n] of f16, bf16, f32 or f64; terms: [rows, blocks] of COMPUTE, the s of the first
    element of each block. ROWS is 1.
    """
    outer, lane, block, number = block_of(blocks, lanes, ROWS)
    dout_at = row_pointers(dout, dout_strides, outer, sizes, lane)
    x_at = row_pointers(x, x_strides, outer, sizes, lane)
    out_at = row_pointers(out, out_strides, outer, sizes, lane)
    to = row_pointers(dx, dx_strides, outer, sizes, lane)
    carried = tl.load(terms + number + 1, mask=block + 1 < blocks, other=0)
    col = block.to(n.dtype) * BLOCK + tl.arange(0, BLOCK)[None, :]
    a, b = maps(dout_at, x_at, dout_strides, x_strides, col, n, lane < lanes, COMPUTE)
    store_gradients(out_at, to, out_strides, dx_strides, col, n, lane < lanes, b + a * carried)
