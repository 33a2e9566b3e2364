"""Kernel of ``wgmma_wide`` that computes dq of wide heads on Hopper (Gluon), persistent and warp-specialised.

Two warpgroups multiply, each 64 rows of a tile; one warp loads by TMA. Scores are recomputed, in blocks of 64 keys from
the last that a tile sees to the first. Heads lie in shared memory in chunks of WIDTH columns, as in ``wgmma_kernels``.
"""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import (
    gl,
    gluon,
    mbarrier,
    next_may_begin,
    previous_wait,
    thread_barrier,
    warpgroup_mma_wait,
)
from triplan.backends.triton.attention.wgmma_block_kernels import added, finished, scores, zeros
from triplan.backends.triton.attention.wgmma_kernels import load_chunks
from triplan.backends.triton.attention.wgmma_shared_kernels import LOG2_E, ROWS, numbered_tile, opaque
from triplan.backends.triton.attention.wgmma_wide_kernels import rescaled_by, write_wide
from triplan.backends.triton.common.rings_kernels import next_slot


@gluon.jit
def wide_query_tile(index, sizes, CAUSAL: gl.constexpr):
    """(first row, keys that the last row sees, query head) of tile number ``index``, the longest of a section first.

    Heads are numbered over the whole batch. ``sizes``: tiles of rows, query heads of the batch, heads of a section,
    heads of a sequence, query heads per key head, keys, position of row 0, ``turning`` of ``numbered_tile``.
    """
    tiles, heads, section, _, _, keys, shift, turning = sizes
    tile, head = numbered_tile(index, tiles, heads, section, turning)
    row = (tiles - 1 - tile) * (2 * ROWS)
    if CAUSAL:
        keys = gl.maximum(gl.minimum(keys, row + 2 * ROWS + shift), 0)
    return row, keys, head


@gluon.jit
def load_wide_rows(q, dout, at, turn, ring, WIDTH: gl.constexpr, CHUNKS: gl.constexpr, VALUES: gl.constexpr):
    """Load Q and dout of this program's tile number ``turn``; ``at``: batch, first row, head."""
    sq, so, _, _, q_full, q_empty, _, _, _, _ = ring
    batch, row, member = at
    for w in gl.static_range(2):
        mbarrier.wait(q_empty.index(w), turn & 1 ^ 1)
        mbarrier.expect(q_full.index(w), ROWS * WIDTH * (CHUNKS + VALUES) * 2)
        load_chunks(q, batch, row + w * ROWS, member, q_full.index(w), sq, w * CHUNKS, WIDTH, CHUNKS)
        load_chunks(dout, batch, row + w * ROWS, member, q_full.index(w), so, w * VALUES, WIDTH, VALUES)


