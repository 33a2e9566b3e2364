"""Kernels of ``split_k``: partial products over pieces of k, then their sum.

For products with fewer tiles of C than the card has multiprocessors, as with few rows: more programs keep more loads in
flight. The number of pieces fixes the order of every addition, so the bits never change between runs.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.gemm.tiles_kernels import epilogue, product_of, tile_of


@jit
def split_kernel(
    a,
    b,
    partial,
    products,
    depth,
    leading,
    m,
    n,
    k,
    am,
    ak,
    bk,
    bn,
    a_batch,
    b_batch,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    WHOLE_K: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """partial[s, i] = a[i][:, piece s] @ b[i][piece s, :], where piece s is s * depth <= p < (s + 1) * depth.

    ``a`` (products, m, k) and ``b`` (products, k, n); ``partial`` (pieces, products, m, leading) is packed and of
    element ACC, with zeros behind the n columns of each row (``leading`` None: n); ``depth`` is a multiple of BLOCK_K.
    ``products``, ``a_batch`` and ``b_batch`` are None without a batch.
    """
    begin(OVERLAPS)
    if leading is None:
        leading = n
    program = tl.program_id(0)
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    slab = program // (tiles_m * tiles_n)
    piece = slab
    if products is not None:
        piece = slab // products
        product = (slab % products).to(tl.int64)
        a += product * a_batch
        b += product * b_batch
    tile_m, tile_n = tile_of(program % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    row = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = piece * depth
    a += first.to(tl.int64) * ak
    b += first.to(tl.int64) * bk
    left = tl.minimum(depth, k - first)
    acc = product_of(a, b, row, column, m, n, left, am, ak, bk, bn, BLOCK_M, BLOCK_N, BLOCK_K, WHOLE_K, PRECISION, ACC)
    at = partial + (slab.to(tl.int64) * m + row)[:, None] * leading + column[None, :]
    tl.store(at, acc, mask=(row < m)[:, None] & (column < leading)[None, :])


@jit
def pieces_kernel(
    partial,
    c,
    c0,
    bias,
    alpha,
    beta,
    pieces,
    slab,
    leading,
    m,
    n,
    cm,
    cn,
    c0m,
    c0n,
    bias_n,
    pre,
    prem,
    pren,
    c_batch,
    c0_batch,
    pre_batch,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MOST_PIECES: tl.constexpr,
    PARTS: tl.constexpr,
    ACC: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """c = act(alpha * (partial[0] + partial[1] + ...) + beta * c0 + bias), BLOCK_M by BLOCK_N elements per program.

    ``partial`` (pieces, products, m, leading) is packed and of element ACC, with ``slab`` elements per piece
    (``leading`` None: n); ``c``, ``c0`` and ``pre`` (products, m, n); ``bias`` (n,). Every PARTS-th piece is added in
    order, MOST_PIECES of them loaded at a time, by threads of their own; then these sums are added.
    """
    begin(OVERLAPS)
    if leading is None:
        leading = n
    program = tl.program_id(0)
    tiles_n = tl.cdiv(n, BLOCK_N)
    tiles = tl.cdiv(m, BLOCK_M) * tiles_n
    if c_batch is not None:
        product = (program // tiles).to(tl.int64)
        program = program % tiles
        partial += product * m * leading
        c += product * c_batch
        if c0 is not None:
            c0 += product * c0_batch
        if pre is not None:
            pre += product * pre_batch
    row = (program // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (program % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.arange(0, PARTS)[:, None, None]
    at = partial + part * slab + (row[:, None] * leading + column[None, :])[None]
    inside = ((row < m)[:, None] & (column < leading)[None, :])[None]
    acc = tl.zeros((PARTS, BLOCK_M, BLOCK_N), ACC)
    for first in range(0, pieces, MOST_PIECES * PARTS):
        for i in tl.static_range(MOST_PIECES):  # unrolled: all loads are in flight before the first addition
            piece = first + i * PARTS
            acc += tl.load(at + piece * slab, mask=inside & (piece + part < pieces), other=0.0)
    epilogue(
        tl.sum(acc, 0),
        row,
        column,
        c,
        c0,
        bias,
        alpha,
        beta,
        m,
        n,
        cm,
        cn,
        c0m,
        c0n,
        bias_n,
        pre,
        prem,
        pren,
        ACTIVATION,
        ACC,
    )
