"""Scans, entry ``split``: each row is divided among ``blocks`` programs, which reduce and later scan a block each.

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
    BLOCK: tl.constexpr,
):
    """totals = the sum of one block of one row; with PRODUCT, the product.

    x: [outer, lanes, n] of f16, bf16, f32, f64 or i64; totals: [rows, blocks] of COMPUTE.
    """
    row = tl.program_id(0) // blocks
    col = (tl.program_id(0) % blocks).to(n.dtype) * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = row_pointers(x, x_strides, row // lanes, sizes, row % lanes)
    at = grouped_pointers(at, axis_offset(col, x_strides[2]), GROUP if PRODUCT else 1)  # (a sum is no scan)
    v = tl.load(at, mask=col < n, other=0, eviction_policy="evict_last")
    v = or_identity(v.to(COMPUTE), col < n, PRODUCT)
    if PRODUCT:
        total = edge(scan(v, PRODUCT, False), BLOCK, False)
    else:
        total = tl.sum(v, 1, keep_dims=True)
    tl.store(totals + tl.program_id(0) + tl.zeros((1, 1), tl.int32), total)


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
    BLOCK: tl.constexpr,
):
    """out[k] = x[0] + ... + x[k] for one block of one row; with REVERSE, x[k] + ... + x[n - 1]; with PRODUCT,
    products.

    x, out: [outer, lanes, n] of f16, bf16, f32, f64 or i64; totals: [rows, blocks] of COMPUTE, already scanned: the
    total of the neighbouring block covers all elements before this block.
    """
    row = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    col = block.to(n.dtype) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = col < n
    at = row_pointers(x, x_strides, row // lanes, sizes, row % lanes)
    to = row_pointers(out, out_strides, row // lanes, sizes, row % lanes)
    if REVERSE:
        before = tl.load(totals + tl.program_id(0) + 1, mask=block + 1 < blocks, other=PRODUCT)
    else:
        before = tl.load(totals + tl.program_id(0) - 1, mask=block > 0, other=PRODUCT)
    at = grouped_pointers(at, axis_offset(col, x_strides[2]), GROUP)
    v = tl.load(at, mask=live, other=0, eviction_policy="evict_first")
    y = combine(before, scan(or_identity(v.to(COMPUTE), live, PRODUCT), PRODUCT, REVERSE), PRODUCT)
    tl.store(to + axis_offset(col, out_strides[2]), y.to(out.dtype.element_ty), mask=live)
