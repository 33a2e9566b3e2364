"""Kernel of ``mma``: a product of f32 as tf32 by ``mma.sync``, one tile of C per program, however the factors lie
(Gluon)."""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import (
    copies_wait,
    gl,
    gluon,
    mma,
    next_may_begin,
    previous_wait,
    thread_barrier,
)
from triplan.backends.triton.common.rings_kernels import tile_of
from triplan.backends.triton.gemm.fma_kernels import epilogue, start_copies

#: Extent along k of the factors that a thread holds at a time, the least that Triton multiplies.
STEP = gl.constexpr(16)
#: Bits of an f32 that tf32 keeps, as a mask.
KEPT = gl.constexpr(-(1 << 13))


@gluon.constexpr_function
def slots_layout(along_k, block_k, operand):
    """Of a block of a factor in shared memory. Fragments are read without conflicts between banks: along k by ldmatrix,
    from eight adjacent lines whose vectors lie in different banks; along C by four rows of k, eight banks apart."""
    order = [1, 0] if (operand == 0) == along_k else [0, 1]
    if along_k:
        return gl.SwizzledSharedLayout(4, max(32 // block_k, 1), min(block_k // 4, 8), order)
    return gl.SwizzledSharedLayout(8, 1, 4, order)


@gluon.constexpr_function
def copies_layout(along_k, vector, block_k, warps, operand):
    """Of the addresses of a block: a warp reads whole lines along k, or adjacent elements along C."""
    if along_k:
        across = min(block_k // vector, 32)
        found = ([1, vector], [32 // across, across], [warps, 1], [1, 0])
    else:
        found = ([vector, 1], [32, 1], [1, warps], [0, 1])
    if operand == 1:
        found = tuple(x[::-1] for x in found[:3]) + ([1 - axis for axis in found[3]],)
    return gl.BlockedLayout(*found)


@gluon.jit
def parts(x):
    """x as a sum of two: what tf32 keeps of it, and the rest."""
    kept = (x.to(gl.int32, bitcast=True) & KEPT).to(gl.float32, bitcast=True)
    return kept, x - kept


@gluon.jit
def mma_kernel(
    a,
    b,
    c,
    c0,
    bias,
    alpha,
    beta,
    products,
    depth,
    columns,
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
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS_M: gl.constexpr,
    WARPS_N: gl.constexpr,
    A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr,
    A_VECTOR: gl.constexpr,
    B_VECTOR: gl.constexpr,
    TWO_PARTS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ACC: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """c = act(alpha * a @ b + beta * c0 + bias), one tile (BLOCK_M, BLOCK_N) per program.

    The operands are those of ``fma_kernel``; A and B are row-major (A_ROWS, B_ROWS) or column-major, read in vectors of
    A_VECTOR and B_VECTOR elements. Partial sums have ``columns`` columns (None: n), zeros behind those of B. With
    TWO_PARTS factors are sums of two parts of tf32, and three products of these are added, small ones first.

    Unlike wgmma, which reads tf32 from shared memory along k alone, ``mma.sync`` takes both factors from registers,
    which any layout fills. Each warp has up to 64 by 64 elements of C: for 32 products of 16 by 8 by 8 it loads 32
    registers.
    """
    if OVERLAPS:
        next_may_begin()
        previous_wait()
    WARPS: gl.constexpr = WARPS_M * WARPS_N
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS_M, WARPS_N], instr_shape=[16, 8]
    )
    of_a: gl.constexpr = gl.DotOperandLayout(0, layout, 1)
    of_b: gl.constexpr = gl.DotOperandLayout(1, layout, 1)
    a_copies: gl.constexpr = copies_layout(A_ROWS, A_VECTOR, BLOCK_K, WARPS, 0)
    b_copies: gl.constexpr = copies_layout(not B_ROWS, B_VECTOR, BLOCK_K, WARPS, 1)
    sa = gl.allocate_shared_memory(a.dtype.element_ty, [STAGES, BLOCK_M, BLOCK_K], slots_layout(A_ROWS, BLOCK_K, 0))
    sb = gl.allocate_shared_memory(b.dtype.element_ty, [STAGES, BLOCK_K, BLOCK_N], slots_layout(not B_ROWS, BLOCK_K, 1))
    tiles_m = gl.cdiv(m, BLOCK_M)
    tiles_n = gl.cdiv(n, BLOCK_N)
    program = gl.program_id(0)
    slab = program // (tiles_m * tiles_n)
    tile_m, tile_n = tile_of(program % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    product = slab
    left = k
    if depth is not None:
        piece = slab
        if products is not None:
            piece = slab // products
            product = slab % products
        first = piece * depth
        a += first.to(gl.int64) * ak
        b += first.to(gl.int64) * bk
        left = gl.minimum(depth, k - first)
        c += slab.to(gl.int64) * c_batch
    if products is not None:
        a += product.to(gl.int64) * a_batch
        b += product.to(gl.int64) * b_batch
        if depth is None:
            c += product.to(gl.int64) * c_batch
        if c0 is not None:
            c0 += product.to(gl.int64) * c0_batch
        if pre is not None:
            pre += product.to(gl.int64) * pre_batch
    top = tile_m.to(gl.int64) * BLOCK_M
    side = tile_n.to(gl.int64) * BLOCK_N

    row = top + gl.arange(0, BLOCK_M, gl.SliceLayout(1, a_copies))
    column = side + gl.arange(0, BLOCK_N, gl.SliceLayout(0, b_copies))
    a_depth = gl.arange(0, BLOCK_K, gl.SliceLayout(0, a_copies))[None, :]
    b_depth = gl.arange(0, BLOCK_K, gl.SliceLayout(1, b_copies))[:, None]
    a_in = (row < m)[:, None]
    b_in = (column < n)[None, :]
    a_at = a + row[:, None] * am + a_depth.to(gl.int64) * ak
    b_at = b + b_depth.to(gl.int64) * bk + column[None, :] * bn
    for i in gl.static_range(STAGES - 1):
        start_copies((a_at, b_at, a_in, b_in, a_depth, b_depth), (sa, sb), i, left - i * BLOCK_K, False)
        a_at += BLOCK_K * ak
        b_at += BLOCK_K * bk
    acc = gl.zeros((BLOCK_M, BLOCK_N), ACC, layout)
    slot = 0
    free = STAGES - 1
    for start in range(0, left, BLOCK_K):
        copies_wait(STAGES - 2)
        # This step has come for every warp, and all are done with the one before, whose slot is filled again.
        thread_barrier()
        ahead = left - start - (STAGES - 1) * BLOCK_K
        start_copies((a_at, b_at, a_in, b_in, a_depth, b_depth), (sa, sb), free, ahead, False)
        a_at += BLOCK_K * ak
        b_at += BLOCK_K * bk
        for i in gl.static_range(BLOCK_K // STEP):
            x = sa.index(slot).slice(i * STEP, STEP, dim=1).load(of_a)
            y = sb.index(slot).slice(i * STEP, STEP, dim=0).load(of_b)
            if TWO_PARTS:
                x, x_rest = parts(x)
                y, y_rest = parts(y)
                acc = mma(x_rest, y, acc, "tf32")
                acc = mma(x, y_rest, acc, "tf32")
            acc = mma(x, y, acc, "tf32")
        free = slot
        slot = gl.where(slot + 1 == STAGES, 0, slot + 1)
    copies_wait(0)
    row = top + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    column = side + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    if columns is not None:
        n = columns
    epilogue(
        acc, row, column, c, c0, bias, alpha, beta, m, n, cm, cn, c0m, c0n, bias_n, pre, prem, pren, ACTIVATION, ACC
    )
