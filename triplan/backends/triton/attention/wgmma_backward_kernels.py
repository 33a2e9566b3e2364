"""Kernels of ``wgmma`` of the backward op: gradients of attention on Hopper (Gluon), persistent and warp-specialised.

``attention_wgmma_dq_kernel`` (``wgmma_backward_dq_kernels``) computes dq, lse2 and delta by tiles of queries. Then
``attention_wgmma_dkdv_kernel`` computes dk and dv by tiles of keys. Both recompute the scores. One warp loads by TMA;
two warpgroups multiply, each 64 rows of a tile. Each gradient is accumulated by one program in a fixed order;
there are no atomics. ``wgmma_stored`` launches the second kernel for a part of the heads and rows at a time; it then
stores ds, of which dq is computed without recomputing scores (``wgmma_stored_kernels``).

The position ``shift`` of row 0 is a multiple of a tile. For rows beyond the queries, up to a whole tile, lse2 is +inf
and delta 0, so that their probabilities are 0.
"""

# mypy: ignore-errors
# (Triton's and Gluon's languages are not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import (
    fence_async_shared,
    gl,
    gluon,
    load_tile as load_block,
    mbarrier,
    next_may_begin,
    previous_wait,
    store_tile as store_block,
    store_wait,
    thread_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triplan.backends.triton.attention.wgmma_shared_kernels import LN_2, LOG2_E, ROWS, numbered_tile, row_values
from triplan.backends.triton.common.rings_kernels import matrix, next_slot

#: Keys of a tile.
TILE = gl.constexpr(128)


@gluon.jit
def key_tile(index, sizes):
    """(first key, key head) of tile number ``index``; with a causal mask, the longest tiles of a section first.

    Heads are numbered over the whole batch. ``sizes``: tiles of keys, key heads of the batch, heads of a section, key
    heads of a sequence, query heads per key head, blocks of rows, position of row 0, ``turning`` of ``numbered_tile``.
    """
    tiles, heads, section, _, _, _, _, turning = sizes
    tile, head = numbered_tile(index, tiles, heads, section, turning)
    return tile * TILE, head


