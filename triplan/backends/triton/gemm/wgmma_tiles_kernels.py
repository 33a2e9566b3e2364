"""Kernel of ``wgmma_tiles``: a matrix product on Hopper by TMA and ``wgmma``, one tile per program (Gluon).

The same warps load and multiply: a program starts faster than one with a loading warp.
"""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import (
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    next_may_begin,
    previous_wait,
    reinterpret,
    store_wait,
    thread_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triplan.backends.triton.common.rings_kernels import next_slot, tile_of
from triplan.backends.triton.gemm.wgmma_shared_kernels import load_bias, write_tile


@gluon.jit
def load_step(
    a,
    b,
    ring,
    step,
    slot,
    row,
    column,
    wanted,
    A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    """Start loading the operands of one step along k into ``slot`` of the ring, if ``wanted``."""
    sa, sb, full = ring
    ready = full.index(slot)
    depth = step * BLOCK_K
    mbarrier.expect(ready, (BLOCK_M + BLOCK_N) * BLOCK_K * (a.dtype.primitive_bitwidth // 8), pred=wanted)
    if A_ROWS:
        load_tile(a, [row, depth], ready, sa.index(slot), pred=wanted)
    else:
        load_tile(a, [depth, row], ready, sa.index(slot), pred=wanted)
    if B_ROWS:
        load_tile(b, [depth, column], ready, sb.index(slot), pred=wanted)
    else:
        load_tile(b, [column, depth], ready, sb.index(slot), pred=wanted)


@gluon.jit
def wgmma_tiles_kernel(
    a,
    b,
    c,
    c0,
    bias,
    alpha,
    beta,
    c0m,
    m,
    n,
    k,
    group_m,
    A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    C0_EACH: gl.constexpr,
):
    """c = act(alpha * a @ b + beta * c0 + bias), one tile (BLOCK_M, BLOCK_N) per program of BLOCK_M // 16 warps.

    ``a`` (m, k), ``b`` (k, n) and ``c`` (m, n) are tensor maps: f16 or bf16, and ``c`` may be f32; ``bias`` (n,) and
    ``c0`` (m, n), of contiguous rows ``c0m`` apart, are pointers or None; k >= 1. A_ROWS, B_ROWS: A and B are
    row-major; else the maps are those of their transposes.

    The ring is refilled STAGES - 1 steps ahead, so that loads overlap the products.
    """
    sa = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    sb = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    # TMA arrives at these barriers: the async proxy must see them initialised (CUDA programming guide, TMA).
    fence_async_shared()
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[BLOCK_M // 16, 1], instr_shape=[16, BLOCK_N, 16]
    )
    tile_m, tile_n = tile_of(gl.program_id(0), gl.cdiv(m, BLOCK_M), gl.cdiv(n, BLOCK_N), group_m)
    row = tile_m * BLOCK_M
    column = tile_n * BLOCK_N
    steps = gl.cdiv(k, BLOCK_K)
    ring = (sa, sb, full)
    next_may_begin()
    previous_wait()
    for i in gl.static_range(STAGES - 1):
        load_step(a, b, ring, i, i, row, column, i < steps, A_ROWS, B_ROWS, BLOCK_M, BLOCK_N, BLOCK_K)
    HAS_BIAS: gl.constexpr = bias is not None
    result = (c, bias if HAS_BIAS else alpha, alpha, n)
    held = load_bias(result, column, BLOCK_N, BLOCK_M // 16, HAS_BIAS)
    acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
    slot = 0
    phase = 0
    last = STAGES - 1
    for step in range(steps):
        mbarrier.wait(full.index(slot), phase)
        x = sa.index(slot) if A_ROWS else sa.index(slot).permute((1, 0))
        y = sb.index(slot) if B_ROWS else sb.index(slot).permute((1, 0))
        running = warpgroup_mma(x, y, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(running,))
        # Every warp has read slot ``last`` before it is refilled: some may be a step ahead.
        thread_barrier()
        ahead = step + STAGES - 1
        load_step(a, b, ring, ahead, last, row, column, ahead < steps, A_ROWS, B_ROWS, BLOCK_M, BLOCK_N, BLOCK_K)
        last = slot
        slot, phase = next_slot(slot, phase, STAGES)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    thread_barrier()
    # All warps are done with the ring. B's slots now stage the whole tile: no block of columns waits for another.
    PARTS: gl.constexpr = BLOCK_N // c.block_type.shape[1]
    buffers = reinterpret(sb, c.dtype, [PARTS] + c.block_type.shape, c.layout)
    HAS_C0: gl.constexpr = c0 is not None
    added = (c0, beta, c0m, 0, m)
    write_tile(
        acc,
        held,
        result,
        buffers,
        0,
        row,
        column,
        layout,
        None,
        0,
        PARTS,
        HAS_BIAS,
        ACTIVATION,
        added,
        HAS_C0,
        0,
        False,
        C0_EACH,
        BLOCK_M // 16,
    )
    store_wait(0)
