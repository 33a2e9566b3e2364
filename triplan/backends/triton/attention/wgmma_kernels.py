"""Kernel of ``wgmma``: attention on Hopper (Gluon), persistent and warp-specialised.

One warp loads by TMA; two warpgroups take turns, each with 64 of a tile's 128 queries: while one multiplies, the other
computes exponentials (FlashAttention-3, arXiv 2407.08608). A step is one block of keys. It issues q @ k.T of this block
together with p @ v of the block before; a tile's last step also issues the first scores of the next tile. K and V go
through rings of STAGES slots, Q through AHEAD slots: with two, the next tile's Q arrives early.

The position of row 0 is a multiple of a tile, so that with a causal mask the rows of a warpgroup end where a block of
keys ends, and only their last block of keys needs a mask. Blocks are visited from the last to the first: each row sees
a key in the masked block, before any block without a mask. Where blocks have 64 keys, no row of the first warpgroup
sees a tile's last block, which it skips. TMA reads rows beyond the queries as 0 and does not write them.

Heads lie in shared memory in chunks of WIDTH columns: a width that is no power of two has several, and so have wide
ones, whose accumulators are a tuple of one for each chunk of a value.
"""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import gl, gluon, load_tile, mbarrier, store_wait, warpgroup_mma_wait
from triplan.backends.triton.attention.wgmma_block_kernels import (
    LAGGING_COLUMNS,
    added,
    exponentials,
    finished,
    first_softmax,
    positive,
    rescaled,
    row_max,
    row_sum,
    scaled,
    scaled_seldom,
    scores,
    write,
    zeros,
)
from triplan.backends.triton.attention.wgmma_shared_kernels import (
    FREE,
    LOG2_E,
    ROWS,
    bar_arrive,
    bar_sync,
    numbered_tile,
    opaque,
)
from triplan.backends.triton.common.rings_kernels import next_slot


@gluon.jit
def tile_of(index, sizes):
    """(first row, last position + 1, query head) of tile number ``index``: within a section of heads, the tiles of most
    keys first.

    Heads are numbered over the whole batch. ``sizes``: tiles of rows, query heads of the batch, heads of a section,
    heads of a sequence, query heads per key head, keys, position of row 0, ``turning`` of ``numbered_tile``.
    """
    tiles_m, heads, section, _, _, _, shift, turning = sizes
    tile, head = numbered_tile(index, tiles_m, heads, section, turning)
    row = (tiles_m - 1 - tile) * (2 * ROWS)
    return row, row + 2 * ROWS + shift, head


@gluon.jit
def blocks_of(end, sizes, CAUSAL: gl.constexpr, BLOCK: gl.constexpr):
    """Blocks of keys of a tile that ends before position ``end``; at least one, which may be masked entirely."""
    _, _, _, _, _, keys, _, _ = sizes
    if CAUSAL:
        keys = gl.minimum(keys, end)
    return gl.maximum(gl.cdiv(keys, BLOCK), 1)


