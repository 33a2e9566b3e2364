"""Matrix products by pieces of k: each program adds up one piece of one tile; a second kernel adds the pieces in order.

For products with fewer tiles of C than a card has multiprocessors, as those of a few rows have: more programs then keep
more loads on their way. What is added to what is fixed by the number of pieces, so the bits never change between runs.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.gemm.tiles_kernels import epilogue, product_of, tile_of


@triton.jit
def split_kernel(
    a,
    b,
    partial,
    products,
    depth,
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
    """partial[s, i, row, column]: the sum over piece s, s * depth <= p < (s + 1) * depth, of product i.

    ``partial`` is packed, and ``depth`` a multiple of BLOCK_K. ``products``, a_batch and b_batch are None without a
    batch.
    """
    begin(OVERLAPS)
    program = tl.program_id(0)
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    slab = program // (tiles_m * tiles_n)
    piece = slab
    if products is not None:
        piece = slab // products
        which = (slab % products).to(tl.int64)
        a += which * a_batch
        b += which * b_batch
    tile_m, tile_n = tile_of(program % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    row = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = piece * depth
    a += first.to(tl.int64) * ak
    b += first.to(tl.int64) * bk
    left = tl.minimum(depth, k - first)
    acc = product_of(a, b, row, column, m, n, left, am, ak, bk, bn, BLOCK_M, BLOCK_N, BLOCK_K, WHOLE_K, PRECISION, ACC)
    at = partial + (slab.to(tl.int64) * m + row)[:, None] * n + column[None, :]
    tl.store(at, acc, mask=(row < m)[:, None] & (column < n)[None, :])


@triton.jit
def pieces_kernel(
    partial,
    c,
    c0,
    bias,
    alpha,
    beta,
    pieces,
    slab,
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
    ACC: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """C = act(alpha * (partial[0] + partial[1] + ...) + beta * c0 + bias). ``slab``: elements of one piece."""
    begin(OVERLAPS)
    program = tl.program_id(0)
    tiles_n = tl.cdiv(n, BLOCK_N)
    tiles = tl.cdiv(m, BLOCK_M) * tiles_n
    if c_batch is not None:
        which = (program // tiles).to(tl.int64)
        program = program % tiles
        partial += which * m * n
        c += which * c_batch
        if c0 is not None:
            c0 += which * c0_batch
        if pre is not None:
            pre += which * pre_batch
    row = (program // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (program % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = partial + row[:, None] * n + column[None, :]
    inside = (row < m)[:, None] & (column < n)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for piece in tl.static_range(MOST_PIECES):  # unrolled: all loads are on their way before the first addition
        acc += tl.load(at + piece * slab, mask=inside & (piece < pieces), other=0.0)
    epilogue(
        acc, row, column, c, c0, bias, alpha, beta, m, n, cm, cn, c0m, c0n, bias_n, pre, prem, pren, ACTIVATION, ACC
    )
