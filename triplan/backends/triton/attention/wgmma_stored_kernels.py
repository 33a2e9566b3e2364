"""Kernels of ``wgmma_stored`` of the backward op: delta and lse of each row, and dq of the ds that was stored.

Between them ``attention_wgmma_dkdv_kernel`` computes dk and dv, and stores ds: five products instead of seven, for a
workspace that holds ds of a part of the heads and rows. dq is accumulated by one program in the order of the keys.
"""

# mypy: ignore-errors
# (Triton's and Gluon's languages are not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

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
from triplan.backends.runtime.jit import jit
from triplan.backends.triton.attention.shared_kernels import head_pointer, load_tile
from triplan.backends.triton.attention.tiles_backward_kernels import load_lse
from triplan.backends.triton.attention.wgmma_backward_kernels import TILE, in_order, stored_before
from triplan.backends.triton.attention.wgmma_shared_kernels import ROWS, numbered_tile
from triplan.backends.triton.common.rings_kernels import matrix, next_slot

#: Blocks of rows of a tile of dq: two for each warpgroup.
BLOCKS = gl.constexpr(4)


@jit
def attention_rows_kernel(
    out,
    dout,
    lse,
    delta,
    lse2,
    out_strides,
    dout_strides,
    lse_strides,
    queries,
    heads,
    rounded,
    VALUE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """delta = sum(dout * out) and lse2 = lse / ln(2) of each row of ``out`` and ``dout`` (batch, row, head, VALUE).

    Both are (batch * heads, ``rounded`` rows) of f32; rows beyond the queries get 0 and +inf, as lse2 has where a query
    sees no key. A program has BLOCK_Q rows of one head.
    """
    tiles = rounded // BLOCK_Q
    head = tl.program_id(0) // tiles
    row = tl.program_id(0) % tiles * BLOCK_Q + tl.arange(0, BLOCK_Q)
    of_out = head_pointer(out, out_strides, head // heads, head % heads)
    of_dout = head_pointer(dout, dout_strides, head // heads, head % heads)
    x = load_tile(of_out, out_strides, row, queries, VALUE, WIDTH, False)
    y = load_tile(of_dout, dout_strides, row, queries, VALUE, WIDTH, False)
    at = head.to(tl.int64) * rounded + row
    tl.store(delta + at, tl.sum(x.to(tl.float32) * y.to(tl.float32), 1))
    tl.store(lse2 + at, load_lse(lse, lse_strides, head // heads, head % heads, row, queries, 1.4426950408889634))


@gluon.jit
def stored_tile(index, sizes, CAUSAL: gl.constexpr):
    """(first block of rows, blocks of keys that its last row sees, query head of the part) of tile number ``index``.

    The longest tiles of a section come first. ``sizes``: tiles of rows and query heads of the part, heads of a section,
    ``turning`` of ``numbered_tile``, the part's first block of rows and the one after its last, blocks of keys,
    position of row 0.
    """
    tiles, heads, section, turning, begin, end, keys, shift = sizes
    tile, head = numbered_tile(index, tiles, heads, section, turning)
    block = begin + (tiles - 1 - tile) * BLOCKS
    if CAUSAL:
        keys = gl.maximum(gl.minimum(keys, gl.minimum(block + BLOCKS, end) + shift // ROWS), 0)
    return block, keys, head


@gluon.jit
def global_head(head, heads):
    """(batch, key head, query head) of a query head of the part. ``heads``: the part's first key head, key heads of a
    sequence, query heads per key head, first of these in the part, and how many."""
    first, of_sequence, group, begin, members = heads
    key_head = first + head // members
    own = key_head % of_sequence
    return key_head // of_sequence, own, own * group + begin + head % members


@gluon.jit
def load_stored(k, ds, ring, sizes, numbers, WIDTH: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    """The loading warp: 64 keys, and their ds with up to four blocks of rows."""
    sk, sds, _, full, empty = ring
    tiles, heads, _, _, begin, end, keys, shift = sizes
    slot = 0
    phase = 1
    per = stored_before(gl.cdiv(keys, 2), begin, end, shift, CAUSAL)
    for index in range(gl.program_id(0), tiles * heads, gl.num_programs(0)):
        block, seen, head = stored_tile(index, sizes, CAUSAL)
        batch, key_head, _ = global_head(head, numbers)
        there = gl.minimum(end - block, BLOCKS)
        for j in range(seen):
            first = 0
            at = head * per + stored_before(j // 2, begin, end, shift, CAUSAL) + block
            if CAUSAL:  # blocks of rows before the first do not see these keys; those before the tile's are not stored
                first = gl.maximum(j - shift // ROWS - block, 0)
                at -= gl.minimum(gl.maximum(j // 2 * 2 - shift // ROWS, begin), end)
            else:
                at -= begin
            mbarrier.wait(empty.index(slot), phase)
            for n in gl.static_range(1, 5):  # (expect takes constants)
                mbarrier.expect(full.index(slot), ROWS * (WIDTH + n * ROWS) * 2, pred=there - first == n)
            load_block(k, [batch, j * ROWS, key_head, 0], full.index(slot), sk.index(slot))
            for i in gl.static_range(4):
                row = (at + i) * TILE + j % 2 * ROWS
                load_block(
                    ds, [row, 0], full.index(slot), sds.index(slot * BLOCKS + i), pred=(i < there) & (i >= first)
                )
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def multiply_stored(
    dq,
    scale,
    ring,
    sizes,
    numbers,
    WHICH: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """A multiplying warpgroup: dq of two blocks of 64 rows of each of this program's tiles."""
    sk, sds, sdq, full, empty = ring
    tiles, heads, _, _, _, _, _, shift = sizes
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    last = gl.to_tensor(0)
    for index in range(gl.program_id(0), tiles * heads, gl.num_programs(0)):
        block, n, head = stored_tile(index, sizes, CAUSAL)
        batch, _, query_head = global_head(head, numbers)
        block += 2 * WHICH
        both = n
        alone = n  # the block of keys that only the second block of rows sees
        if CAUSAL:
            alone = block + 1 + shift // ROWS
            both = gl.maximum(gl.minimum(n, alone), 0)
        x = gl.zeros((ROWS, WIDTH), gl.float32, A)
        y = gl.zeros((ROWS, WIDTH), gl.float32, A)
        for j in range(both):
            mbarrier.wait(full.index(slot), phase)
            ks = matrix(sk.index(slot), ROWS, WIDTH)
            x = warpgroup_mma(sds.index(slot * BLOCKS + 2 * WHICH).permute((1, 0)), ks, x, is_async=True)
            y = warpgroup_mma(sds.index(slot * BLOCKS + 2 * WHICH + 1).permute((1, 0)), ks, y, is_async=True)
            x, y = warpgroup_mma_wait(2, deps=(x, y))
            mbarrier.arrive(empty.index(last), count=1, pred=j > 0)
            last = slot
            slot, phase = next_slot(slot, phase, STAGES)
        x, y = warpgroup_mma_wait(0, deps=(x, y))
        mbarrier.arrive(empty.index(last), count=1, pred=both > 0)
        if CAUSAL:
            for j in range(both, n):
                mbarrier.wait(full.index(slot), phase)
                if j == alone:
                    ks = matrix(sk.index(slot), ROWS, WIDTH)
                    y = warpgroup_mma(sds.index(slot * BLOCKS + 2 * WHICH + 1).permute((1, 0)), ks, y, is_async=True)
                    y = warpgroup_mma_wait(0, deps=(y,))
                mbarrier.arrive(empty.index(slot), count=1)
                slot, phase = next_slot(slot, phase, STAGES)
        store_wait(0)
        thread_barrier()
        matrix(sdq.index(2 * WHICH), ROWS, WIDTH).store(in_order((x * scale).to(dq.dtype), WIDTH))
        matrix(sdq.index(2 * WHICH + 1), ROWS, WIDTH).store(in_order((y * scale).to(dq.dtype), WIDTH))
        fence_async_shared()
        thread_barrier()
        store_block(dq, [batch, block * ROWS, query_head, 0], sdq.index(2 * WHICH))
        store_block(dq, [batch, block * ROWS + ROWS, query_head, 0], sdq.index(2 * WHICH + 1))
    store_wait(0)


@gluon.jit
def attention_wgmma_stored_dq_kernel(
    k,
    ds,
    dq,
    scale,
    tiles,
    heads,
    section,
    turning,
    block_begin,
    block_end,
    key_blocks,
    shift,
    first_head,
    of_sequence,
    group,
    member_begin,
    members,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """dq = scale * ds @ k in tiles of 256 rows, of the ds that ``attention_wgmma_dkdv_kernel`` stored for the part.

    ``k`` and ``dq``: tensor maps (batch, row, head, up to WIDTH) in blocks of 64 rows; ``ds``: of (block * 128 + key,
    row of 64) in blocks of 64 x 64. ``tiles`` to
    ``shift``: see ``stored_tile``; ``first_head`` to ``members``: see ``global_head``.

    Launched with 4 warps, the first warpgroup; ``warp_specialize`` adds 5.
    """
    next_may_begin()
    sk = gl.allocate_shared_memory(k.dtype, [STAGES] + k.block_type.shape, k.layout)
    sds = gl.allocate_shared_memory(k.dtype, [STAGES * BLOCKS] + ds.block_type.shape, ds.layout)
    sdq = gl.allocate_shared_memory(dq.dtype, [BLOCKS] + dq.block_type.shape, dq.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    ring = (sk, sds, sdq, full, empty)
    sizes = (tiles, heads, section, turning, block_begin, block_end, key_blocks, shift)
    numbers = (first_head, of_sequence, group, member_begin, members)
    previous_wait()
    gl.warp_specialize(
        [
            (multiply_stored, (dq, scale, ring, sizes, numbers, 0, WIDTH, STAGES, CAUSAL)),
            (multiply_stored, (dq, scale, ring, sizes, numbers, 1, WIDTH, STAGES, CAUSAL)),
            (load_stored, (k, ds, ring, sizes, numbers, WIDTH, STAGES, CAUSAL)),
        ],
        [4, 1],  # warps of the second and the third partition
        [232, 40],  # registers per thread there
    )
