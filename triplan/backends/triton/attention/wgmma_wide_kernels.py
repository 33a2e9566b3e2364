"""Kernel of ``wgmma_wide`` that computes dk and dv of wide heads on Hopper (Gluon), persistent and warp-specialised.

Accumulators of both gradients, 64 keys by 256, do not fit the registers of one warpgroup. So one warpgroup computes dv
and the other dk of the same 64 keys. Both compute their scores, which takes a product more than if they exchanged them,
but they wait for each other only where a tile ends. One warp loads by TMA. There are no atomics: one program
accumulates each gradient in a fixed order.

Heads lie in shared memory in chunks of WIDTH columns, as in ``wgmma_kernels``. The position ``shift`` of row 0 is a
multiple of 64. For rows beyond the queries, lse2 is +inf and delta 0, so that their probabilities are 0.
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
    store_tile as store_block,
    store_wait,
    thread_barrier,
    warpgroup_mma_wait,
)
from triplan.backends.triton.attention.wgmma_block_kernels import added, finished, scores, zeros
from triplan.backends.triton.attention.wgmma_kernels import load_chunks
from triplan.backends.triton.attention.wgmma_shared_kernels import (
    FREE,
    LN_2,
    LOG2_E,
    ROWS,
    bar_sync,
    numbered_tile,
    opaque,
    row_values,
)
from triplan.backends.triton.common.rings_kernels import matrix, next_slot


@gluon.jit
def wide_key_tile(index, sizes):
    """(block of rows at the position of the first key, key head) of tile number ``index``; with a causal mask, the
    longest tiles of a section first. The block may be none of the head's.

    Heads are numbered over the whole batch. ``sizes``: tiles of keys, key heads of the batch, heads of a section, key
    heads of a sequence, query heads per key head, blocks of 64 rows, position of row 0 in blocks, ``turning`` of
    ``numbered_tile``, tiles of all heads, programs.
    """
    tiles, heads, section, _, _, _, shift, turning, _, programs = sizes
    # (opaque, lest products of these are computed once and kept in registers, of which there are none)
    tile, head = numbered_tile(index, opaque(tiles), heads, section, turning, programs)
    return tile - shift, head


@gluon.jit
def first_seeing(diagonal, blocks, CAUSAL: gl.constexpr):
    """The first block of rows that see a key of a tile."""
    begin = diagonal * 0
    if CAUSAL:
        begin = gl.minimum(gl.maximum(diagonal, 0), blocks)
    return begin


@gluon.jit
def load_wide_keys(k, v, at, turn, ring, WIDTH: gl.constexpr, CHUNKS: gl.constexpr, VALUES: gl.constexpr):
    """Load K and V of this program's tile number ``turn``; ``at``: batch, first key, key head."""
    _, _, _, _, sk, sv, _, _, _, kv_full, kv_empty = ring
    batch, key, own = at
    mbarrier.wait(kv_empty.index(0), turn & 1 ^ 1)
    mbarrier.expect(kv_full.index(0), ROWS * WIDTH * (CHUNKS + VALUES) * 2)
    load_chunks(k, batch, key, own, kv_full.index(0), sk, 0, WIDTH, CHUNKS)
    load_chunks(v, batch, key, own, kv_full.index(0), sv, 0, WIDTH, VALUES)


