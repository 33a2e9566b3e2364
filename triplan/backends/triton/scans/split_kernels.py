"""Scans, entry ``split``: each row is divided among ``blocks`` programs, which reduce and later scan a block each; or
ROWS neighbouring rows are.

Between the launches of these two kernels ``scan_looped_kernel`` scans the totals of each row. For operands of shape
[outer, lanes, n] and their strides see ``common/rows_kernels``. The first launch loads with ``evict_last``, to keep the
rows in the L2 cache for the last one, which loads with ``evict_first``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import axis_offset, row_pointers
from triplan.backends.triton.scans.shared_kernels import combine, edge, grouped_pointers, or_identity, scan


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
):
    """totals = the sum of one block of a row; with PRODUCT, the product.

    x: [outer, lanes, n] of f16, bf16, f32, f64 or i64; totals: [rows, blocks] of COMPUTE.
    """
    outer, lane, block, to = block_of(blocks, lanes, ROWS)
    col = block.to(n.dtype) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = col < n if ROWS == 1 else (col < n) & (lane < lanes)
    at = row_pointers(x, x_strides, outer, sizes, lane)
    at = grouped_pointers(at, axis_offset(col, x_strides[2]), GROUP if PRODUCT else 1)  # (a sum is no scan)
    v = tl.load(at, mask=live, other=0, eviction_policy="evict_last")
    v = or_identity(v.to(COMPUTE), live, PRODUCT)
    if PRODUCT:
        total = edge(scan(v, PRODUCT, False), BLOCK, False)
    else:
        total = tl.sum(v, 1, keep_dims=True)
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
):
    """out[k] = x[0] + ... + x[k] for one block of a row; with REVERSE, x[k] + ... + x[n - 1]; with PRODUCT,
    products.

    x, out: [outer, lanes, n] of f16, bf16, f32, f64 or i64; totals: [rows, blocks] of COMPUTE, already scanned: the
    total of the neighbouring block covers all elements before this block.
    """
    outer, lane, block, total = block_of(blocks, lanes, ROWS)
    col = block.to(n.dtype) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = col < n if ROWS == 1 else (col < n) & (lane < lanes)
    at = row_pointers(x, x_strides, outer, sizes, lane)
    to = row_pointers(out, out_strides, outer, sizes, lane)
    found = block + 1 < blocks if REVERSE else block > 0
    if ROWS > 1:
        found = found & (lane < lanes)
    before = tl.load(totals + total + (1 if REVERSE else -1), mask=found, other=PRODUCT)
    at = grouped_pointers(at, axis_offset(col, x_strides[2]), GROUP)
    v = tl.load(at, mask=live, other=0, eviction_policy="evict_first")
    y = combine(before, scan(or_identity(v.to(COMPUTE), live, PRODUCT), PRODUCT, REVERSE), PRODUCT)
    tl.store(to + axis_offset(col, out_strides[2]), y.to(out.dtype.element_ty), mask=live)
