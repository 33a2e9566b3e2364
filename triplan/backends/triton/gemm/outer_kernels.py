"""Kernel of ``outer``: products of few columns by few rows, or of few rows, by multiply-adds."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.gemm.tiles_kernels import epilogue


@jit
def add_outer(acc, a, b, row, column, m, n, k, am, ak, bk, bn, STEP_K: tl.constexpr, ACC: tl.constexpr):
    """acc + (A @ B)[row, column] over the first STEP_K of k.

    The loop is unrolled, so that all loads are in flight before the first multiplication.
    """
    for p in tl.static_range(STEP_K):
        left = tl.load(a + row * am + p * ak, mask=(row < m) & (p < k), other=0.0).to(ACC)
        right = tl.load(b + p * bk + column * bn, mask=(column < n) & (p < k), other=0.0).to(ACC)
        acc += left[:, None] * right[None, :]
    return acc


@jit
def outer_kernel(
    a,
    b,
    c,
    c0,
    bias,
    alpha,
    beta,
    m,
    n,
    k,
    am,
    ak,
    bk,
    bn,
    cm,
    cn,
    c0m,
    c0n,
    bias_n,
    pre,
    prem,
    pren,
    a_batch,
    b_batch,
    c_batch,
    c0_batch,
    pre_batch,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP_K: tl.constexpr,
    LOOPS: tl.constexpr,
    ACC: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """c = act(alpha * a @ b + beta * c0 + bias), one tile (BLOCK_M, BLOCK_N) per program.

    The arguments are those of ``tiles_kernel``. STEP_K: how much of k is loaded at a time; if not LOOPS that is all of
    k, rounded up to a power of two.
    """
    begin(OVERLAPS)
    program = tl.program_id(0)
    tiles_n = tl.cdiv(n, BLOCK_N)
    if c_batch is not None:
        tiles = tl.cdiv(m, BLOCK_M) * tiles_n
        product = (program // tiles).to(tl.int64)
        program = program % tiles
        a += product * a_batch
        b += product * b_batch
        c += product * c_batch
        if c0 is not None:
            c0 += product * c0_batch
        if pre is not None:
            pre += product * pre_batch
    row = (program // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (program % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    if LOOPS:
        for start in range(0, k, STEP_K):
            acc = add_outer(acc, a, b, row, column, m, n, k - start, am, ak, bk, bn, STEP_K, ACC)
            a += STEP_K * ak
            b += STEP_K * bk
    else:
        acc = add_outer(acc, a, b, row, column, m, n, k, am, ak, bk, bn, STEP_K, ACC)
    epilogue(
        acc, row, column, c, c0, bias, alpha, beta, m, n, cm, cn, c0m, c0n, bias_n, pre, prem, pren, ACTIVATION, ACC
    )
