"""Kernels of ``gemv``: a matrix times a vector, by multiply-adds in the accumulator's element, without tensor cores."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.gemm.tiles_kernels import epilogue


@jit
def dots(x, y, row, rows, first, end, xr, xk, yk, DEPTH: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr):
    """The sums of x[row, p] * y[p] over first <= p < end, in element ACC: (ROWS,).

    ``x`` (rows, k) has strides ``xr`` and ``xk``, ``y`` (k,) has stride ``yk``; ``row`` (ROWS,) is i64. Each thread
    accumulates columns of its own, and the threads are summed at the end.
    """
    depth = first + tl.arange(0, DEPTH)
    acc = tl.zeros((ROWS, DEPTH), ACC)
    for start in range(first, end, DEPTH):
        at = (depth + (start - first)).to(tl.int64)
        inside = (row < rows)[:, None] & (at < end)[None, :]
        left = tl.load(x + row[:, None] * xr + at[None, :] * xk, mask=inside, other=0.0)
        right = tl.load(y + at * yk, mask=at < end, other=0.0)
        acc += left.to(ACC) * right.to(ACC)[None, :]
    return tl.sum(acc, 1)


@jit
def gemv_kernel(
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
    xr,
    xk,
    yk,
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
    ONE_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    ACC: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """c = act(alpha * x @ y + beta * c0 + bias), ROWS elements of c per program.

    ``x`` (rows, k) and ``y`` (k,); ``c``, ``c0`` and ``pre`` (m, n), of which one extent is 1: m if ONE_ROW, and n is
    ``rows``; else n, and m is ``rows``. The other arguments are those of ``tiles_kernel``.
    """
    begin(OVERLAPS)
    rows = n if ONE_ROW else m
    program = tl.program_id(0)
    if c_batch is not None:
        blocks = tl.cdiv(rows, ROWS)
        product = (program // blocks).to(tl.int64)
        program = program % blocks
        x += product * x_batch
        y += product * y_batch
        c += product * c_batch
        if c0 is not None:
            c0 += product * c0_batch
        if pre is not None:
            pre += product * pre_batch
    row = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    acc = dots(x, y, row, rows, 0, k, xr, xk, yk, DEPTH, ROWS, ACC)
    only = tl.arange(0, 1).to(tl.int64)
    if ONE_ROW:
        epilogue(
            acc[None, :], only, row, c, c0, bias, alpha, beta, m, n, cm, cn, c0m, c0n, bias_n, pre, prem, pren,
            ACTIVATION, ACC,
        )  # fmt: skip
    else:
        epilogue(
            acc[:, None], row, only, c, c0, bias, alpha, beta, m, n, cm, cn, c0m, c0n, bias_n, pre, prem, pren,
            ACTIVATION, ACC,
        )  # fmt: skip


@jit
def gemv_pieces_kernel(
    x,
    y,
    partial,
    products,
    depth,
    rows,
    k,
    xr,
    xk,
    yk,
    x_batch,
    y_batch,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    ACC: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """partial[s, i] = x[i][:, piece s] @ y[i][piece s], where piece s is s * depth <= p < (s + 1) * depth.

    ``x`` (products, rows, k) and ``y`` (products, k); ``partial`` (pieces, products, rows) is packed and of element
    ACC; ``depth`` is a multiple of DEPTH. ``products``, ``x_batch`` and ``y_batch`` are None without a batch.
    """
    begin(OVERLAPS)
    program = tl.program_id(0)
    blocks = tl.cdiv(rows, ROWS)
    slab = program // blocks
    piece = slab
    if products is not None:
        piece = slab // products
        product = (slab % products).to(tl.int64)
        x += product * x_batch
        y += product * y_batch
    row = (program % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = piece.to(k.dtype) * depth
    end = first + tl.minimum(depth, k - first)  # first + depth may be 2**31
    acc = dots(x, y, row, rows, first, end, xr, xk, yk, DEPTH, ROWS, ACC)
    tl.store(partial + slab.to(tl.int64) * rows + row, acc, mask=row < rows)
