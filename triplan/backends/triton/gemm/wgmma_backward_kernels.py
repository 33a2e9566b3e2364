"""Kernel of the backward op's ``wgmma``: two matrix products and column sums in one launch on Hopper (Gluon).

As in ``wgmma_kernels``, one warp loads by TMA through a ring of slots, two warpgroups multiply, and work is dealt to
one program per multiprocessor. The work list holds the tiles of the first product, those of the second one, then the
strips of columns to be summed. So the multiprocessors that the last tiles would leave idle have work, and the second
product's first operands arrive while the first one's last results are written. Where tiles of the first product take
much longer, programs that have one more of these take ``few`` of the second's, and the others take the rest.

Both products use the same bytes as slots; only their shape differs, where an operand lies transposed.
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
)
from triplan.backends.triton.gemm.wgmma_column_sums_kernels import first_item, load_strips, sum_strips
from triplan.backends.triton.gemm.wgmma_kernels import multiply_steps
from triplan.backends.triton.gemm.wgmma_shared_kernels import HALF, identity, next_slot, tile_of, write_tile


@gluon.jit
def as_block(buffer, operand):
    """The bytes of ``buffer`` as a block of ``operand``, a tensor map."""
    return reinterpret(buffer, operand.dtype, operand.block_type.shape, operand.layout)


@gluon.jit
def items_of(done, items):
    """How many of ``items``, which follow ``done`` others in the work list, are this program's."""
    return gl.cdiv(gl.maximum(items - first_item(done), 0), gl.num_programs(0))


@gluon.jit
def share_of(items):
    """(first, step, count) of this program's share of the first product's ``items`` tiles."""
    none = gl.to_tensor(0)
    return first_item(none), gl.num_programs(0), items_of(none, items)


@gluon.jit
def rest_of(done, items, few):
    """(first, step, count) of this program's share of the second product's ``items`` tiles.

    ``done``: tiles of the first product. ``few``: how many tiles the programs with one more of the first product take;
    -1 deals on in the order of the work list.
    """
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    more = done % programs
    others = programs - more
    given = more * few
    first = gl.where(program < more, program, given + program - more)
    step = gl.where(program < more, more, others)
    count = gl.where(program < more, few, gl.cdiv(gl.maximum(items - first, 0), others))
    plain = few < 0
    first = gl.where(plain, first_item(done), first)
    step = gl.where(plain, programs, step)
    return first, step, gl.where(plain, items_of(done, items), count)


@gluon.jit
def tiles_of(extent, BLOCK_N: gl.constexpr):
    """Tiles of a product of ``extent`` (m, n, k)."""
    m, n, _ = extent
    return gl.cdiv(m, 2 * HALF) * gl.cdiv(n, BLOCK_N)


