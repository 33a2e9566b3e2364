"""Kernel of ``mma``: partial products of f32 as tf32 by ``mma.sync``, of factors that lie along C (Gluon)."""

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
from triplan.backends.triton.gemm.fma_kernels import piece_of, start_copies

#: Extent along k of the factors that a thread holds at a time, the least that Triton multiplies.
STEP = gl.constexpr(16)
#: Rows and columns of C for a warp.
WARP = gl.constexpr(64)


@gluon.jit
def mma_kernel(
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
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    A_VECTOR: gl.constexpr,
    B_VECTOR: gl.constexpr,
    ACC: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """The partial sums of ``split_kernel``, whose operands these are; A is column-major and B row-major, copied in
    vectors of A_VECTOR and B_VECTOR elements.

    Unlike wgmma, which reads tf32 from shared memory along k alone, ``mma.sync`` takes both factors from registers. A
    warp has 64 by 64 elements of C: for 32 products of 16 by 8 by 8, each thread loads 32 elements.
    """
    if OVERLAPS:
        next_may_begin()
        previous_wait()
    WARPS: gl.constexpr = BLOCK_M * BLOCK_N // (WARP * WARP)
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[BLOCK_M // WARP, BLOCK_N // WARP], instr_shape=[16, 8]
    )
    # A warp copies adjacent elements along C.
    a_copies: gl.constexpr = gl.BlockedLayout([A_VECTOR, 1], [32, 1], [1, WARPS], [0, 1])
    b_copies: gl.constexpr = gl.BlockedLayout([1, B_VECTOR], [1, 32], [WARPS, 1], [1, 0])
    # It reads four rows of k at a time, eight banks apart.
    sa = gl.allocate_shared_memory(
        a.dtype.element_ty, [STAGES, BLOCK_M, BLOCK_K], gl.SwizzledSharedLayout(8, 1, 4, [0, 1])
    )
    sb = gl.allocate_shared_memory(
        b.dtype.element_ty, [STAGES, BLOCK_K, BLOCK_N], gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    )
    if leading is None:
        leading = n
    tiles_m = gl.cdiv(m, BLOCK_M)
    tiles_n = gl.cdiv(n, BLOCK_N)
    program = gl.program_id(0)
    slab = program // (tiles_m * tiles_n)
    tile_m, tile_n = tile_of(program % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    a, b, left, _ = piece_of(a, b, slab, products, depth, k, ak, bk, a_batch, b_batch)
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
            x = sa.index(slot).slice(i * STEP, STEP, dim=1).load(gl.DotOperandLayout(0, layout, 1))
            y = sb.index(slot).slice(i * STEP, STEP, dim=0).load(gl.DotOperandLayout(1, layout, 1))
            acc = mma(x, y, acc, "tf32")
        free = slot
        slot = gl.where(slot + 1 == STAGES, 0, slot + 1)
    copies_wait(0)
    row = top + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    column = side + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    at = partial + (slab.to(gl.int64) * m + row)[:, None] * leading + column[None, :]
    gl.store(at, acc, mask=(row < m)[:, None] & (column < leading)[None, :])
