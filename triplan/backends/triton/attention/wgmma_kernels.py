"""Kernel of ``wgmma``: attention on Hopper (Gluon), persistent and warp-specialised.

One warp loads by TMA; two warpgroups take turns, each with 64 of a tile's 128 queries: while one multiplies, the other
computes exponentials (FlashAttention-3, arXiv 2407.08608). A step is one block of keys. It issues q @ k.T of this block
together with p @ v of the block before; a tile's last step also issues the first scores of the next tile. K and V go
through rings of STAGES slots, Q through two slots, so that the next tile's Q arrives early.

The position of row 0 is a multiple of a tile, so that with a causal mask a tile ends where a block of keys ends, and
only its last block of keys needs a mask. Blocks are visited from the last to the first: each row sees a key in the
masked block, before any block without a mask. TMA reads rows beyond the queries as 0 and does not write them.
"""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import (
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    store_tile,
    store_wait,
    thread_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triplan.backends.triton.attention.wgmma_shared_kernels import (
    FREE,
    LN_2,
    LOG2_E,
    ROWS,
    bar_arrive,
    bar_sync,
    following,
    matrix,
    numbered_tile,
    opaque,
)

#: Slots of Q: for the tile that is multiplied, and for the next one.
AHEAD = gl.constexpr(2)


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
def load_operands(
    q, k, v, ring, sizes, WIDTH: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr
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
            mbarrier.expect(k_full.index(slot), BYTES)
            load_tile(k, [batch, key, member // group, 0], k_full.index(slot), sk.index(slot))
            if i == 0:
                for g in gl.static_range(2):
                    which = turn % AHEAD * 2 + g
                    mbarrier.wait(q_empty.index(which), turn // AHEAD % 2 ^ 1)
                    mbarrier.expect(q_full.index(which), ROWS * WIDTH * 2)
                    load_tile(q, [batch, row + g * ROWS, member, 0], q_full.index(which), sq.index(which))
            mbarrier.wait(v_empty.index(slot), phase)
            mbarrier.expect(v_full.index(slot), BYTES)
            load_tile(v, [batch, key, member // group, 0], v_full.index(slot), sv.index(slot))
            slot, phase = following(slot, phase, STAGES)
        turn += 1


@gluon.jit
def halved(x):
    """Elementwise maxima of the left and the right half of the columns, repeated until 8 columns are left."""
    if x.shape[1] > 8:
        left, right = x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()
        x = halved(gl.maximum(left, right))
    return x


@gluon.jit
def row_max(s, TREE: gl.constexpr):
    """The maximum of each row. TREE: by halves, because gl.max is a chain of dependent instructions in each thread."""
    if TREE:
        found = gl.convert_layout(gl.max(halved(s), 1), gl.SliceLayout(1, s.type.layout))
    else:
        found = gl.max(s, 1)
    return found


@gluon.jit
def row_sum(x):
    """A partial sum of each row per thread, so that threads exchange nothing until ``whole``."""
    return gl.sum(gl.sum(x.reshape((x.shape[0], x.shape[1] // 8, 4, 2)), 3), 1)


@gluon.jit
def rescaled(total, factor):
    """total * factor for each row; ``total`` as from ``row_sum``."""
    return total * gl.convert_layout(factor, gl.SliceLayout(1, total.type.layout))[:, None]


@gluon.jit
def whole(total, S: gl.constexpr):
    """The sum of each row, from ``row_sum``."""
    return gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, S))


@gluon.jit
def positive(qs, scale, L: gl.constexpr):
    """``qs`` (ROWS, WIDTH) in shared memory times the sign of ``scale``: then abs(scale) scales its scores."""
    if scale < 0:
        qs.store(-qs.load(L))
        fence_async_shared()
        thread_barrier()


@gluon.jit
def first_softmax(
    s, row, n, sizes, scale, S: gl.constexpr, BLOCK: gl.constexpr, CAUSAL: gl.constexpr, TREE: gl.constexpr
):
    """(maxima, exponentials, sums) of ``s`` (ROWS, BLOCK), the scores of a tile's last block of keys, visited first.

    Scores are masked beyond the keys and, if CAUSAL, beyond the diagonal. A row that sees no key has the maximum -inf
    and the sum 0.
    """
    _, _, _, _, _, keys, shift, _ = sizes
    # Without a causal mask all tiles have the same mask, which the compiler would hoist out of the loop, and spill.
    column = opaque((n - 1) * BLOCK)
    limit = gl.full([ROWS], 0, gl.int32, layout=gl.SliceLayout(1, S)) + (keys - column)
    if CAUSAL:
        limit = gl.minimum(limit, gl.arange(0, ROWS, layout=gl.SliceLayout(1, S)) + (row + shift - column + 1))
    columns = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, S))
    s = gl.where(columns[None, :] < limit[:, None], s * scale, float("-inf"))
    top = row_max(s, TREE)
    x = gl.exp2(s - gl.where(top == float("-inf"), 0.0, top)[:, None])
    return top, x, row_sum(x)


@gluon.jit
def steps(
    acc,
    x,
    top,
    total,
    qs,
    ring,
    scale,
    slot,
    phase,
    n,
    S: gl.constexpr,
    L: gl.constexpr,
    WHICH: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    TREE: gl.constexpr,
):
    """All steps of a tile after its first: n - 1 blocks without a mask.

    ``acc`` (ROWS, WIDTH) and ``x`` (ROWS, BLOCK), the exponentials of the block before, are f32. ``top`` is the running
    maximum of each row, as a base-2 logarithm, ``total`` its running sum. ``x`` is rounded only where it is multiplied:
    bf16 values carried by a loop would be unpacked and packed again.
    """
    _, sk, sv, _, _, _, k_full, k_empty, v_full, v_empty = ring
    A: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    for _ in range(n - 1):
        last = slot
        last_phase = phase
        slot, phase = following(slot, phase, STAGES)
        p = gl.convert_layout(x.to(qs.dtype), A)
        mbarrier.wait(k_full.index(slot), phase)
        bar_sync(FREE + WHICH, 256)
        s = gl.zeros((ROWS, BLOCK), gl.float32, S)
        s = warpgroup_mma(qs, matrix(sk.index(slot), BLOCK, WIDTH).permute((1, 0)), s, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(last), last_phase)
        acc = warpgroup_mma(p, matrix(sv.index(last), BLOCK, WIDTH), acc, is_async=True)
        bar_arrive(FREE + 1 - WHICH, 256)
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        # The scale is not negative (``positive``), so one multiplication per row is enough for the maxima.
        new = gl.maximum(top, row_max(s, TREE) * scale)
        # A row may be all -inf so far, if its scores overflowed: -inf - -inf would be NaN.
        base = gl.where(new == float("-inf"), 0.0, new)
        x = gl.exp2(s * scale - base[:, None])
        factor = gl.exp2(top - base)
        total = rescaled(total, factor) + row_sum(x)
        acc, x = warpgroup_mma_wait(0, deps=(acc, x))
        mbarrier.arrive(v_empty.index(last), count=1)
        acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, L))[:, None]
        top = new
    return acc, x, top, total, slot, phase


@gluon.jit
def write(
    acc,
    top,
    total,
    out,
    lse,
    buffer,
    head,
    of_sequence,
    row,
    S: gl.constexpr,
    L: gl.constexpr,
    WIDTH: gl.constexpr,
):
    """Store a warpgroup's rows of ``out`` and ``lse``; 0 and -inf for a row that sees no key."""
    total = whole(total, S)
    # Scores that overflowed to +inf have the sum 0, too; they become NaN.
    none = (total == 0.0) & (top == float("-inf"))
    logarithm = gl.where(none, float("-inf"), (top + gl.log2(total)) * LN_2)
    inverse = gl.where(none, 0.0, 1.0 / total)
    result = acc * gl.convert_layout(inverse, gl.SliceLayout(1, L))[:, None]
    store_wait(0)
    thread_barrier()
    matrix(buffer, ROWS, WIDTH).store(result.to(out.dtype))
    fence_async_shared()
    thread_barrier()
    store_tile(out, [head // of_sequence, row, head % of_sequence, 0], buffer)
    length = out.shape[1]
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
    gl.store(lse + head.to(gl.int64) * length + rows, logarithm, mask=rows < length)


@gluon.jit
def multiply(
    out,
    lse,
    scale,
    ring,
    sizes,
    WHICH: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    TREE: gl.constexpr,
):
    """A multiplying warpgroup: rows WHICH * ROWS to WHICH * ROWS + ROWS - 1 of each tile of this program."""
    sq, sk, sv, so, q_full, q_empty, k_full, k_empty, v_full, v_empty = ring
    tiles_m, heads, _, of_sequence, _, _, _, _ = sizes
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    signed = scale
    scale = gl.abs(scale) * LOG2_E
    if WHICH == 1:
        bar_arrive(FREE, 256)
    mine = gl.cdiv(tiles_m * heads - gl.program_id(0), gl.num_programs(0))
    row, end, _ = tile_of(gl.program_id(0), sizes)
    row += WHICH * ROWS
    n = blocks_of(end, sizes, CAUSAL, BLOCK)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    mbarrier.wait(q_full.index(WHICH), 0)
    mbarrier.wait(k_full.index(slot), phase)
    qs = matrix(sq.index(WHICH), ROWS, WIDTH)
    positive(qs, signed, L)
    s = gl.zeros((ROWS, BLOCK), gl.float32, S)
    s = warpgroup_mma(qs, matrix(sk.index(slot), BLOCK, WIDTH).permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index(slot), count=1)
    top, x, total = first_softmax(s, row, n, sizes, scale, S, BLOCK, CAUSAL, TREE)
    acc = gl.zeros((ROWS, WIDTH), gl.float32, L)
    for turn in range(mine - 1):
        which = turn % AHEAD * 2 + WHICH
        qs = matrix(sq.index(which), ROWS, WIDTH)
        acc, x, top, total, slot, phase = steps(
            acc, x, top, total, qs, ring, scale, slot, phase, n, S, L, WHICH, WIDTH, BLOCK, STAGES, TREE
        )
        mbarrier.arrive(q_empty.index(which), count=1)
        # The last product with V, and the first scores of the next tile.
        row, end, _ = tile_of(gl.program_id(0) + (turn + 1) * gl.num_programs(0), sizes)
        row += WHICH * ROWS
        n = blocks_of(end, sizes, CAUSAL, BLOCK)
        which = (turn + 1) % AHEAD * 2 + WHICH
        last = slot
        last_phase = phase
        slot, phase = following(slot, phase, STAGES)
        p = gl.convert_layout(x.to(out.dtype), A)
        mbarrier.wait(q_full.index(which), (turn + 1) // AHEAD % 2)
        qs = matrix(sq.index(which), ROWS, WIDTH)
        positive(qs, signed, L)
        mbarrier.wait(k_full.index(slot), phase)
        bar_sync(FREE + WHICH, 256)
        s = gl.zeros((ROWS, BLOCK), gl.float32, S)
        s = warpgroup_mma(qs, matrix(sk.index(slot), BLOCK, WIDTH).permute((1, 0)), s, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(last), last_phase)
        acc = warpgroup_mma(p, matrix(sv.index(last), BLOCK, WIDTH), acc, is_async=True)
        bar_arrive(FREE + 1 - WHICH, 256)
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        new, x, sums = first_softmax(s, row, n, sizes, scale, S, BLOCK, CAUSAL, TREE)
        acc, x = warpgroup_mma_wait(0, deps=(acc, x))
        mbarrier.arrive(v_empty.index(last), count=1)
        # Recomputed, because there are no registers to keep it.
        row, _, head = tile_of(opaque(gl.program_id(0) + turn * gl.num_programs(0)), sizes)
        row += WHICH * ROWS
        write(acc, top, total, out, lse, so.index(WHICH), head, of_sequence, row, S, L, WIDTH)
        top = new
        total = sums
        acc = gl.zeros((ROWS, WIDTH), gl.float32, L)
    qs = matrix(sq.index((mine - 1) % AHEAD * 2 + WHICH), ROWS, WIDTH)
    acc, x, top, total, slot, phase = steps(
        acc, x, top, total, qs, ring, scale, slot, phase, n, S, L, WHICH, WIDTH, BLOCK, STAGES, TREE
    )
    mbarrier.wait(v_full.index(slot), phase)
    p = gl.convert_layout(x.to(out.dtype), A)
    acc = warpgroup_mma(p, matrix(sv.index(slot), BLOCK, WIDTH), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    row, _, head = tile_of(opaque(gl.program_id(0) + (mine - 1) * gl.num_programs(0)), sizes)
    row += WHICH * ROWS
    write(acc, top, total, out, lse, so.index(WHICH), head, of_sequence, row, S, L, WIDTH)
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
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    TREE: gl.constexpr,
):
    """out = softmax(scale * q @ k.T) @ v and lse, in tiles of 128 queries and blocks of BLOCK keys.

    ``q``, ``k``, ``v`` and ``out`` are tensor maps (batch, row, head, up to WIDTH) of f16 or bf16; ``lse``: (batch,
    head, query) of f32, packed. ``tiles`` to ``turning``: see ``tile_of``. TREE: see ``row_max``.

    Launched with 4 warps, the first warpgroup; ``warp_specialize`` adds 5.
    """
    sq = gl.allocate_shared_memory(q.dtype, [AHEAD * 2] + q.block_type.shape, q.layout)
    sk = gl.allocate_shared_memory(k.dtype, [STAGES] + k.block_type.shape, k.layout)
    sv = gl.allocate_shared_memory(v.dtype, [STAGES] + v.block_type.shape, v.layout)
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
            (multiply, (out, lse, scale, ring, sizes, 0, WIDTH, BLOCK, STAGES, CAUSAL, TREE)),
            (multiply, (out, lse, scale, ring, sizes, 1, WIDTH, BLOCK, STAGES, CAUSAL, TREE)),
            (load_operands, (q, k, v, ring, sizes, WIDTH, BLOCK, STAGES, CAUSAL)),
        ],
        [4, 1],  # warps of the second and the third partition
        [240, 24],  # registers per thread there
    )