@gluon.jit
def first_block(key, sizes, part, CAUSAL: gl.constexpr):
    """The part's first block of rows that see a key of the tile that starts at ``key``."""
    _, _, _, _, _, blocks, shift, _ = sizes
    _, _, _, block_begin = part
    found = key * 0 + block_begin
    if CAUSAL:
        found = gl.minimum(gl.maximum(gl.maximum(key - shift, 0) // ROWS, block_begin), blocks)
    return found


@gluon.jit
def stored_before(tile, begin, end, shift, CAUSAL: gl.constexpr):
    """Blocks of ds that one head stores for the tiles of keys before ``tile``: of the blocks of rows from ``begin`` to
    ``end``, a tile has those from ``first_block`` on. All are even, as is ``shift`` / ROWS."""
    firsts = tile * begin
    if CAUSAL:
        position = shift // ROWS
        # Tiles of which all blocks see a key; those whose first block depends on the tile; the others have none.
        a = gl.minimum(gl.maximum((begin + position) // 2, 0), tile)
        b = gl.minimum(gl.maximum((end + position) // 2, a), tile)
        firsts = a * begin + b * (b - 1) - a * (a - 1) - position * (b - a) + (tile - b) * end
    return tile * end - firsts


@gluon.jit
def load_keys(k, v, index, turn, ring, sizes, part, SLOTS: gl.constexpr, WIDTH: gl.constexpr):
    """Load K and V of tile number ``index``, this program's tile number ``turn``, if there is such a tile."""
    _, _, _, _, sk, sv, _, _, _, kv_full, kv_empty = ring
    tiles, heads, _, of_sequence, _, _, _, _ = sizes
    if index < tiles * heads:
        key, head = key_tile(index, sizes)
        head += part[0]
        batch = head // of_sequence
        own = head % of_sequence
        for w in gl.static_range(2):
            which = turn % SLOTS * 2 + w
            mbarrier.wait(kv_empty.index(which), turn // SLOTS % 2 ^ 1)
            mbarrier.expect(kv_full.index(which), 2 * ROWS * WIDTH * 2)
            load_block(k, [batch, key + w * ROWS, own, 0], kv_full.index(which), sk.index(which))
            load_block(v, [batch, key + w * ROWS, own, 0], kv_full.index(which), sv.index(which))


@gluon.jit
def load_dkdv(
    q,
    k,
    v,
    dout,
    lse2,
    delta,
    ring,
    sizes,
    part,
    SLOTS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """The loading warp: K and V of each tile; Q with lse2 and dout with delta, block after block, into the ring.

    With two SLOTS for K and V, those of the next tile follow block STAGES of a tile. Their slot is free by then: that
    block is loaded when both warpgroups are done with the tile's first block, and so with the tile before.
    """
    sq, so, sl, sd, _, _, q_full, o_full, empty, _, _ = ring
    tiles, heads, _, of_sequence, group, blocks, _, _ = sizes
    first_head, member_begin, member_end, _ = part
    slot = 0
    phase = 1
    turn = 0
    if SLOTS == 2:
        load_keys(k, v, gl.program_id(0), 0, ring, sizes, part, SLOTS, WIDTH)
    for index in range(gl.program_id(0), tiles * heads, gl.num_programs(0)):
        key, head = key_tile(index, sizes)
        head += first_head
        batch = head // of_sequence
        own = head % of_sequence
        begin = first_block(key, sizes, part, CAUSAL)
        if SLOTS == 1:
            load_keys(k, v, index, turn, ring, sizes, part, SLOTS, WIDTH)
        for member in range(member_begin, member_end):
            for m in range(begin, blocks):
                row = m * ROWS
                mbarrier.wait(empty.index(slot), phase)
                mbarrier.expect(q_full.index(slot), ROWS * WIDTH * 2 + ROWS * 4)
                load_block(q, [batch, row, own * group + member, 0], q_full.index(slot), sq.index(slot))
                load_block(lse2, [head * group + member, row], q_full.index(slot), sl.index(slot))
                mbarrier.expect(o_full.index(slot), ROWS * WIDTH * 2 + ROWS * 4)
                load_block(dout, [batch, row, own * group + member, 0], o_full.index(slot), so.index(slot))
                load_block(delta, [head * group + member, row], o_full.index(slot), sd.index(slot))
                slot, phase = next_slot(slot, phase, STAGES)
                if SLOTS == 2:
                    if (member == member_begin) & (m == begin + STAGES):
                        load_keys(k, v, index + gl.num_programs(0), turn + 1, ring, sizes, part, SLOTS, WIDTH)
        if SLOTS == 2:
            if blocks - begin <= STAGES:
                load_keys(k, v, index + gl.num_programs(0), turn + 1, ring, sizes, part, SLOTS, WIDTH)
        turn += 1


@gluon.jit
def in_pieces(y):
    """The columns of an accumulator of 64 x 64 in another order, in which the 16 of a row that a thread holds, two of
    every eight, are neighbours: they are stored in pieces of 16 bytes, straight from registers."""
    # The layout that y has by then, but for the order in which a thread counts its elements.
    PIECES: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
    return gl.convert_layout(y.reshape((ROWS, 8, 4, 2)).permute((0, 2, 1, 3)).reshape((ROWS, ROWS)), PIECES)


@gluon.jit
def in_order(x, WIDTH: gl.constexpr):
    """The rows of ``x`` (64, WIDTH), which are columns of ``in_pieces``, in their own order."""
    return x.reshape((4, 8, 2, WIDTH)).permute((1, 0, 2, 3)).reshape((ROWS, WIDTH))


@gluon.jit
def step_dkdv(
    dk,
    dv,
    known,
    more,
    ring,
    ds,
    at,
    scale,
    slot,
    phase,
    key,
    keys,
    position,
    masked,
    which,
    WHICH: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    STORES: gl.constexpr,
):
    """One block of rows: dv += p.T @ dout and dk += ds.T @ q for 64 keys; ``known`` is (lse2, delta) of the rows.

    ``which``: the slot of K and V. ``masked``: whether the diagonal crosses the block, or the block is above it, or
    keys end within the tile. With STORES, ds.T is block number ``at`` of ``ds``, its columns as ``in_pieces`` has them.
    If there are ``more`` blocks, lse2 and delta of the next one are read while the last products run: later, the next
    products take all that shared memory can deliver.
    """
    sq, so, sl, sd, sk, sv, q_full, o_full, empty, _, _ = ring
    of_lse, of_delta = known
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    columns: gl.constexpr = gl.SliceLayout(0, S)
    qs = matrix(sq.index(slot), ROWS, WIDTH)
    os = matrix(so.index(slot), ROWS, WIDTH)
    s = gl.zeros((ROWS, ROWS), gl.float32, S)
    s = warpgroup_mma(matrix(sk.index(which), ROWS, WIDTH), qs.permute((1, 0)), s, use_acc=False, is_async=True)
    dp = gl.zeros((ROWS, ROWS), gl.float32, S)
    dp = warpgroup_mma(matrix(sv.index(which), ROWS, WIDTH), os.permute((1, 0)), dp, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    x = gl.exp2(s * scale - of_lse[None, :])
    if masked:
        first = key - position + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
        if STORES:  # a key beyond the last has a score of 0, and exp2(0 - lse2) may overflow
            first = gl.where(first < keys - position, first if CAUSAL else 0, ROWS)
        x = gl.where(first[:, None] <= gl.arange(0, ROWS, layout=columns)[None, :], x, 0.0)
    p = gl.convert_layout(x.to(qs.dtype), P)
    dv = warpgroup_mma(p, os, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    y = (x * (dp - of_delta[None, :])).to(qs.dtype)
    dk = warpgroup_mma(gl.convert_layout(y, P), qs, dk, is_async=True)
    if STORES:
        y = in_pieces(y)
        of_keys = gl.arange(0, ROWS, layout=gl.SliceLayout(1, y.type.layout))
        of_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(0, y.type.layout))
        block = ds + (at * 2 + WHICH).to(gl.int64) * (ROWS * ROWS)
        gl.store(block + of_keys[:, None] * ROWS + of_rows[None, :], y)
    last = slot
    slot, phase = next_slot(slot, phase, STAGES)
    mbarrier.wait(q_full.index(slot), phase, pred=more)
    mbarrier.wait(o_full.index(slot), phase, pred=more)
    of_lse = row_values(sl.index(slot), ROWS, columns)
    of_delta = row_values(sd.index(slot), ROWS, columns)
    dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
    mbarrier.arrive(empty.index(last), count=1)
    return dk, dv, of_lse, of_delta, slot, phase


@gluon.jit
def multiply_dkdv(
    dk_map,
    dv_map,
    ds,
    sums,
    scale,
    keys,
    ring,
    sizes,
    part,
    WHICH: gl.constexpr,
    SLOTS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    STORES: gl.constexpr,
    CONTINUES: gl.constexpr,
    ENDS: gl.constexpr,
):
    """A multiplying warpgroup: dk and dv of 64 keys of each of this program's tiles, over the part's rows that see
    them. If it CONTINUES, ``sums`` holds those of earlier rows; unless it ENDS, ``sums`` takes the results."""
    _, _, sl, sd, sk, sv, q_full, o_full, _, kv_full, kv_empty = ring
    tiles, heads, _, of_sequence, _, blocks, shift, _ = sizes
    first_head, member_begin, member_end, block_begin = part
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    columns: gl.constexpr = gl.SliceLayout(0, S)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    turn = 0
    for index in range(gl.program_id(0), tiles * heads, gl.num_programs(0)):
        first, head = key_tile(index, sizes)
        key = first + WHICH * ROWS
        begin = first_block(first, sizes, part, CAUSAL)
        which = turn % SLOTS * 2 + WHICH
        plain = begin
        if CAUSAL:
            plain = gl.maximum(gl.minimum(blocks, gl.cdiv(gl.maximum(key + ROWS - 1 - shift, 0), ROWS)), begin)
        at = 0
        per = 0
        if STORES:
            plain = gl.where(key + ROWS > keys, blocks, plain)
            per = stored_before(tiles, block_begin, blocks, shift, CAUSAL)
            at = head * (member_end - member_begin) * per - begin
            at += stored_before(first // TILE, block_begin, blocks, shift, CAUSAL)
        dk = gl.zeros((ROWS, WIDTH), gl.float32, A)
        dv = gl.zeros((ROWS, WIDTH), gl.float32, A)
        # Of dk, then of dv, (head, key, element): in f32 what one part's accumulators hold and the next one's start at.
        row = head.to(gl.int64) * tiles * TILE + key + gl.arange(0, ROWS, layout=gl.SliceLayout(1, A))
        element = row[:, None] * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, A))[None, :]
        of_dv = heads.to(gl.int64) * tiles * TILE * WIDTH
        if CONTINUES:
            dk = gl.load(sums + element)
            dv = gl.load(sums + of_dv + element)
        mbarrier.wait(kv_full.index(which), turn // SLOTS % 2)
        mbarrier.wait(q_full.index(slot), phase, pred=begin < blocks)
        mbarrier.wait(o_full.index(slot), phase, pred=begin < blocks)
        of_lse = row_values(sl.index(slot), ROWS, columns)
        of_delta = row_values(sd.index(slot), ROWS, columns)
        for member in range(member_begin, member_end):
            if SLOTS == 1:
                for section in gl.static_range(2):  # with a mask, and without
                    for m in range(plain if section else begin, blocks if section else plain):
                        dk, dv, of_lse, of_delta, slot, phase = step_dkdv(
                            dk,
                            dv,
                            (of_lse, of_delta),
                            (m + 1 < blocks) | (member + 1 < member_end),
                            ring,
                            ds,
                            at + m,
                            scale,
                            slot,
                            phase,
                            key,
                            keys,
                            m * ROWS + shift,
                            section == 0,
                            which,
                            WHICH,
                            WIDTH,
                            STAGES,
                            CAUSAL,
                            STORES,
                        )
            else:
                # Not two loops: of two that multiply by a buffer of a run-time index, ptxas 12.8 prepares descriptors
                # in the first alone, so that those of the second are wrong where the first does not run.
                for m in range(begin, blocks):
                    dk, dv, of_lse, of_delta, slot, phase = step_dkdv(
                        dk,
                        dv,
                        (of_lse, of_delta),
                        (m + 1 < blocks) | (member + 1 < member_end),
                        ring,
                        ds,
                        at + m,
                        scale,
                        slot,
                        phase,
                        key,
                        keys,
                        m * ROWS + shift,
                        m < plain,
                        which,
                        WHICH,
                        WIDTH,
                        STAGES,
                        CAUSAL,
                        STORES,
                    )
            at += per
        if ENDS:
            # The results leave through the shared memory of K and V, which no product reads any more.
            thread_barrier()
            matrix(sv.index(which), ROWS, WIDTH).store(dv.to(dv_map.dtype))
            matrix(sk.index(which), ROWS, WIDTH).store((dk * scale * LN_2).to(dk_map.dtype))
            fence_async_shared()
            thread_barrier()
            head += first_head
            store_block(dv_map, [head // of_sequence, key, head % of_sequence, 0], sv.index(which))
            store_block(dk_map, [head // of_sequence, key, head % of_sequence, 0], sk.index(which))
            store_wait(0)
        else:
            gl.store(sums + element, dk)
            gl.store(sums + of_dv + element, dv)
        mbarrier.arrive(kv_empty.index(which), count=1)
        turn += 1


@gluon.jit
def attention_wgmma_dkdv_kernel(
    q,
    k,
    v,
    dout,
    dk,
    dv,
    ds,
    sums,
    lse2,
    delta,
    scale,
    tiles,
    heads,
    section,
    of_sequence,
    group,
    blocks,
    shift,
    turning,
    keys,
    first_head,
    member_begin,
    member_end,
    block_begin,
    SLOTS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    STORES: gl.constexpr,
    CONTINUES: gl.constexpr,
    ENDS: gl.constexpr,
):
    """dk = scale * ds.T @ q and dv = p.T @ dout, summed over the query heads that share a key, in tiles of 128
    keys.

    ``q`` to ``dv`` are tensor maps (batch, row, head, up to WIDTH) of f16 or bf16 in blocks of 64 rows; ``lse2`` and
    ``delta``, (batch * heads, rows) of f32, are tensor maps in blocks of 64. ``tiles`` to ``turning``: ``key_tile``;
    ``heads`` are ``first_head`` and those after it, the rows blocks from ``block_begin`` to ``blocks`` of the heads
    from ``member_begin`` to ``member_end`` of each group. SLOTS: see ``load_dkdv``; CONTINUES, ENDS: ``multiply_dkdv``.

    With STORES, ``ds`` takes ds.T, (block * 128 + key, row of 64): of each of the query heads, the blocks of each tile
    of ``keys`` keys, as ``stored_before`` counts them. Else None; as is ``sums`` where there is one part.

    Launched with 4 warps, the first warpgroup; ``warp_specialize`` adds 5.
    """
    next_may_begin()
    sq = gl.allocate_shared_memory(q.dtype, [STAGES] + q.block_type.shape, q.layout)
    so = gl.allocate_shared_memory(q.dtype, [STAGES] + q.block_type.shape, q.layout)
    sl = gl.allocate_shared_memory(gl.float32, [STAGES] + lse2.block_type.shape, lse2.layout)
    sd = gl.allocate_shared_memory(gl.float32, [STAGES] + delta.block_type.shape, delta.layout)
    sk = gl.allocate_shared_memory(k.dtype, [SLOTS * 2] + k.block_type.shape, k.layout)
    sv = gl.allocate_shared_memory(v.dtype, [SLOTS * 2] + v.block_type.shape, v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    o_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kv_full = gl.allocate_shared_memory(gl.int64, [SLOTS * 2, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [SLOTS * 2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(o_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(SLOTS * 2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=1)
    ring = (sq, so, sl, sd, sk, sv, q_full, o_full, empty, kv_full, kv_empty)
    sizes = (tiles, heads, section, of_sequence, group, blocks, shift, turning)
    part = (first_head, member_begin, member_end, block_begin)
    scale = scale * LOG2_E
    previous_wait()
    gl.warp_specialize(
        [
            (
                multiply_dkdv,
                (
                    dk,
                    dv,
                    ds,
                    sums,
                    scale,
                    keys,
                    ring,
                    sizes,
                    part,
                    0,
                    SLOTS,
                    WIDTH,
                    STAGES,
                    CAUSAL,
                    STORES,
                    CONTINUES,
                    ENDS,
                ),
            ),
            (
                multiply_dkdv,
                (
                    dk,
                    dv,
                    ds,
                    sums,
                    scale,
                    keys,
                    ring,
                    sizes,
                    part,
                    1,
                    SLOTS,
                    WIDTH,
                    STAGES,
                    CAUSAL,
                    STORES,
                    CONTINUES,
                    ENDS,
                ),
            ),
            (load_dkdv, (q, k, v, dout, lse2, delta, ring, sizes, part, SLOTS, WIDTH, STAGES, CAUSAL)),
        ],
        [4, 1],  # warps of the second and the third partition
        [240, 24],  # registers per thread there
    )
