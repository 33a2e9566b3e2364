"""Kernels of ``tiles``: one tile of C per program, read through pointers at any strides and extents.

Loads are masked, so no extent has to be a multiple of a block. Triton's pipeliner turns the loads of the loop into
``cp.async`` copies, ``num_stages`` deep. The product becomes ``wgmma`` on sm90a in tiles of at least 64 rows, except
f64; else ``mma.sync``; f32 that is not multiplied as tf32 becomes FMAs.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit

# --- activations, applied in the accumulator ---


@jit
def identity(x):
    """x."""
    return x


@jit
def relu(x):
    """max(x, 0)."""
    return tl.where(x < 0, 0, x)  # NaN stays NaN: comparisons with it are false


@jit
def gelu(x):
    """x * Phi(x), with Phi the normal distribution function, by erf."""
    return x * 0.5 * (1 + tl.erf(x * 0.7071067811865476))


@jit
def silu(x):
    """x / (1 + exp(-x))."""
    return x / (1 + tl.exp(-x))


# --- tiles ---


@jit
def tile_of(program, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """The (row, column) of a program's tile among ``tiles_m`` by ``tiles_n`` tiles.

    Programs take GROUP_M rows of tiles at a time, column by column, so that those that run together share rows of A and
    columns of B in the L2 cache.
    """
    in_group = GROUP_M * tiles_n
    group = program // in_group
    first = group * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    within = program % in_group
    return first + within % height, within // height


@jit
def epilogue(
    acc,
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
    ACTIVATION: tl.constexpr,
    ACC: tl.constexpr,
):
    """c[row, column] = act(alpha * acc + beta * c0[row, column] + bias[column]), rounded once to c's element.

    ``acc`` (BLOCK_M, BLOCK_N) is of element ACC; ``row`` (BLOCK_M,) and ``column`` (BLOCK_N,) are i64; ``c``, ``c0``
    and ``pre`` (m, n) have strides ``cm``, ``cn`` and so on, ``bias`` (n,) has stride ``bias_n``. ``c0``, ``bias`` and
    ``pre`` may be None. ``pre`` receives the argument of the activation.

    C may be C0: every stored value depends on the value that was loaded from its address, so no thread stores before
    that load is done.
    """
    inside = (row < m)[:, None] & (column < n)[None, :]
    value = acc * alpha
    if c0 is not None:
        # With beta = 0 the load is masked off: NaN in c0 must not reach the result.
        at = c0 + row[:, None] * c0m + column[None, :] * c0n
        value += tl.load(at, mask=inside & (beta != 0), other=0.0).to(ACC) * beta
    if bias is not None:
        value += tl.load(bias + column * bias_n, mask=column < n, other=0.0).to(ACC)[None, :]
    if pre is not None:
        tl.store(pre + row[:, None] * prem + column[None, :] * pren, value.to(pre.dtype.element_ty), mask=inside)
    value = ACTIVATION(value)
    tl.store(c + row[:, None] * cm + column[None, :] * cn, value.to(c.dtype.element_ty), mask=inside)


# --- the product ---


@jit
def product_of(
    a,
    b,
    row,
    column,
    m,
    n,
    k,
    am,
    ak,
    bk,
    bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE_K: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """(A @ B)[row, column] in element ACC, not rounded: a block (BLOCK_M, BLOCK_N).

    ``a`` (m, k) and ``b`` (k, n) have strides ``am``, ``ak``, ``bk``, ``bn``. WHOLE_K: k is a multiple of BLOCK_K, so
    that only rows and columns need masks.
    """
    depth = tl.arange(0, BLOCK_K).to(tl.int64)
    a_at = a + row[:, None] * am + depth[None, :] * ak
    b_at = b + depth[:, None] * bk + column[None, :] * bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for start in range(0, k, BLOCK_K):
        if WHOLE_K:
            a_in = (row < m)[:, None]
            b_in = (column < n)[None, :]
        else:
            a_in = (row < m)[:, None] & (depth < k - start)[None, :]
            b_in = (depth < k - start)[:, None] & (column < n)[None, :]
        x = tl.load(a_at, mask=a_in, other=0.0)
        y = tl.load(b_at, mask=b_in, other=0.0)
        acc = tl.dot(x, y, acc, input_precision=PRECISION, out_dtype=ACC)
        a_at += BLOCK_K * ak
        b_at += BLOCK_K * bk
    return acc


@jit
def tiles_kernel(
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
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    WHOLE_K: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """c = act(alpha * a @ b + beta * c0 + bias), one tile (BLOCK_M, BLOCK_N) per program.

    ``a`` (m, k) and ``b`` (k, n); ``c``, ``c0`` and ``pre`` (m, n); ``bias`` (n,); ``alpha`` and ``beta`` scalars of
    element ACC. ``xy`` is the stride of matrix x along axis y, ``x_batch`` its stride from one product to the next;
    without a batch these are None.
    """
    program = tl.program_id(0)
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    if c_batch is not None:
        product = (program // (tiles_m * tiles_n)).to(tl.int64)
        program = program % (tiles_m * tiles_n)
        a += product * a_batch
        b += product * b_batch
        c += product * c_batch
        if c0 is not None:
            c0 += product * c0_batch
        if pre is not None:
            pre += product * pre_batch
    tile_m, tile_n = tile_of(program, tiles_m, tiles_n, GROUP_M)
    row = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = product_of(a, b, row, column, m, n, k, am, ak, bk, bn, BLOCK_M, BLOCK_N, BLOCK_K, WHOLE_K, PRECISION, ACC)
    epilogue(
        acc, row, column, c, c0, bias, alpha, beta, m, n, cm, cn, c0m, c0n, bias_n, pre, prem, pren, ACTIVATION, ACC
    )