@gluon.jit
def load_wide_dq(
    q,
    k,
    v,
    dout,
    ring,
    sizes,
    WIDTH: gl.constexpr,
    CHUNKS: gl.constexpr,
    VALUES: gl.constexpr,
    KEY_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """The loading warp: Q and dout of each tile, and K and V block after block into their rings."""
    _, _, sk, sv, _, _, k_full, k_empty, v_full, v_empty = ring
    tiles, heads, _, of_sequence, group, _, _, _ = sizes
    slot = 0
    phase = 1
    key_slot = 0
    key_phase = 1
    turn = 0
    for index in range(gl.program_id(0), tiles * heads, gl.num_programs(0)):
        row, seen, head = wide_query_tile(index, sizes, CAUSAL)
        n = gl.cdiv(seen, ROWS)
        batch = head // of_sequence
        member = head % of_sequence
        own = member // group
        for i in range(n):
            key = (n - 1 - i) * ROWS
            mbarrier.wait(k_empty.index(key_slot), key_phase)
            mbarrier.expect(k_full.index(key_slot), ROWS * WIDTH * CHUNKS * 2)
            load_chunks(k, batch, key, own, k_full.index(key_slot), sk, key_slot * CHUNKS, WIDTH, CHUNKS)
            key_slot, key_phase = next_slot(key_slot, key_phase, KEY_STAGES)
            if i == 0:  # after K, because it may have to wait until the last tile's dq has left
                load_wide_rows(q, dout, (batch, row, member), turn, ring, WIDTH, CHUNKS, VALUES)
            mbarrier.wait(v_empty.index(slot), phase)
            mbarrier.expect(v_full.index(slot), ROWS * WIDTH * VALUES * 2)
            load_chunks(v, batch, key, own, v_full.index(slot), sv, slot * VALUES, WIDTH, VALUES)
            slot, phase = next_slot(slot, phase, STAGES)
        if n == 0:
            load_wide_rows(q, dout, (batch, row, member), turn, ring, WIDTH, CHUNKS, VALUES)
        turn += 1


@gluon.jit
def step_wide_dq(
    dq,
    of_row,
    ring,
    at,
    scale,
    position,
    key,
    keys,
    dtype,
    WHICH: gl.constexpr,
    WIDTH: gl.constexpr,
    CHUNKS: gl.constexpr,
    VALUES: gl.constexpr,
    KEY_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
    MASK: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """One block of keys: dq += ds @ k for 64 rows. ``of_row``: their lse2 and delta; ``at``: slots and their phases."""
    sq, so, sk, sv, _, _, k_full, k_empty, v_full, v_empty = ring
    of_lse, of_delta = of_row
    key_slot, key_phase, slot, phase = at
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    # The descriptors of a buffer that never changes would be hoisted out of the loop, and spill.
    which = opaque(WHICH)
    if STAGES == 1:
        slot = opaque(0)
    mbarrier.wait(k_full.index(key_slot), key_phase)
    s = scores(sq, sk, which, key_slot, S, WIDTH, CHUNKS, ROWS)
    mbarrier.wait(v_full.index(slot), phase)
    dp = scores(so, sv, which, slot, S, WIDTH, VALUES, ROWS)
    s = warpgroup_mma_wait(VALUES, deps=(s,))
    x = gl.exp2(s * scale - of_lse[:, None])
    if MASK:
        # Keys beyond the last must be masked: their scores are 0, and exp2(0 - lse2) may overflow.
        limit = gl.full([ROWS], 0, gl.int32, layout=gl.SliceLayout(1, S)) + (keys - key)
        if CAUSAL:
            limit = gl.minimum(limit, gl.arange(0, ROWS, layout=gl.SliceLayout(1, S)) + (position - key + 1))
        x = gl.where(gl.arange(0, ROWS, layout=gl.SliceLayout(0, S))[None, :] < limit[:, None], x, 0.0)
    dp, x = warpgroup_mma_wait(0, deps=(dp, x))
    mbarrier.arrive(v_empty.index(slot), count=1)
    y = (x * (dp - of_delta[:, None])).to(dtype)
    dq = added(dq, gl.convert_layout(y, gl.DotOperandLayout(0, A, 2)), sk, key_slot, WIDTH, CHUNKS, ROWS)
    dq, of_lse = finished(dq, of_lse, CHUNKS)
    mbarrier.arrive(k_empty.index(key_slot), count=1)
    key_slot, key_phase = next_slot(key_slot, key_phase, KEY_STAGES)
    slot, phase = next_slot(slot, phase, STAGES)
    return dq, key_slot, key_phase, slot, phase


@gluon.jit
def multiply_wide_dq(
    dq_map,
    lse2,
    delta,
    scale,
    ring,
    sizes,
    WHICH: gl.constexpr,
    WIDTH: gl.constexpr,
    CHUNKS: gl.constexpr,
    VALUES: gl.constexpr,
    KEY_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """A multiplying warpgroup: dq of 64 rows of each of this program's tiles, over all keys that they see."""
    sq, _, _, _, q_full, q_empty, k_full, k_empty, v_full, v_empty = ring
    tiles, heads, _, of_sequence, _, _, shift, _ = sizes
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    key_slot = gl.to_tensor(0)
    key_phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    turn = 0
    for index in range(gl.program_id(0), tiles * heads, gl.num_programs(0)):
        row, seen, head = wide_query_tile(index, sizes, CAUSAL)
        row += WHICH * ROWS
        n = gl.cdiv(seen, ROWS)
        plain = seen // ROWS
        if CAUSAL:
            plain = gl.minimum(plain, gl.maximum(row + shift + 1, 0) // ROWS)
            own = gl.minimum(n, gl.cdiv(gl.maximum(row + ROWS + shift, 0), ROWS))
            for _ in range(n - own):  # the last block, of which only the other warpgroup's rows see a key
                mbarrier.wait(k_full.index(key_slot), key_phase)
                mbarrier.arrive(k_empty.index(key_slot), count=1)
                key_slot, key_phase = next_slot(key_slot, key_phase, KEY_STAGES)
                mbarrier.wait(v_full.index(slot), phase)
                mbarrier.arrive(v_empty.index(slot), count=1)
                slot, phase = next_slot(slot, phase, STAGES)
            masked = own - plain
        else:
            masked = n - plain
        at_row = head * tiles * (2 * ROWS) + row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
        of_lse = gl.load(lse2 + at_row)
        of_delta = gl.load(delta + at_row)
        dq = zeros(A, WIDTH, CHUNKS)
        mbarrier.wait(q_full.index(WHICH), turn & 1)
        for i in range(masked):
            dq, key_slot, key_phase, slot, phase = step_wide_dq(
                dq,
                (of_lse, of_delta),
                ring,
                (key_slot, key_phase, slot, phase),
                scale,
                row + shift,
                (plain + masked - 1 - i) * ROWS,
                seen,
                dq_map.dtype,
                WHICH,
                WIDTH,
                CHUNKS,
                VALUES,
                KEY_STAGES,
                STAGES,
                True,
                CAUSAL,
            )
        for _ in range(plain):
            dq, key_slot, key_phase, slot, phase = step_wide_dq(
                dq,
                (of_lse, of_delta),
                ring,
                (key_slot, key_phase, slot, phase),
                scale,
                0,
                0,
                0,
                dq_map.dtype,
                WHICH,
                WIDTH,
                CHUNKS,
                VALUES,
                KEY_STAGES,
                STAGES,
                False,
                CAUSAL,
            )
        thread_barrier()
        dq = rescaled_by(dq, scale, CHUNKS)
        row, _, head = wide_query_tile(opaque(index), sizes, CAUSAL)  # there are no registers to keep it
        row += WHICH * ROWS
        # Through the shared memory of Q, which no product reads any more.
        at = (head // of_sequence, row, head % of_sequence)
        write_wide(dq, dq_map, at, sq, WHICH * CHUNKS, WIDTH, CHUNKS)
        mbarrier.arrive(q_empty.index(WHICH), count=1)
        turn += 1


@gluon.jit
def attention_wgmma_wide_dq_kernel(
    q,
    k,
    v,
    dout,
    dq,
    lse2,
    delta,
    scale,
    tiles,
    heads,
    section,
    of_sequence,
    group,
    keys,
    shift,
    turning,
    WIDTH: gl.constexpr,
    CHUNKS: gl.constexpr,
    VALUES: gl.constexpr,
    KEY_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """dq = scale * ds @ k in tiles of 128 rows.

    ``q`` to ``dq`` are tensor maps (batch, row, head, column) of f16 or bf16 in blocks of 64 rows and WIDTH columns, of
    which queries and keys have CHUNKS, values VALUES; ``lse2`` and ``delta``: (batch * heads, ``tiles`` * 128) of f32.
    ``tiles`` to ``turning``: see ``wide_query_tile``. The rings of K and V have KEY_STAGES and STAGES slots.

    Launched with 4 warps, the first warpgroup; ``warp_specialize`` adds 5.
    """
    next_may_begin()
    sq = gl.allocate_shared_memory(q.dtype, [2 * CHUNKS] + q.block_type.shape, q.layout)
    so = gl.allocate_shared_memory(q.dtype, [2 * VALUES] + dout.block_type.shape, dout.layout)
    sk = gl.allocate_shared_memory(k.dtype, [KEY_STAGES * CHUNKS] + k.block_type.shape, k.layout)
    sv = gl.allocate_shared_memory(v.dtype, [STAGES * VALUES] + v.block_type.shape, v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(KEY_STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    ring = (sq, so, sk, sv, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (tiles, heads, section, of_sequence, group, keys, shift, turning)
    scale = scale * LOG2_E
    previous_wait()
    gl.warp_specialize(
        [
            (
                multiply_wide_dq,
                (dq, lse2, delta, scale, ring, sizes, 0, WIDTH, CHUNKS, VALUES, KEY_STAGES, STAGES, CAUSAL),
            ),
            (
                multiply_wide_dq,
                (dq, lse2, delta, scale, ring, sizes, 1, WIDTH, CHUNKS, VALUES, KEY_STAGES, STAGES, CAUSAL),
            ),
            (load_wide_dq, (q, k, v, dout, ring, sizes, WIDTH, CHUNKS, VALUES, KEY_STAGES, STAGES, CAUSAL)),
        ],
        [4, 1],  # warps of the second and the third partition
        [232, 40],  # registers per thread there
    )