@gluon.jit
def load_wide(
    q,
    k,
    v,
    dout,
    lse2,
    delta,
    ring,
    sizes,
    WIDTH: gl.constexpr,
    CHUNKS: gl.constexpr,
    VALUES: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """The loading warp: Q with lse2 and dout with delta, block after block, into the ring; K and V of each tile.

    The ring is filled before K and V are loaded, because those have to wait until the tile before has left.
    """
    sq, so, sl, sd, _, _, q_full, o_full, empty, _, _ = ring
    _, _, _, of_sequence, group, blocks, shift, _, count, programs = sizes
    slot = 0
    phase = 1
    turn = 0
    for index in range(gl.program_id(0), count, programs):
        diagonal, head = wide_key_tile(index, sizes)
        begin = first_seeing(diagonal, blocks, CAUSAL)
        key = (diagonal + shift) * ROWS
        batch = head // of_sequence
        own = head % of_sequence
        missing = gl.minimum((blocks - begin) * opaque(group), STAGES)
        if missing == 0:
            load_wide_keys(k, v, (batch, key, own), turn, ring, WIDTH, CHUNKS, VALUES)
        for member in range(group):
            for m in range(begin, blocks):
                row = m * ROWS
                mbarrier.wait(empty.index(slot), phase)
                mbarrier.expect(q_full.index(slot), ROWS * WIDTH * CHUNKS * 2 + ROWS * 4)
                load_chunks(q, batch, row, own * group + member, q_full.index(slot), sq, slot * CHUNKS, WIDTH, CHUNKS)
                load_tile(lse2, [head * group + member, row], q_full.index(slot), sl.index(slot))
                mbarrier.expect(o_full.index(slot), ROWS * WIDTH * VALUES * 2 + ROWS * 4)
                load_chunks(
                    dout, batch, row, own * group + member, o_full.index(slot), so, slot * VALUES, WIDTH, VALUES
                )
                load_tile(delta, [head * group + member, row], o_full.index(slot), sd.index(slot))
                slot, phase = next_slot(slot, phase, STAGES)
                missing -= 1
                if missing == 0:
                    load_wide_keys(k, v, (batch, key, own), turn, ring, WIDTH, CHUNKS, VALUES)
        turn += 1


@gluon.jit
def probabilities(s, of_lse, scale, diagonal, S: gl.constexpr, CAUSAL: gl.constexpr):
    """exp2(scale * s - lse2) of scores (key, row). ``diagonal``: the first row is at the first key's position."""
    x = gl.exp2(s * scale - of_lse[None, :])
    if CAUSAL:
        if diagonal:
            keys = gl.arange(0, ROWS, layout=gl.SliceLayout(1, S)) + opaque(0)  # lest all are kept in registers
            rows = gl.arange(0, ROWS, layout=gl.SliceLayout(0, S))
            x = gl.where(keys[:, None] <= rows[None, :], x, 0.0)
    return x


@gluon.jit
def rescaled_by(total, scale, CHUNKS: gl.constexpr):
    """``total`` times the scale of scores: ``scale`` is for exp2, log2(e) times that."""
    found = ()
    for c in gl.static_range(CHUNKS):
        found = found + (total[c] * scale * LN_2,)
    return found


@gluon.jit
def write_wide(acc, operand, at, buffer, FIRST: gl.constexpr, WIDTH: gl.constexpr, COUNT: gl.constexpr):
    """Store COUNT chunks of 64 rows through ``buffer`` from number FIRST on, which no product reads any more."""
    batch, row, head = at
    for c in gl.static_range(COUNT):
        matrix(buffer.index(FIRST + c), ROWS, WIDTH).store(acc[c].to(operand.dtype))
        fence_async_shared()
        thread_barrier()
        store_block(operand, [batch, row, head, c * WIDTH], buffer.index(FIRST + c))
    store_wait(0)


@gluon.jit
def multiply_wide(
    out,
    scale,
    ring,
    sizes,
    WIDTH: gl.constexpr,
    CHUNKS: gl.constexpr,
    VALUES: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    OF_KEYS: gl.constexpr,
):
    """A multiplying warpgroup: dk = scale * sum(ds.T @ q) of each of this program's tiles if OF_KEYS, else
    dv = sum(p.T @ dout)."""
    sq, so, sl, sd, sk, sv, q_full, o_full, empty, kv_full, kv_empty = ring
    _, _, _, of_sequence, group, blocks, shift, _, count, programs = sizes
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    columns: gl.constexpr = gl.SliceLayout(0, S)
    PARTS: gl.constexpr = CHUNKS if OF_KEYS else VALUES
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)  # bit 0: of the ring; bit 1: of K and V
    for index in range(gl.program_id(0), count, programs):
        diagonal, _ = wide_key_tile(index, sizes)
        begin = first_seeing(diagonal, blocks, CAUSAL)
        total = zeros(A, WIDTH, PARTS)
        mbarrier.wait(kv_full.index(0), phase >> 1)
        mbarrier.wait(q_full.index(slot), phase & 1, pred=begin < blocks)
        if OF_KEYS:
            mbarrier.wait(o_full.index(slot), phase & 1, pred=begin < blocks)
        of_lse = row_values(sl.index(slot), ROWS, columns)
        if OF_KEYS:
            of_delta = row_values(sd.index(slot), ROWS, columns)
        for member in range(group):
            for m in range(begin, blocks):
                # Descriptors of a buffer that never changes would be hoisted out of the loop, and spill.
                which = opaque(0)
                s = scores(sk, sq, which, slot, S, WIDTH, CHUNKS, ROWS)
                if OF_KEYS:
                    dp = scores(sv, so, which, slot, S, WIDTH, VALUES, ROWS)
                    s = warpgroup_mma_wait(VALUES, deps=(s,))
                else:
                    s = warpgroup_mma_wait(0, deps=(s,))
                x = probabilities(s, of_lse, scale, m == diagonal, S, CAUSAL)
                if OF_KEYS:
                    dp, x = warpgroup_mma_wait(0, deps=(dp, x))
                    x = x * (dp - of_delta[None, :])
                x = gl.convert_layout(x.to(out.dtype), gl.DotOperandLayout(0, A, 2))
                if OF_KEYS:
                    total = added(total, x, sq, slot, WIDTH, CHUNKS, ROWS)
                else:
                    mbarrier.wait(o_full.index(slot), phase & 1)
                    total = added(total, x, so, slot, WIDTH, VALUES, ROWS)
                last = slot
                slot, phase = next_slot(slot, phase, STAGES)
                more = (m + 1 < blocks) | (member + 1 < group)
                mbarrier.wait(q_full.index(slot), phase & 1, pred=more)
                if OF_KEYS:
                    mbarrier.wait(o_full.index(slot), phase & 1, pred=more)
                of_lse = row_values(sl.index(slot), ROWS, columns)
                if OF_KEYS:
                    of_delta = row_values(sd.index(slot), ROWS, columns)
                total, of_lse = finished(total, of_lse, PARTS)
                mbarrier.arrive(empty.index(last), count=1)
        bar_sync(FREE, 256)  # the other warpgroup is done with K and V
        if OF_KEYS:
            total = rescaled_by(total, scale, PARTS)
        diagonal, head = wide_key_tile(opaque(index), sizes)  # there are no registers to keep it
        at = (head // of_sequence, (diagonal + shift) * ROWS, head % of_sequence)
        if OF_KEYS:
            write_wide(total, out, at, sk, 0, WIDTH, PARTS)
        else:
            write_wide(total, out, at, sv, 0, WIDTH, PARTS)
        mbarrier.arrive(kv_empty.index(0), count=1)
        phase ^= 2


@gluon.jit
def attention_wgmma_wide_dkdv_kernel(
    q,
    k,
    v,
    dout,
    dk,
    dv,
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
    count,
    programs,
    WIDTH: gl.constexpr,
    CHUNKS: gl.constexpr,
    VALUES: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """dk = scale * ds.T @ q and dv = p.T @ dout, summed over the query heads that share a key, in tiles of 64 keys.

    ``q`` to ``dv`` are tensor maps (batch, row, head, column) of f16 or bf16 in blocks of 64 rows and WIDTH columns, of
    which queries and keys have CHUNKS, values VALUES; ``lse2`` and ``delta``, (batch * heads, rows) of f32, are tensor
    maps in blocks of 64. ``tiles`` to ``programs``: see ``wide_key_tile``.

    Launched with 4 warps, the first warpgroup; ``warp_specialize`` adds 5.
    """
    next_may_begin()
    sq = gl.allocate_shared_memory(q.dtype, [STAGES * CHUNKS] + q.block_type.shape, q.layout)
    so = gl.allocate_shared_memory(q.dtype, [STAGES * VALUES] + dout.block_type.shape, dout.layout)
    sl = gl.allocate_shared_memory(gl.float32, [STAGES] + lse2.block_type.shape, lse2.layout)
    sd = gl.allocate_shared_memory(gl.float32, [STAGES] + delta.block_type.shape, delta.layout)
    sk = gl.allocate_shared_memory(k.dtype, [CHUNKS] + k.block_type.shape, k.layout)
    sv = gl.allocate_shared_memory(v.dtype, [VALUES] + v.block_type.shape, v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    o_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(o_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(kv_full.index(0), count=1)
    mbarrier.init(kv_empty.index(0), count=2)
    ring = (sq, so, sl, sd, sk, sv, q_full, o_full, empty, kv_full, kv_empty)
    sizes = (tiles, heads, section, of_sequence, group, blocks, shift, turning, count, programs)
    scale = scale * LOG2_E
    previous_wait()
    gl.warp_specialize(
        [
            (multiply_wide, (dv, scale, ring, sizes, WIDTH, CHUNKS, VALUES, STAGES, CAUSAL, False)),
            (multiply_wide, (dk, scale, ring, sizes, WIDTH, CHUNKS, VALUES, STAGES, CAUSAL, True)),
            (load_wide, (q, k, v, dout, lse2, delta, ring, sizes, WIDTH, CHUNKS, VALUES, STAGES, CAUSAL)),
        ],
        [4, 1],  # warps of the second and the third partition
        [256, 32],  # registers per thread there
    )