@gluon.jit
def own_blocks(
    index,
    ring,
    sizes,
    slot,
    phase,
    WHICH: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """(first row, blocks of keys) of a warpgroup in tile number ``index``, and the slot and phase of the last of them.

    ``slot``, ``phase``: those of the tile's last block. If none of the rows sees it, the warpgroup gives its slots back
    and takes its turn without a product.
    """
    _, _, _, _, _, _, k_full, k_empty, v_full, v_empty = ring
    _, _, _, _, _, _, shift, _ = sizes
    row, end, _ = tile_of(index, sizes)
    row += WHICH * ROWS
    n = blocks_of(end, sizes, CAUSAL, BLOCK)
    if CAUSAL and WHICH == 0 and BLOCK == ROWS:
        own = blocks_of(row + ROWS + shift, sizes, CAUSAL, BLOCK)
        if own < n:
            mbarrier.wait(k_full.index(slot), phase)
            mbarrier.arrive(k_empty.index(slot), count=1)
            mbarrier.wait(v_full.index(slot), phase)
            mbarrier.arrive(v_empty.index(slot), count=1)
            bar_sync(FREE + WHICH, 256)
            bar_arrive(FREE + 1 - WHICH, 256)
            slot, phase = next_slot(slot, phase, STAGES)
        n = own
    return row, n, slot, phase


@gluon.jit
def load_chunks(operand, batch, row, head, barrier, buffer, first, WIDTH: gl.constexpr, CHUNKS: gl.constexpr):
    """Load rows of a head, chunk after chunk, into ``buffer`` from number ``first`` on."""
    for c in gl.static_range(CHUNKS):
        load_tile(operand, [batch, row, head, c * WIDTH], barrier, buffer.index(first + c))


@gluon.jit
def load_operands(
    q,
    k,
    v,
    ring,
    sizes,
    WIDTH: gl.constexpr,
    CHUNKS: gl.constexpr,
    VALUES: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """The loading warp: loads Q of each tile, and K and V block after block into the rings."""
    sq, sk, sv, _, q_full, q_empty, k_full, k_empty, v_full, v_empty = ring
    tiles_m, heads, _, of_sequence, group, _, _, _ = sizes
    BYTES: gl.constexpr = BLOCK * WIDTH * 2
    slot = 0
    phase = 1  # all slots are free at first
    turn = 0
    for index in range(gl.program_id(0), tiles_m * heads, gl.num_programs(0)):
        row, end, head = tile_of(index, sizes)
        batch = head // of_sequence
        member = head % of_sequence
        n = blocks_of(end, sizes, CAUSAL, BLOCK)
        for i in range(n):
            key = (n - 1 - i) * BLOCK
            mbarrier.wait(k_empty.index(slot), phase)
            mbarrier.expect(k_full.index(slot), BYTES * CHUNKS)
            load_chunks(k, batch, key, member // group, k_full.index(slot), sk, slot * CHUNKS, WIDTH, CHUNKS)
            if i == 0:
                for g in gl.static_range(2):
                    which = turn % AHEAD * 2 + g
                    mbarrier.wait(q_empty.index(which), turn // AHEAD % 2 ^ 1)
                    mbarrier.expect(q_full.index(which), ROWS * WIDTH * CHUNKS * 2)
                    at = row + g * ROWS
                    load_chunks(q, batch, at, member, q_full.index(which), sq, which * CHUNKS, WIDTH, CHUNKS)
            mbarrier.wait(v_empty.index(slot), phase)
            mbarrier.expect(v_full.index(slot), BYTES * VALUES)
            load_chunks(v, batch, key, member // group, v_full.index(slot), sv, slot * VALUES, WIDTH, VALUES)
            slot, phase = next_slot(slot, phase, STAGES)
        turn += 1


@gluon.jit
def steps(
    acc,
    x,
    top,
    total,
    which,
    dtype,
    ring,
    scale,
    slot,
    phase,
    n,
    S: gl.constexpr,
    L: gl.constexpr,
    WHICH: gl.constexpr,
    WIDTH: gl.constexpr,
    CHUNKS: gl.constexpr,
    VALUES: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    TREE: gl.constexpr,
):
    """All steps of a tile after its first: n - 1 blocks without a mask.

    ``acc``, of (ROWS, WIDTH) each, and ``x`` (ROWS, BLOCK), the exponentials of the block before, are f32. ``top`` is
    the base of each row (see ``exponentials``), ``total`` its running sum. ``x`` is rounded to ``dtype`` only where it
    is multiplied: bf16 values carried by a loop would be unpacked and packed again. Q, in slot ``which``, is free after
    the last scores.
    """
    sq, sk, sv, _, _, q_empty, k_full, k_empty, v_full, v_empty = ring
    A: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    LAGGING: gl.constexpr = WIDTH * VALUES >= LAGGING_COLUMNS
    for i in range(n - 1):
        last = slot
        last_phase = phase
        slot, phase = next_slot(slot, phase, STAGES)
        p = gl.convert_layout(x.to(dtype), A)
        mbarrier.wait(k_full.index(slot), phase)
        bar_sync(FREE + WHICH, 256)
        s = scores(sq, sk, which, slot, S, WIDTH, CHUNKS, BLOCK)
        mbarrier.wait(v_full.index(last), last_phase)
        acc = added(acc, p, sv, last, WIDTH, VALUES, BLOCK)
        bar_arrive(FREE + 1 - WHICH, 256)
        s = warpgroup_mma_wait(VALUES, deps=(s,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        if AHEAD == 1:  # before the exponentials, so that the next tile's Q arrives meanwhile
            mbarrier.arrive(q_empty.index(which), count=1, pred=i == n - 2)
        # The scale is not negative (``positive``), so one multiplication per row is enough for the maxima.
        top, x, factor = exponentials(s, top, row_max(s, TREE) * scale, scale, LAGGING)
        total = rescaled(total, factor) + row_sum(x)
        acc, x = finished(acc, x, VALUES)
        mbarrier.arrive(v_empty.index(last), count=1)
        if LAGGING:
            acc = scaled_seldom(acc, factor, L, VALUES)
        else:
            acc = scaled(acc, factor, L, VALUES)
    mbarrier.arrive(q_empty.index(which), count=1, pred=(AHEAD > 1) | (n == 1))
    return acc, x, top, total, slot, phase


@gluon.jit
def multiply(
    out,
    lse,
    scale,
    ring,
    sizes,
    WHICH: gl.constexpr,
    WIDTH: gl.constexpr,
    CHUNKS: gl.constexpr,
    VALUES: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    CAUSAL: gl.constexpr,
    TREE: gl.constexpr,
):
    """A multiplying warpgroup: rows WHICH * ROWS to WHICH * ROWS + ROWS - 1 of each tile of this program."""
    sq, sk, sv, so, q_full, _, k_full, k_empty, v_full, v_empty = ring
    tiles_m, heads, _, of_sequence, _, _, _, _ = sizes
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    signed = scale
    scale = gl.abs(scale) * LOG2_E
    if WHICH == 1:
        bar_arrive(FREE, 256)
    mine = gl.cdiv(tiles_m * heads - gl.program_id(0), gl.num_programs(0))
    row, n, slot, phase = own_blocks(
        gl.program_id(0), ring, sizes, gl.to_tensor(0), gl.to_tensor(0), WHICH, BLOCK, STAGES, CAUSAL
    )
    mbarrier.wait(q_full.index(WHICH), 0)
    mbarrier.wait(k_full.index(slot), phase)
    positive(sq, WHICH, signed, L, WIDTH, CHUNKS)
    s = scores(sq, sk, WHICH, slot, S, WIDTH, CHUNKS, BLOCK)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index(slot), count=1)
    top, x, total = first_softmax(s, row, n, sizes, scale, S, BLOCK, CAUSAL, TREE)
    acc = zeros(L, WIDTH, VALUES)
    for turn in range(mine - 1):
        which = turn % AHEAD * 2 + WHICH
        acc, x, top, total, slot, phase = steps(
            acc,
            x,
            top,
            total,
            which,
            out.dtype,
            ring,
            scale,
            slot,
            phase,
            n,
            S,
            L,
            WHICH,
            WIDTH,
            CHUNKS,
            VALUES,
            BLOCK,
            STAGES,
            AHEAD,
            TREE,
        )
        # The last product with V, and the first scores of the next tile.
        last = slot
        last_phase = phase
        slot, phase = next_slot(slot, phase, STAGES)
        row, n, slot, phase = own_blocks(
            gl.program_id(0) + (turn + 1) * gl.num_programs(0), ring, sizes, slot, phase, WHICH, BLOCK, STAGES, CAUSAL
        )
        which = (turn + 1) % AHEAD * 2 + WHICH
        p = gl.convert_layout(x.to(out.dtype), A)
        mbarrier.wait(q_full.index(which), (turn + 1) // AHEAD % 2)
        positive(sq, which, signed, L, WIDTH, CHUNKS)
        mbarrier.wait(k_full.index(slot), phase)
        bar_sync(FREE + WHICH, 256)
        s = scores(sq, sk, which, slot, S, WIDTH, CHUNKS, BLOCK)
        mbarrier.wait(v_full.index(last), last_phase)
        acc = added(acc, p, sv, last, WIDTH, VALUES, BLOCK)
        bar_arrive(FREE + 1 - WHICH, 256)
        s = warpgroup_mma_wait(VALUES, deps=(s,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        new, x, sums = first_softmax(s, row, n, sizes, scale, S, BLOCK, CAUSAL, TREE)
        acc, x = finished(acc, x, VALUES)
        mbarrier.arrive(v_empty.index(last), count=1)
        # Recomputed, because there are no registers to keep it.
        row, _, head = tile_of(opaque(gl.program_id(0) + turn * gl.num_programs(0)), sizes)
        row += WHICH * ROWS
        write(acc, top, total, out, lse, so.index(WHICH), head, of_sequence, row, S, L, WIDTH, VALUES)
        top = new
        total = sums
        acc = zeros(L, WIDTH, VALUES)
    acc, x, top, total, slot, phase = steps(
        acc,
        x,
        top,
        total,
        (mine - 1) % AHEAD * 2 + WHICH,
        out.dtype,
        ring,
        scale,
        slot,
        phase,
        n,
        S,
        L,
        WHICH,
        WIDTH,
        CHUNKS,
        VALUES,
        BLOCK,
        STAGES,
        AHEAD,
        TREE,
    )
    mbarrier.wait(v_full.index(slot), phase)
    p = gl.convert_layout(x.to(out.dtype), A)
    acc, _ = finished(added(acc, p, sv, slot, WIDTH, VALUES, BLOCK), x, VALUES)
    row, _, head = tile_of(opaque(gl.program_id(0) + (mine - 1) * gl.num_programs(0)), sizes)
    row += WHICH * ROWS
    write(acc, top, total, out, lse, so.index(WHICH), head, of_sequence, row, S, L, WIDTH, VALUES)
    store_wait(0)


@gluon.jit
def attention_wgmma_kernel(
    q,
    k,
    v,
    out,
    lse,
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
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    CAUSAL: gl.constexpr,
    TREE: gl.constexpr,
):
    """out = softmax(scale * q @ k.T) @ v and lse, in tiles of 128 queries and blocks of BLOCK keys.

    ``q``, ``k``, ``v`` and ``out`` are tensor maps (batch, row, head, column) of f16 or bf16 in chunks of WIDTH
    columns, of which queries and keys have CHUNKS, values VALUES; ``lse``: (batch, head, query) of f32, packed.
    ``tiles`` to ``turning``: see ``tile_of``. TREE: see ``row_max``.

    Launched with 4 warps, the first warpgroup; ``warp_specialize`` adds 5.
    """
    sq = gl.allocate_shared_memory(q.dtype, [AHEAD * 2 * CHUNKS] + q.block_type.shape, q.layout)
    sk = gl.allocate_shared_memory(k.dtype, [STAGES * CHUNKS] + k.block_type.shape, k.layout)
    sv = gl.allocate_shared_memory(v.dtype, [STAGES * VALUES] + v.block_type.shape, v.layout)
    so = gl.allocate_shared_memory(out.dtype, [2] + out.block_type.shape, out.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [AHEAD * 2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [AHEAD * 2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(AHEAD * 2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    ring = (sq, sk, sv, so, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (tiles, heads, section, of_sequence, group, keys, shift, turning)
    gl.warp_specialize(
        [
            (multiply, (out, lse, scale, ring, sizes, 0, WIDTH, CHUNKS, VALUES, BLOCK, STAGES, AHEAD, CAUSAL, TREE)),
            (multiply, (out, lse, scale, ring, sizes, 1, WIDTH, CHUNKS, VALUES, BLOCK, STAGES, AHEAD, CAUSAL, TREE)),
            (load_operands, (q, k, v, ring, sizes, WIDTH, CHUNKS, VALUES, BLOCK, STAGES, AHEAD, CAUSAL)),
        ],
        [4, 1],  # warps of the second and the third partition
        [240, 24],  # registers per thread there
    )
