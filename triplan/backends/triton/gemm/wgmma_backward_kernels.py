"""Kernel of the backward op's ``wgmma``: two matrix products and column sums in one launch on Hopper (Gluon).

As in ``wgmma_kernels``, one warp loads by TMA through a ring of slots, two warpgroups multiply, and work is dealt to
one program per multiprocessor. The work list holds the tiles of the first product, those of the second one, then the
strips of columns to be summed, unless these are summed on the way or afterwards. So the multiprocessors that the last
tiles would leave idle have work, and the second product's first operands arrive while the first one's last results are
written. Where tiles of the first product take much longer, programs that have one more of these take ``few`` of the
second's, and the others take the rest.

Where the first product has fewer tiles than there are programs, its k is cut into parts. Each part of a tile is an item
of the work list, as if it were a tile, and writes partial sums, which another launch adds in order.

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
from triplan.backends.triton.common.meeting_kernels import PATIENCE, close_meetings, meet, open_meetings
from triplan.backends.triton.common.rings_kernels import next_slot
from triplan.backends.triton.gemm.wgmma_column_sums_kernels import (
    load_strips,
    no_rows,
    store_sums,
    sum_strips,
)
from triplan.backends.triton.gemm.wgmma_deal_kernels import items_in, place_of, rest_of, share_of
from triplan.backends.triton.gemm.wgmma_kernels import multiply_steps
from triplan.backends.triton.gemm.wgmma_shared_kernels import HALF, identity, write_tile


@gluon.jit
def as_block(buffer, operand):
    """The bytes of ``buffer`` as a block of ``operand``, a tensor map."""
    return reinterpret(buffer, operand.dtype, operand.block_type.shape, operand.layout)


@gluon.jit
def load_product(
    maps,
    ring,
    extent,
    group_m,
    share,
    meetings,
    turn,
    patience,
    slot,
    phase,
    X_ROWS: gl.constexpr,
    Y_ROWS: gl.constexpr,
    PIECES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Load the operands of this program's ``share`` of one product's items, x (m, k) and y (k, n), through the ring.

    ``turn``: items that this program has loaded before. Returns the next slot, the phase of its barriers, and what is
    left of ``patience``, see ``meet``.
    """
    x, y = maps
    sx, sy, full, empty, _ = ring
    _, _, steps, _ = extent
    BYTES: gl.constexpr = (2 * HALF + BLOCK_N) * BLOCK_K * (x.dtype.primitive_bitwidth // 8)
    start, stride, mine = share
    for i in range(mine):
        patience = meet(meetings, turn + i, patience)
        part_of_k, tile_m, tile_n = place_of(start + i * stride, extent, group_m)
        row = tile_m * 2 * HALF
        column = tile_n * BLOCK_N
        for step in range(steps):
            depth = (part_of_k * steps + step) * BLOCK_K
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
    return slot, phase, patience


@gluon.jit
def load_both(
    first,
    second,
    ring,
    sums,
    group_m,
    few,
    counter,
    rounds,
    X1_ROWS: gl.constexpr,
    Y1_ROWS: gl.constexpr,
    X2_ROWS: gl.constexpr,
    Y2_ROWS: gl.constexpr,
    PIECES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    STRIPS: gl.constexpr,
):
    """The loading warp: the operands of both products, then the strips, through the ring.

    X1_ROWS and so on: the matrix is row-major; else the map is that of its transpose.
    """
    previous_wait()
    maps, extent = first
    none = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # all slots are free at first: waiting for the phase before the first one returns at once
    done = items_in(extent)
    share = share_of(done)
    meetings = open_meetings(counter, rounds)
    patience = gl.to_tensor(PATIENCE)
    slot, phase, patience = load_product(
        maps,
        ring,
        extent,
        group_m,
        share,
        meetings,
        none,
        patience,
        none,
        phase,
        X1_ROWS,
        Y1_ROWS,
        PIECES,
        BLOCK_N,
        BLOCK_K,
        STAGES,
    )
    turn = share[2]
    maps, extent = second
    share = rest_of(done, items_in(extent), few)
    slot, phase, _patience = load_product(
        maps,
        ring,
        extent,
        group_m,
        share,
        meetings,
        turn,
        patience,
        slot,
        phase,
        X2_ROWS,
        Y2_ROWS,
        PIECES,
        BLOCK_N,
        BLOCK_K,
        STAGES,
    )
    close_meetings(meetings)
    if STRIPS:
        load_strips(sums, ring, done + items_in(extent), slot, phase, BLOCK_N, BLOCK_K, STAGES)


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
    sums,
    SUMS_X: gl.constexpr,
    PARTIAL: gl.constexpr,
):
    """c = alpha * x @ y on warpgroup WHICH's part of this program's ``share``, as in ``wgmma_kernels.multiply``.

    With SUMS_X, x is the transpose of a matrix (k, columns), whose columns the first column of tiles also sums, into
    ``sums``: (output (parts of k, columns), columns). PARTIAL: None, or the layout of a block of c, which is (parts of
    k, m, n), as a matrix. ``turns`` and ``taken`` count the items and steps that this program has done. Returns both
    after the product.
    """
    x, y = maps
    c, sc, alpha = results
    sx, sy, full, empty, order = ring
    _, _, steps, _ = extent
    PINGPONG: gl.constexpr = PIECES == 1
    ROWS: gl.constexpr = 2 * HALF // PIECES
    BUFFERS: gl.constexpr = sc.shape[0] // 2
    first: gl.constexpr = WHICH * BUFFERS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    result = (c, alpha, alpha, alpha)
    slots = (sx, sy, sc, full, empty, order)
    start, stride, mine = share
    last = 0
    # In ping-pong: this group's first tile.
    begin = (turns + WHICH) % 2 if PINGPONG else gl.to_tensor(0)
    for i in range(begin, mine, 2 if PINGPONG else 1):
        turn = turns + i
        part, tile_m, tile_n = place_of(start + i * stride, extent, group_m)
        at = taken + i * steps
        slot = at % STAGES
        phase = at // STAGES % 2
        if PINGPONG:
            # A barrier shows only the parity of its phase: see ``wgmma_kernels.multiply``.
            mbarrier.wait(order.index(WHICH), (turn // 2 + 1 - WHICH) % 2)
        row = tile_m * 2 * HALF + (0 if PINGPONG else WHICH * HALF)
        column = tile_n * BLOCK_N
        acc = gl.zeros((ROWS, BLOCK_N), gl.float32, layout)
        if SUMS_X and tile_n == 0:
            total = no_rows()
            acc, slot, phase, last, total = multiply_steps(
                acc,
                slots,
                steps,
                slot,
                phase,
                last,
                as_block,
                x,
                y,
                WHICH,
                X_ROWS,
                Y_ROWS,
                PINGPONG,
                STAGES,
                total,
                SUMS_X,
            )
            out, columns = sums
            store_sums(total, out if PARTIAL is None else out + part * columns, row, columns)
        else:
            acc, slot, phase, last, _ = multiply_steps(
                acc, slots, steps, slot, phase, last, as_block, x, y, WHICH, X_ROWS, Y_ROWS, PINGPONG, STAGES
            )
        write_tile(acc, alpha, result, sc, part, row, column, layout, PARTIAL, first, BUFFERS, False, identity)
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
    SUMS_X1: gl.constexpr,
    SUMS_X2: gl.constexpr,
    STRIPS: gl.constexpr,
    PARTIAL_1: gl.constexpr,
):
    """c1 = alpha * x1 @ y1, c2 = alpha * x2 @ y2, then strips of column sums: warpgroup WHICH's share (0 or 1)."""
    previous_wait()
    maps, extent, results = first
    none = gl.to_tensor(0)
    turns, taken = multiply_product(
        maps,
        results,
        ring,
        extent,
        group_m,
        share_of(items_in(extent)),
        none,
        none,
        WHICH,
        X1_ROWS,
        Y1_ROWS,
        PIECES,
        BLOCK_N,
        BLOCK_K,
        STAGES,
        sums,
        SUMS_X1,
        PARTIAL_1,
    )
    done = items_in(extent)
    maps, extent, results = second
    _, taken = multiply_product(
        maps,
        results,
        ring,
        extent,
        group_m,
        rest_of(done, items_in(extent), few),
        turns,
        taken,
        WHICH,
        X2_ROWS,
        Y2_ROWS,
        PIECES,
        BLOCK_N,
        BLOCK_K,
        STAGES,
        sums,
        SUMS_X2,
        None,
    )
    if STRIPS:
        sum_strips(sums, ring, done + items_in(extent), taken, WHICH, BLOCK_N, BLOCK_K, STAGES)
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
    tiles_m1,
    tiles_n1,
    steps1,
    tiles_m2,
    tiles_n2,
    steps2,
    rows,
    columns,
    parts,
    group_m,
    few,
    counter,
    rounds,
    X1_ROWS: gl.constexpr,
    Y1_ROWS: gl.constexpr,
    X2_ROWS: gl.constexpr,
    Y2_ROWS: gl.constexpr,
    PIECES: gl.constexpr,
    BUFFERS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    SUMS_X1: gl.constexpr,
    SUMS_X2: gl.constexpr,
    PARTIAL_1: gl.constexpr,
):
    """c1 = alpha * x1 @ y1 and c2 = alpha * x2 @ y2 in tiles of 128 by BLOCK_N; sums = the sum of a matrix's rows.

    ``xi`` (mi, ki), ``yi`` (ki, ni) and ``ci`` (mi, ni) are tensor maps: f16 or bf16, and ``ci`` may be f32; ki >= 1.
    ``tiles_mi``, ``tiles_ni`` and ``stepsi``: tiles along mi and ni, and steps of BLOCK_K along ki. ``few``: see
    ``rest_of``.

    ``sums`` (columns,), a pointer or None: of the matrix (rows, columns) that ``summed`` maps in blocks of BLOCK_K by
    half of BLOCK_N; or, if that is None, of the transpose of xi, with SUMS_Xi, and BLOCK_K is 64. PIECES is then 2.

    ``parts``: into how many parts, each of ``steps1``, k1 is cut; the last may have steps beyond k1, where TMA reads
    zeros. With PARTIAL_1, the layout of a block as a matrix, c1 is a map of partial products (parts, m1, n1) in f32,
    whose blocks are no larger than those of c2; ``sums`` of x1 are partial, too.

    Runs on 4 warps, the first warpgroup, and 5 more that ``warp_specialize`` adds.
    """
    sx = gl.allocate_shared_memory(x1.dtype, [STAGES * PIECES] + x1.block_type.shape, x1.layout)
    sy = gl.allocate_shared_memory(y1.dtype, [STAGES] + y1.block_type.shape, y1.layout)
    sc = gl.allocate_shared_memory(c2.dtype, [2 * BUFFERS] + c2.block_type.shape, c2.layout)
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
    # As it is, where k is not cut.
    sc1 = reinterpret(sc, c1.dtype, [2 * BUFFERS] + c1.block_type.shape, c1.layout)
    extent1 = (tiles_m1, tiles_n1, steps1, parts)
    extent2 = (tiles_m2, tiles_n2, steps2, gl.to_tensor(1))
    one = ((x1, y1), extent1, (c1, sc1, alpha))
    two = ((x2, y2), extent2, (c2, sc, alpha))
    STRIPS: gl.constexpr = summed is not None
    # A partition takes no None.
    summing = (summed, sums, rows, columns) if STRIPS else ((sums, columns) if SUMS_X1 or SUMS_X2 else (alpha,))
    loaded_one = ((x1, y1), extent1)
    loaded_two = ((x2, y2), extent2)
    gl.warp_specialize(
        [
            (
                multiply_both,
                (
                    one,
                    two,
                    ring,
                    summing,
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
                    SUMS_X1,
                    SUMS_X2,
                    STRIPS,
                    PARTIAL_1,
                ),
            ),
            (
                multiply_both,
                (
                    one,
                    two,
                    ring,
                    summing,
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
                    SUMS_X1,
                    SUMS_X2,
                    STRIPS,
                    PARTIAL_1,
                ),
            ),
            (
                load_both,
                (
                    loaded_one,
                    loaded_two,
                    ring,
                    summing,
                    group_m,
                    few,
                    counter,
                    rounds,
                    X1_ROWS,
                    Y1_ROWS,
                    X2_ROWS,
                    Y2_ROWS,
                    PIECES,
                    BLOCK_N,
                    BLOCK_K,
                    STAGES,
                    STRIPS,
                ),
            ),
        ],
        [4, 1],  # warps of the second and the third partition
        [232, 40],  # registers of their threads
    )
