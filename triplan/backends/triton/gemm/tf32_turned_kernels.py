"""Kernel of ``tf32_turned``: a product of tf32 by ``wgmma``, one tile of C per program, whose factors may lie along C
(Gluon)."""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import (
    copies_committed,
    copies_wait,
    copy_block,
    fence_async_shared,
    gl,
    gluon,
    next_may_begin,
    previous_wait,
    thread_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triplan.backends.triton.common.rings_kernels import tile_of
from triplan.backends.triton.gemm import tiles_kernels

#: The epilogue of ``tiles``, compiled as Gluon.
epilogue = gluon.jit(tiles_kernels.epilogue.fn)


@gluon.constexpr_function
def passing_layout(width, warps):
    """Of a block (width, 32) of Y that lies along C: each thread loads vectors of four elements along C, four of them
    adjacent along k, and stores vectors along k. Eight threads store a row of shared memory, or 32 banks."""
    waves = [[1 << i, 0] for i in range(4, width.bit_length() - 1)]
    inner = warps.bit_length() - 1
    own = [[1, 0], [2, 0], [0, 1], [0, 2], *waves[inner:]]
    return gl.DistributedLinearLayout(own, [[0, 4], [0, 8], [0, 16], [4, 0], [8, 0]], waves[:inner], [], [width, 32])


@gluon.jit
def start_copies(factors, ring, slot, left, Y_HELD: gl.constexpr):
    """Start to copy the blocks of that step into ``slot`` of the ring; not of a Y that passes through registers."""
    x_at, y_at, x_in, y_in, x_depth, y_depth = factors
    sx, sy = ring
    copy_block(sx.index(slot), x_at, mask=x_in & (x_depth < left))
    if not Y_HELD:
        copy_block(sy.index(slot), y_at, mask=y_in & (y_depth < left))
    copies_committed()


@gluon.jit
def tf32_turned_kernel(
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
    WARPS: gl.constexpr,
    X_IS_B: gl.constexpr,
    Y_HELD: gl.constexpr,
    X_VECTOR: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ACC: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """c = act(alpha * a @ b + beta * c0 + bias), one tile (BLOCK_M, BLOCK_N) per program.

    The operands are those of ``fma_kernel``; partial sums have ``columns`` columns (None: n), zeros behind those of B.
    wgmma reads its first factor from registers, which may come from any
    layout, and its second one from shared memory, where tf32 lies along k. The first is X: A, or the transpose of B
    (X_IS_B), and lies along C. The second is Y, the other one: it lies along k, or along C (Y_HELD), and is transposed
    in registers then. BLOCK_K is 32: rows of 128 bytes.
    """
    if OVERLAPS:
        next_may_begin()
        previous_wait()
    if X_IS_B:
        BLOCK_X: gl.constexpr = BLOCK_N
        BLOCK_Y: gl.constexpr = BLOCK_M
    else:
        BLOCK_X: gl.constexpr = BLOCK_M
        BLOCK_Y: gl.constexpr = BLOCK_N
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_Y, 8]
    )
    held: gl.constexpr = gl.DotOperandLayout(0, layout, 1)
    # The four threads of a fragment's row read rows of shared memory that begin eight banks apart.
    x_shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [0, 1])
    y_shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    sx = gl.allocate_shared_memory(a.dtype.element_ty, [STAGES, BLOCK_X, BLOCK_K], x_shared)
    sy = gl.allocate_shared_memory(b.dtype.element_ty, [STAGES, BLOCK_Y, BLOCK_K], y_shared)
    x_copies: gl.constexpr = gl.BlockedLayout([X_VECTOR, 1], [32, 1], [1, WARPS], [0, 1])
    if Y_HELD:
        y_copies: gl.constexpr = passing_layout(BLOCK_Y, WARPS)
    else:
        y_copies: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
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

    x_line = gl.arange(0, BLOCK_X, gl.SliceLayout(1, x_copies))
    y_line = gl.arange(0, BLOCK_Y, gl.SliceLayout(1, y_copies))
    x_depth = gl.arange(0, BLOCK_K, gl.SliceLayout(0, x_copies))[None, :]
    y_depth = gl.arange(0, BLOCK_K, gl.SliceLayout(0, y_copies))[None, :]
    if X_IS_B:
        x_in = (side + x_line < n)[:, None]
        y_in = (top + y_line < m)[:, None]
        x_at = b + (side + x_line)[:, None] * bn + x_depth.to(gl.int64) * bk
        y_at = a + (top + y_line)[:, None] * am + y_depth.to(gl.int64) * ak
        x_step = BLOCK_K * bk
        y_step = BLOCK_K * ak
    else:
        x_in = (top + x_line < m)[:, None]
        y_in = (side + y_line < n)[:, None]
        x_at = a + (top + x_line)[:, None] * am + x_depth.to(gl.int64) * ak
        y_at = b + (side + y_line)[:, None] * bn + y_depth.to(gl.int64) * bk
        x_step = BLOCK_K * ak
        y_step = BLOCK_K * bk
    for i in gl.static_range(STAGES - 1):
        ahead = left - i * BLOCK_K
        start_copies((x_at, y_at, x_in, y_in, x_depth, y_depth), (sx, sy), i, ahead, Y_HELD)
        if Y_HELD:
            sy.index(i).store(gl.load(y_at, mask=y_in & (y_depth < ahead), other=0.0))
        x_at += x_step
        y_at += y_step
    acc = gl.zeros((BLOCK_X, BLOCK_Y), ACC, layout)
    slot = 0
    free = STAGES - 1
    for start in range(0, left, BLOCK_K):
        copies_wait(STAGES - 2)
        if Y_HELD:
            # wgmma reads shared memory by the async proxy: it must see what threads have stored.
            fence_async_shared()
        # This step has come for every warp, and all are done with the one before, whose slot is filled again.
        thread_barrier()
        x = sx.index(slot).load(held)
        running = warpgroup_mma(x, sy.index(slot).permute((1, 0)), acc, is_async=True)
        ahead = left - start - (STAGES - 1) * BLOCK_K
        if Y_HELD:
            passing = gl.load(y_at, mask=y_in & (y_depth < ahead), other=0.0)
        start_copies((x_at, y_at, x_in, y_in, x_depth, y_depth), (sx, sy), free, ahead, Y_HELD)
        x_at += x_step
        y_at += y_step
        acc, x = warpgroup_mma_wait(num_outstanding=0, deps=(running, x))
        if Y_HELD:
            sy.index(free).store(passing)
        free = slot
        slot = gl.where(slot + 1 == STAGES, 0, slot + 1)
    copies_wait(0)
    if X_IS_B:
        found = acc.permute((1, 0))
    else:
        found = acc
    stored: gl.constexpr = found.type.layout
    row = top + gl.arange(0, BLOCK_M, gl.SliceLayout(1, stored))
    column = side + gl.arange(0, BLOCK_N, gl.SliceLayout(0, stored))
    if columns is not None:
        n = columns
    epilogue(
        found, row, column, c, c0, bias, alpha, beta, m, n, cm, cn, c0m, c0n, bias_n, pre, prem, pren, ACTIVATION, ACC
    )