@gluon.jit
def load_product(
    maps,
    ring,
    extent,
    group_m,
    share,
    slot,
    phase,
    X_ROWS: gl.constexpr,
    Y_ROWS: gl.constexpr,
    PIECES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Load the operands of this program's ``share`` of one product's tiles, x (m, k) and y (k, n), through the ring.

    Returns the next slot and the phase of its barriers.
    """
    x, y = maps
    sx, sy, full, empty, _ = ring
    m, n, k = extent
    tiles_m = gl.cdiv(m, 2 * HALF)
    tiles_n = gl.cdiv(n, BLOCK_N)
    steps = gl.cdiv(k, BLOCK_K)
    BYTES: gl.constexpr = (2 * HALF + BLOCK_N) * BLOCK_K * (x.dtype.primitive_bitwidth // 8)
    start, stride, mine = share
    for i in range(mine):
        tile_m, tile_n = tile_of(start + i * stride, tiles_m, tiles_n, group_m)
        row = tile_m * 2 * HALF
        column = tile_n * BLOCK_N
        for step in range(steps):
            depth = step * BLOCK_K
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(ready, BYTES)
            for piece in gl.static_range(PIECES):
                part = as_block(sx.index(slot * PIECES + piece), x)
                if X_ROWS:
                    load_tile(x, [row + piece * HALF, depth], ready, part)
                else:
                    load_tile(x, [depth, row + piece * HALF], ready, part)
            whole = as_block(sy.index(slot), y)
            if Y_ROWS:
                load_tile(y, [depth, column], ready, whole)
            else:
                load_tile(y, [column, depth], ready, whole)
            slot, phase = next_slot(slot, phase, STAGES)
    return slot, phase


@gluon.jit
def load_both(
    first,
    second,
    ring,
    sums,
    group_m,
    few,
    X1_ROWS: gl.constexpr,
    Y1_ROWS: gl.constexpr,
    X2_ROWS: gl.constexpr,
    Y2_ROWS: gl.constexpr,
    PIECES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    SUMS: gl.constexpr,
):
    """The loading warp: the operands of both products, then the strips, through the ring.

    X1_ROWS and so on: the matrix is row-major; else the map is that of its transpose.
    """
    previous_wait()
    maps, extent = first
    none = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # all slots are free at first: waiting for the phase before the first one returns at once
    share = share_of(tiles_of(extent, BLOCK_N))
    slot, phase = load_product(
        maps, ring, extent, group_m, share, none, phase, X1_ROWS, Y1_ROWS, PIECES, BLOCK_N, BLOCK_K, STAGES
    )
    done = tiles_of(extent, BLOCK_N)
    maps, extent = second
    share = rest_of(done, tiles_of(extent, BLOCK_N), few)
    slot, phase = load_product(
        maps, ring, extent, group_m, share, slot, phase, X2_ROWS, Y2_ROWS, PIECES, BLOCK_N, BLOCK_K, STAGES
    )
    if SUMS:
        load_strips(sums, ring, done + tiles_of(extent, BLOCK_N), slot, phase, BLOCK_N, BLOCK_K, STAGES)


@gluon.jit
def multiply_product(
    maps,
    results,
    ring,
    extent,
    group_m,
    share,
    turns,
    taken,
    WHICH: gl.constexpr,
    X_ROWS: gl.constexpr,
    Y_ROWS: gl.constexpr,
    PIECES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """c = alpha * x @ y on warpgroup WHICH's part of this program's ``share``, as in ``wgmma_kernels.multiply``.

    ``turns`` and ``taken`` count the tiles and steps that this program has done. Returns both after the product.
    """
    x, y = maps
    c, sc, alpha = results
    sx, sy, full, empty, order = ring
    m, n, k = extent
    tiles_m = gl.cdiv(m, 2 * HALF)
    tiles_n = gl.cdiv(n, BLOCK_N)
    steps = gl.cdiv(k, BLOCK_K)
    PINGPONG: gl.constexpr = PIECES == 1
    ROWS: gl.constexpr = 2 * HALF // PIECES
    BUFFERS: gl.constexpr = sc.shape[0] // 2
    first: gl.constexpr = WHICH * BUFFERS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    result = (c, alpha, alpha, n)
    slots = (sx, sy, sc, full, empty, order)
    start, stride, mine = share
    last = 0
    # In ping-pong: this group's first tile.
    begin = (turns + WHICH) % 2 if PINGPONG else gl.to_tensor(0)
    for i in range(begin, mine, 2 if PINGPONG else 1):
        turn = turns + i
        tile_m, tile_n = tile_of(start + i * stride, tiles_m, tiles_n, group_m)
        at = taken + i * steps
        slot = at % STAGES
        phase = at // STAGES % 2
        if PINGPONG:
            # A barrier shows only the parity of its phase: see ``wgmma_kernels.multiply``.
            mbarrier.wait(order.index(WHICH), (turn // 2 + 1 - WHICH) % 2)
        acc = gl.zeros((ROWS, BLOCK_N), gl.float32, layout)
        acc, slot, phase, last = multiply_steps(
            acc, slots, steps, slot, phase, last, as_block, x, y, WHICH, X_ROWS, Y_ROWS, PINGPONG, STAGES
        )
        row = tile_m * 2 * HALF + (0 if PINGPONG else WHICH * HALF)
        column = tile_n * BLOCK_N
        write_tile(acc, alpha, result, sc, 0, row, column, layout, None, first, BUFFERS, False, identity)
    return turns + mine, taken + mine * steps


@gluon.jit
def multiply_both(
    first,
    second,
    ring,
    sums,
    group_m,
    few,
    WHICH: gl.constexpr,
    X1_ROWS: gl.constexpr,
    Y1_ROWS: gl.constexpr,
    X2_ROWS: gl.constexpr,
    Y2_ROWS: gl.constexpr,
    PIECES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    SUMS: gl.constexpr,
):
    """c1 = alpha * x1 @ y1, c2 = alpha * x2 @ y2, then column sums: warpgroup WHICH's share (0 or 1)."""
    previous_wait()
    maps, extent, results = first
    none = gl.to_tensor(0)
    turns, taken = multiply_product(
        maps,
        results,
        ring,
        extent,
        group_m,
        share_of(tiles_of(extent, BLOCK_N)),
        none,
        none,
        WHICH,
        X1_ROWS,
        Y1_ROWS,
        PIECES,
        BLOCK_N,
        BLOCK_K,
        STAGES,
    )
    done = tiles_of(extent, BLOCK_N)
    maps, extent, results = second
    _, taken = multiply_product(
        maps,
        results,
        ring,
        extent,
        group_m,
        rest_of(done, tiles_of(extent, BLOCK_N), few),
        turns,
        taken,
        WHICH,
        X2_ROWS,
        Y2_ROWS,
        PIECES,
        BLOCK_N,
        BLOCK_K,
        STAGES,
    )
    if SUMS:
        sum_strips(sums, ring, done + tiles_of(extent, BLOCK_N), taken, WHICH, BLOCK_N, BLOCK_K, STAGES)
    store_wait(0)


@gluon.jit
def wgmma_pair_kernel(
    x1,
    y1,
    c1,
    x2,
    y2,
    c2,
    summed,
    sums,
    alpha,
    m1,
    n1,
    k1,
    m2,
    n2,
    k2,
    rows,
    columns,
    group_m,
    few,
    X1_ROWS: gl.constexpr,
    Y1_ROWS: gl.constexpr,
    X2_ROWS: gl.constexpr,
    Y2_ROWS: gl.constexpr,
    PIECES: gl.constexpr,
    BUFFERS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """c1 = alpha * x1 @ y1 and c2 = alpha * x2 @ y2 in tiles of 128 by BLOCK_N; sums = the sum of summed's rows.

    ``xi`` (mi, ki), ``yi`` (ki, ni) and ``ci`` (mi, ni) are tensor maps: f16 or bf16, and ``ci`` may be f32; ki >= 1.
    ``summed`` (rows, columns) is a map of blocks of BLOCK_K by half of BLOCK_N, ``sums`` (columns,) a pointer; both may
    be None, else PIECES is 2. ``few``: see ``rest_of``.

    Runs on 4 warps, the first warpgroup, and 5 more that ``warp_specialize`` adds.
    """
    sx = gl.allocate_shared_memory(x1.dtype, [STAGES * PIECES] + x1.block_type.shape, x1.layout)
    sy = gl.allocate_shared_memory(y1.dtype, [STAGES] + y1.block_type.shape, y1.layout)
    sc = gl.allocate_shared_memory(c1.dtype, [2 * BUFFERS] + c1.block_type.shape, c1.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PIECES)
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(order.index(i), count=1)
    # TMA arrives at these barriers: the async proxy must see them initialised (CUDA programming guide, TMA).
    fence_async_shared()
    next_may_begin()
    ring = (sx, sy, full, empty, order)
    one = ((x1, y1), (m1, n1, k1), (c1, sc, alpha))
    two = ((x2, y2), (m2, n2, k2), (c2, sc, alpha))
    SUMS: gl.constexpr = sums is not None
    strips = (summed, sums, rows, columns) if SUMS else (alpha,)
    loaded_one = ((x1, y1), (m1, n1, k1))
    loaded_two = ((x2, y2), (m2, n2, k2))
    gl.warp_specialize(
        [
            (
                multiply_both,
                (
                    one,
                    two,
                    ring,
                    strips,
                    group_m,
                    few,
                    0,
                    X1_ROWS,
                    Y1_ROWS,
                    X2_ROWS,
                    Y2_ROWS,
                    PIECES,
                    BLOCK_N,
                    BLOCK_K,
                    STAGES,
                    SUMS,
                ),
            ),
            (
                multiply_both,
                (
                    one,
                    two,
                    ring,
                    strips,
                    group_m,
                    few,
                    1,
                    X1_ROWS,
                    Y1_ROWS,
                    X2_ROWS,
                    Y2_ROWS,
                    PIECES,
                    BLOCK_N,
                    BLOCK_K,
                    STAGES,
                    SUMS,
                ),
            ),
            (
                load_both,
                (
                    loaded_one,
                    loaded_two,
                    ring,
                    strips,
                    group_m,
                    few,
                    X1_ROWS,
                    Y1_ROWS,
                    X2_ROWS,
                    Y2_ROWS,
                    PIECES,
                    BLOCK_N,
                    BLOCK_K,
                    STAGES,
                    SUMS,
                ),
            ),
        ],
        [4, 1],  # warps of the second and the third partition
        [232, 40],  # registers of their threads
    )
