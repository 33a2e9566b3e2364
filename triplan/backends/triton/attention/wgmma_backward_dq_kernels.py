"""Kernel of ``wgmma`` of the backward op that computes dq; see ``wgmma_backward_kernels``."""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import (
    fence_async_shared,
    gl,
    gluon,
    load_tile as load_block,
    mbarrier,
    store_tile as store_block,
    store_wait,
    thread_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triplan.backends.triton.attention.wgmma_shared_kernels import LN_2, LOG2_E, ROWS, numbered_tile
from triplan.backends.triton.common.rings_kernels import matrix, next_slot

#: Rows of a tile, and keys of a block.
TILE = gl.constexpr(128)


@gluon.jit
def query_tile(index, sizes, CAUSAL: gl.constexpr):
    """(first row, blocks of keys, query head) of tile number ``index``, the longest tiles of a section first.

    Heads are numbered over the whole batch. ``sizes``: tiles of rows, query heads of the batch, heads of a section,
    heads of a sequence, query heads per key head, keys, position of row 0, ``turning`` of ``numbered_tile``.
    """
    tiles, heads, section, _, _, keys, shift, turning = sizes
    tile, head = numbered_tile(index, tiles, heads, section, turning)
    row = (tiles - 1 - tile) * TILE
    if CAUSAL:
        keys = gl.maximum(gl.minimum(keys, row + TILE + shift), 0)
    return row, gl.cdiv(keys, TILE), head


@gluon.jit
def load_out(out, at, turn, ring, WIDTH: gl.constexpr):
    """Load the forward's result for the rows of a tile."""
    _, _, _, _, sout, _, _, _, out_full, out_empty, _, _, _, _ = ring
    batch, row, member = at
    for w in gl.static_range(2):
        mbarrier.wait(out_empty.index(w), (turn & 1) ^ 1)
        mbarrier.expect(out_full.index(w), ROWS * WIDTH * 2)
        load_block(out, [batch, row + w * ROWS, member, 0], out_full.index(w), sout.index(w))


@gluon.jit
def load_dq(q, k, v, out, dout, ring, sizes, WIDTH: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    """The loading warp: loads Q, dout and out of each tile, and K and V block after block into the ring."""
    sq, so, sk, sv, _, _, q_full, q_empty, _, _, k_full, k_empty, v_full, v_empty = ring
    tiles, heads, _, of_sequence, group, _, _, _ = sizes
    slot = 0
    phase = 1
    turn = 0
    for index in range(gl.program_id(0), tiles * heads, gl.num_programs(0)):
        row, n, head = query_tile(index, sizes, CAUSAL)
        batch = head // of_sequence
        member = head % of_sequence
        for w in gl.static_range(2):
            mbarrier.wait(q_empty.index(w), (turn & 1) ^ 1)
            mbarrier.expect(q_full.index(w), 2 * ROWS * WIDTH * 2)
            load_block(q, [batch, row + w * ROWS, member, 0], q_full.index(w), sq.index(w))
            load_block(dout, [batch, row + w * ROWS, member, 0], q_full.index(w), so.index(w))
        for i in range(n):
            key = (n - 1 - i) * TILE
            mbarrier.wait(k_empty.index(slot), phase)
            mbarrier.expect(k_full.index(slot), TILE * WIDTH * 2)
            load_block(k, [batch, key, member // group, 0], k_full.index(slot), sk.index(slot))
            mbarrier.wait(v_empty.index(slot), phase)
            mbarrier.expect(v_full.index(slot), TILE * WIDTH * 2)
            load_block(v, [batch, key, member // group, 0], v_full.index(slot), sv.index(slot))
            slot, phase = next_slot(slot, phase, STAGES)
            if i == 0:  # not earlier, because it may have to wait until the last tile's dq has left
                load_out(out, (batch, row, member), turn, ring, WIDTH)
        if n == 0:
            load_out(out, (batch, row, member), turn, ring, WIDTH)
        turn += 1


@gluon.jit
def step_dq(
    dq,
    of_lse,
    of_delta,
    ring,
    scale,
    slot,
    phase,
    position,
    key,
    keys,
    last,
    WHICH: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    MASK: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """One block of keys: dq += ds @ k for 64 rows. ``last``: it is the tile's last, so Q and dout are free after it."""
    sq, so, sk, sv, _, _, _, q_empty, _, _, k_full, k_empty, v_full, v_empty = ring
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    ks = matrix(sk.index(slot), TILE, WIDTH)
    vs = matrix(sv.index(slot), TILE, WIDTH)
    mbarrier.wait(k_full.index(slot), phase)
    s = gl.zeros((ROWS, TILE), gl.float32, S)
    s = warpgroup_mma(matrix(sq.index(WHICH), ROWS, WIDTH), ks.permute((1, 0)), s, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(slot), phase)
    dp = gl.zeros((ROWS, TILE), gl.float32, S)
    dp = warpgroup_mma(matrix(so.index(WHICH), ROWS, WIDTH), vs.permute((1, 0)), dp, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    x = gl.exp2(s * scale - of_lse[:, None])
    if MASK:
        # Keys beyond the last must be masked: their scores are 0, and exp2(0 - lse2) may overflow.
        limit = gl.full([ROWS], 0, gl.int32, layout=gl.SliceLayout(1, S)) + (keys - key)
        if CAUSAL:
            limit = gl.minimum(limit, gl.arange(0, ROWS, layout=gl.SliceLayout(1, S)) + (position - key + 1))
        columns = gl.arange(0, TILE, layout=gl.SliceLayout(0, S))
        x = gl.where(columns[None, :] < limit[:, None], x, 0.0)
    dp, x = warpgroup_mma_wait(0, deps=(dp, x))
    mbarrier.arrive(v_empty.index(slot), count=1)
    if last:
        mbarrier.arrive(q_empty.index(WHICH), count=1)
    y = (x * (dp - of_delta[:, None])).to(ks.dtype)
    dq = warpgroup_mma(gl.convert_layout(y, gl.DotOperandLayout(0, A, 2)), ks, dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    mbarrier.arrive(k_empty.index(slot), count=1)
    slot, phase = next_slot(slot, phase, STAGES)
    return dq, slot, phase


@gluon.jit
def multiply_dq(
    dq_map,
    lse,
    lse2,
    delta,
    scale,
    queries,
    ring,
    sizes,
    WHICH: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """A multiplying warpgroup: dq of 64 rows of each of this program's tiles, over all keys that they see; first their
    lse2 and delta, which are written for the launch for dk and dv as well."""
    _, so, _, _, sout, sdq, q_full, q_empty, out_full, out_empty, _, _, _, _ = ring
    tiles, heads, _, of_sequence, _, keys, shift, _ = sizes
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    turn = 0
    for index in range(gl.program_id(0), tiles * heads, gl.num_programs(0)):
        first, n, head = query_tile(index, sizes, CAUSAL)
        row = first + WHICH * ROWS
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
        of_lse = gl.load(lse + head.to(gl.int64) * queries + rows, mask=rows < queries, other=-float("inf"))
        of_lse = gl.where(of_lse == -float("inf"), float("inf"), of_lse * LOG2_E)
        gl.store(lse2 + head * tiles * TILE + rows, of_lse)
        mbarrier.wait(q_full.index(WHICH), turn & 1)
        mbarrier.wait(out_full.index(WHICH), turn & 1)
        x = matrix(so.index(WHICH), ROWS, WIDTH).load(A).to(gl.float32)
        x *= matrix(sout.index(WHICH), ROWS, WIDTH).load(A).to(gl.float32)
        of_delta = gl.convert_layout(gl.sum(x, 1), gl.SliceLayout(1, S))
        gl.store(delta + head * tiles * TILE + rows, of_delta)
        if WIDTH == 64:
            mbarrier.arrive(out_empty.index(WHICH), count=1)
        dq = gl.zeros((ROWS, WIDTH), gl.float32, A)
        plain = gl.minimum(n, keys // TILE)
        if CAUSAL:
            plain = gl.minimum(plain, gl.maximum(row + shift + 1, 0) // TILE)
        for i in range(n - plain):
            dq, slot, phase = step_dq(
                dq,
                of_lse,
                of_delta,
                ring,
                scale,
                slot,
                phase,
                row + shift,
                (n - 1 - i) * TILE,
                keys,
                i + 1 == n,
                WHICH,
                WIDTH,
                STAGES,
                True,
                CAUSAL,
            )
        for i in range(plain):
            last = i + 1 == plain
            dq, slot, phase = step_dq(
                dq, of_lse, of_delta, ring, scale, slot, phase, 0, 0, 0, last, WHICH, WIDTH, STAGES, False, CAUSAL
            )
        if n == 0:
            mbarrier.arrive(q_empty.index(WHICH), count=1)
        store_wait(0)
        thread_barrier()
        matrix(sdq.index(WHICH), ROWS, WIDTH).store((dq * scale * LN_2).to(dq_map.dtype))
        fence_async_shared()
        thread_barrier()
        store_block(dq_map, [head // of_sequence, row, head % of_sequence, 0], sdq.index(WHICH))
        if WIDTH == 128:
            store_wait(0)
            mbarrier.arrive(out_empty.index(WHICH), count=1)
        turn += 1
    store_wait(0)


@gluon.jit
def attention_wgmma_dq_kernel(
    q,
    k,
    v,
    out,
    dout,
    dq,
    lse,
    lse2,
    delta,
    scale,
    queries,
    tiles,
    heads,
    section,
    of_sequence,
    group,
    keys,
    shift,
    turning,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """dq = scale * ds @ k in tiles of 128 rows; delta = sum(dout * out) and lse2 = lse / ln(2) of each row.

    Operands as in ``attention_wgmma_dkdv_kernel``, K and V in blocks of 128 rows. ``lse``: (batch, head, ``queries``)
    of f32, packed. lse2, delta: (batch * heads, ``tiles`` * 128) of f32; rows beyond the queries get +inf and 0, and
    lse2 is +inf also where a query sees no key. ``tiles`` to ``turning``: see ``query_tile``.
    """
    sq = gl.allocate_shared_memory(q.dtype, [2] + q.block_type.shape, q.layout)
    so = gl.allocate_shared_memory(q.dtype, [2] + q.block_type.shape, q.layout)
    sk = gl.allocate_shared_memory(k.dtype, [STAGES] + k.block_type.shape, k.layout)
    sv = gl.allocate_shared_memory(v.dtype, [STAGES] + v.block_type.shape, v.layout)
    sdq = gl.allocate_shared_memory(dq.dtype, [2] + dq.block_type.shape, dq.layout)
    sout = sdq  # at width 128 both do not fit
    if WIDTH == 64:
        sout = gl.allocate_shared_memory(out.dtype, [2] + out.block_type.shape, out.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    out_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    out_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(out_full.index(i), count=1)
        mbarrier.init(out_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    ring = (sq, so, sk, sv, sout, sdq, q_full, q_empty, out_full, out_empty, k_full, k_empty, v_full, v_empty)
    sizes = (tiles, heads, section, of_sequence, group, keys, shift, turning)
    scale = scale * LOG2_E
    gl.warp_specialize(
        [
            (multiply_dq, (dq, lse, lse2, delta, scale, queries, ring, sizes, 0, WIDTH, STAGES, CAUSAL)),
            (multiply_dq, (dq, lse, lse2, delta, scale, queries, ring, sizes, 1, WIDTH, STAGES, CAUSAL)),
            (load_dq, (q, k, v, out, dout, ring, sizes, WIDTH, STAGES, CAUSAL)),
        ],
        [4, 1],  # warps of the second and the third partition
        [240, 24],  # registers per thread there
    )
