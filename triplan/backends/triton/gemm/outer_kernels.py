"""Kernels of ``outer``: products of few columns by few rows, or of few rows by any, by multiply-adds."""

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


@jit
def add_streamed(
    accs, x, y, inside, first, k, xk, yk, yr, STEP_K: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr
):
    """Each of ``accs`` (one for each row of y) + y[its row, p] * x[p], over STEP_K of k from ``first`` on.

    ``x`` and ``y`` point at ``first``. WHOLE: all STEP_K lie before k. The loops are unrolled: all loads of x are in
    flight before the first multiplication.
    """
    columns = ()
    for p in tl.static_range(STEP_K):
        there = inside if WHOLE else inside & (first + p < k)
        columns += (tl.load(x + p * xk, mask=there, other=0.0).to(ACC),)
    for p in tl.static_range(STEP_K):
        found = ()
        for r in tl.static_range(len(accs)):
            factor = tl.load(y + r * yr + p * yk, mask=WHOLE or first + p < k, other=0.0).to(ACC)
            found += (tl.fma(columns[p], factor, accs[r]),)
        accs = found
    return accs


@jit
def streamed_kernel(
    x,
    y,
    c,
    c0,
    bias,
    alpha,
    beta,
    m,
    n,
    k,
    xk,
    yk,
    yr,
    cm,
    cn,
    c0m,
    c0n,
    bias_n,
    pre,
    prem,
    pren,
    x_batch,
    y_batch,
    c_batch,
    c0_batch,
    pre_batch,
    FEW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP_K: tl.constexpr,
    ACC: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """c = act(alpha * y @ x + beta * c0 + bias) of FEW rows, BLOCK columns per program; not ROWS: its transpose.

    ``x`` (k, columns), contiguous along columns, is read once; ``y`` (FEW, k). If ROWS, y is A and x is B; else x is
    A, transposed, and y is B, transposed. The other arguments are those of ``tiles_kernel``. Each thread has all
    results of its columns, so nothing is exchanged.
    """
    begin(OVERLAPS)
    program = tl.program_id(0)
    columns = n if ROWS else m
    if c_batch is not None:
        blocks = tl.cdiv(columns, BLOCK)
        product = (program // blocks).to(tl.int64)
        program = program % blocks
        x += product * x_batch
        y += product * y_batch
        c += product * c_batch
        if c0 is not None:
            c0 += product * c0_batch
        if pre is not None:
            pre += product * pre_batch
    column = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    accs = ()
    for _ in tl.static_range(FEW):
        accs += (tl.zeros((BLOCK,), ACC),)
    at = x + column
    whole = k // STEP_K * STEP_K
    for start in range(0, whole, STEP_K):
        accs = add_streamed(accs, at, y, inside, start, k, xk, yk, yr, STEP_K, True, ACC)
        at += STEP_K * xk
        y += STEP_K * yk
    accs = add_streamed(accs, at, y, inside, whole, k, xk, yk, yr, STEP_K, False, ACC)
    only = tl.arange(0, 1).to(tl.int64)
    for r in tl.static_range(FEW):
        if ROWS:
            epilogue(
                accs[r][None, :], only + r, column, c, c0, bias, alpha, beta, m, n, cm, cn, c0m, c0n, bias_n, pre,
                prem, pren, ACTIVATION, ACC,
            )  # fmt: skip
        else:
            epilogue(
                accs[r][:, None], column, only + r, c, c0, bias, alpha, beta, m, n, cm, cn, c0m, c0n, bias_n, pre,
                prem, pren, ACTIVATION, ACC,
            )  # fmt: skip
