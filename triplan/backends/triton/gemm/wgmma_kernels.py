"""Kernel of ``wgmma``: a persistent, warp-specialised matrix product on Hopper (Gluon).

One warp loads by TMA, two or three warpgroups multiply by ``wgmma``, and the tiles are dealt to one program per
multiprocessor. The warpgroups multiply 64 rows each of one tile (cooperative), or two take tiles in turns (ping-pong).

The loading warp runs ahead through a ring of STAGES slots, across the ends of tiles: the next tile's operands arrive
while the last one is written. Each slot has two barriers:

- ``full``: TMA arrives with the bytes of a step;
- ``empty``: each warpgroup that multiplies from the slot arrives when its ``wgmma`` has read it.

In ping-pong, a warpgroup arrives at the other one's ``order`` barrier when it has passed the ``full`` barriers of all
slots of its tile; only then does the other one wait for the slots that follow.

TMA reads zeros outside an operand and writes nothing outside C, so no extent has to be a multiple of a block.
"""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    next_may_begin,
    previous_wait,
    store_wait,
    thread_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triplan.backends.triton.common.rings_kernels import next_slot
from triplan.backends.triton.gemm.cuts_kernels import store_part
from triplan.backends.triton.gemm.wgmma_column_sums_kernels import add_rows
from triplan.backends.triton.gemm.wgmma_loads_kernels import items_in, load_operands, range_of, rows_of_tile
from triplan.backends.triton.gemm.wgmma_shared_kernels import (
    HALF,
    as_matrix,
    first_of_c0,
    load_bias,
    place_of,
    write_lower,
    write_tile,
)


@gluon.jit
def multiply_steps(
    acc,
    ring,
    steps,
    slot,
    phase,
    last,
    VIEW: gl.constexpr,
    of_x,
    of_y,
    WHICH: gl.constexpr,
    X_ROWS: gl.constexpr,
    Y_ROWS: gl.constexpr,
    PINGPONG: gl.constexpr,
    STAGES: gl.constexpr,
    total=0,
    SUMS_X: gl.constexpr = False,
    PIECES: gl.constexpr = 2,
):
    """acc += x @ y over ``steps`` slots, for warpgroup WHICH: its rows of a tile that PIECES share, or with PINGPONG
    all of it.

    ``acc`` (rows, columns) f32. VIEW(buffer, of_x) and VIEW(buffer, of_y) give the factors in a slot; X_ROWS, Y_ROWS:
    they lie row-major. ``last`` is the slot before ``slot``. With SUMS_X, ``total`` = add_rows(total, x) in each step,
    of x as it lies, while ``wgmma`` runs. Returns acc, the next slot, its phase, the last slot and total.
    """
    sx, sy, _, full, empty, order = ring
    for step in range(steps):
        mbarrier.wait(full.index(slot), phase)
        x = VIEW(sx.index(slot if PINGPONG else slot * PIECES + WHICH), of_x)
        y = VIEW(sy.index(slot), of_y)
        left = x if X_ROWS else x.permute((1, 0))
        right = y if Y_ROWS else y.permute((1, 0))
        running = warpgroup_mma(left, right, acc, is_async=True)
        if SUMS_X:
            # ptxas moves no load across a barrier: all of this step's ``wgmma`` are issued before the sums begin.
            thread_barrier()
            total = add_rows(total, x)
            thread_barrier()  # the warpgroup's threads have all read the slot, which is given back in the next step
        # One wgmma stays in flight; the one before it has read its slot.
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(running,))
        mbarrier.arrive(empty.index(last), count=1, pred=step > 0)
        last = slot
        slot, phase = next_slot(slot, phase, STAGES)
    if PINGPONG:
        mbarrier.arrive(order.index(1 - WHICH), count=1)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index(last), count=1)
    return acc, slot, phase, last, total


@gluon.jit
def multiply_both(
    acc,
    rest,
    ring,
    sb_rest,
    steps,
    slot,
    phase,
    last,
    WHICH: gl.constexpr,
    A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr,
    PIECES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """``acc`` and ``rest`` += A @ both blocks of columns of B over ``steps`` slots: ``multiply_steps`` of two products.

    Without a batch, and for warpgroups that share tiles. Returns acc, rest, the next slot, its phase and the last slot.
    """
    sa, sb, _, full, empty, _ = ring
    for step in range(steps):
        mbarrier.wait(full.index(slot), phase)
        x, y, z = sa.index(slot * PIECES + WHICH), sb.index(slot), sb_rest.index(slot)
        left = x if A_ROWS else x.permute((1, 0))
        acc = warpgroup_mma(left, y if B_ROWS else y.permute((1, 0)), acc, is_async=True)
        rest = warpgroup_mma(left, z if B_ROWS else z.permute((1, 0)), rest, is_async=True)
        # One step stays in flight; the one before it has read its slot.
        acc, rest = warpgroup_mma_wait(num_outstanding=2, deps=(acc, rest))
        mbarrier.arrive(empty.index(last), count=1, pred=step > 0)
        last = slot
        slot, phase = next_slot(slot, phase, STAGES)
    acc, rest = warpgroup_mma_wait(num_outstanding=0, deps=(acc, rest))
    mbarrier.arrive(empty.index(last), count=1)
    return acc, rest, slot, phase, last


@gluon.jit
def multiply(
    what,
    WHICH: gl.constexpr,
    A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr,
    PIECES: gl.constexpr,
    BUFFERS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    A_SHARED: gl.constexpr,
    B_SHARED: gl.constexpr,
    C_SHARED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_C0: gl.constexpr,
    C0_EACH: gl.constexpr,
    LOWER: gl.constexpr,
    CUT: gl.constexpr,
    REST: gl.constexpr,
):
    """C = act(alpha * A @ B + beta * C0 + bias) on warpgroup WHICH's share of this program's tiles.

    With 2 or 3 PIECES (cooperative): rows WHICH * 64 to WHICH * 64 + 63 of each tile. With 1 (ping-pong): every other
    tile, so that one group writes while the other multiplies. ``what`` is (result, ring, extent, added, partial, cut,
    sb_rest): see ``write_tile`` and ``load_operands``. Of a tile that is CUT along k, each part of A @ B goes to
    ``partial``. The last REST columns of a tile have accumulators of their own, and B's in ``sb_rest``: the extents of
    Gluon's blocks are powers of two.
    """
    result, ring, extent, added, partial, cut, sb_rest = what
    _, _, sc, _, _, order = ring
    previous_wait()
    PINGPONG: gl.constexpr = PIECES == 1
    ROWS: gl.constexpr = rows_of_tile(PIECES) // PIECES
    WIDTH: gl.constexpr = sc.shape[len(sc.shape) - 1]
    # There are no registers for elements of four bytes, nor in ping-pong, where the other group multiplies meanwhile.
    EARLY: gl.constexpr = HAS_C0 and not PINGPONG and sc.dtype.primitive_bitwidth == 16
    MAIN: gl.constexpr = BLOCK_N - REST
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, MAIN, 16])
    slot = 0
    phase = 0
    last = 0
    mine = gl.cdiv(items_in(extent, cut, LOWER, CUT) - gl.program_id(0), gl.num_programs(0))
    for turn in range(WHICH if PINGPONG else 0, mine, 2 if PINGPONG else 1):
        item = gl.program_id(0) + turn * gl.num_programs(0)
        tile, _none, steps = range_of(item, extent, cut, LOWER, CUT)
        product, tile_m, tile_n = place_of(tile, extent, LOWER)
        if PINGPONG:
            slot = turn * steps % STAGES
            phase = turn * steps // STAGES % 2
            # A barrier shows only the parity of its phase, so none of these slots may be two phases behind: the other
            # group must have passed the ``full`` barriers of all slots of its tile first.
            mbarrier.wait(order.index(WHICH), (turn // 2 + 1 - WHICH) % 2)
        held = load_bias(result, tile_n * BLOCK_N, MAIN, 4, HAS_BIAS)
        acc = gl.zeros((ROWS, MAIN), gl.float32, layout)
        row = tile_m * rows_of_tile(PIECES) + (0 if PINGPONG else WHICH * HALF)
        column = tile_n * BLOCK_N
        if EARLY:
            ahead = first_of_c0(acc, WIDTH, added, product, row, column, result[3], C0_EACH)
        else:
            ahead = held
        if REST:
            at_rest: gl.constexpr = gl.NVMMADistributedLayout(
                version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, REST, 16]
            )
            held_rest = load_bias(result, column + MAIN, REST, 4, HAS_BIAS)
            rest = gl.zeros((ROWS, REST), gl.float32, at_rest)
            acc, rest, slot, phase, last = multiply_both(
                acc, rest, ring, sb_rest, steps, slot, phase, last, WHICH, A_ROWS, B_ROWS, PIECES, STAGES
            )
        else:
            acc, slot, phase, last, _none = multiply_steps(
                acc,
                ring,
                steps,
                slot,
                phase,
                last,
                as_matrix,
                A_SHARED,
                B_SHARED,
                WHICH,
                A_ROWS,
                B_ROWS,
                PINGPONG,
                STAGES,
                PIECES=PIECES,
            )
        first: gl.constexpr = WHICH * BUFFERS
        if REST:
            store_wait(0)  # a tile's blocks may be odd: then the last one's buffer is also the next tile's first one
        if CUT:
            is_whole = item < cut[0]
        else:
            is_whole: gl.constexpr = True
        if LOWER:
            write_lower(acc, result, sc, product, row, column, C_SHARED, first, added, HAS_C0, ahead, C0_EACH)
        elif not is_whole:
            store_part(acc, partial, (item - cut[0]) * PIECES + WHICH, layout)
        else:
            write_tile(
                acc,
                held,
                result,
                sc,
                product,
                row,
                column,
                layout,
                C_SHARED,
                first,
                BUFFERS,
                HAS_BIAS,
                ACTIVATION,
                added,
                HAS_C0,
                ahead,
                EARLY,
                C0_EACH,
            )
            if REST:
                write_tile(
                    rest,
                    held_rest,
                    result,
                    sc,
                    product,
                    row,
                    column + MAIN,
                    at_rest,
                    C_SHARED,
                    first + MAIN // REST % BUFFERS,  # the blocks of a tile go on round-robin
                    BUFFERS,
                    HAS_BIAS,
                    ACTIVATION,
                )
    store_wait(0)


@gluon.jit
def wgmma_kernel(
    a,
    b,
    c,
    c0,
    bias,
    alpha,
    beta,
    c0m,
    c0_batch,
    batch,
    partial,
    whole,
    parts,
    depth,
    counter,
    rounds,
    m,
    n,
    k,
    group_m,
    b_rest,
    A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr,
    A_EACH: gl.constexpr,
    B_EACH: gl.constexpr,
    A_SHARED: gl.constexpr,
    B_SHARED: gl.constexpr,
    C_SHARED: gl.constexpr,
    PIECES: gl.constexpr,
    BUFFERS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    C0_EACH: gl.constexpr,
    LOWER: gl.constexpr,
):
    """c = act(alpha * a @ b + beta * c0 + bias) in tiles of 128 by BLOCK_N, or with 3 PIECES of 192 by BLOCK_N.

    ``a`` (m, k), ``b`` (k, n) and ``c`` (m, n) are tensor maps: f16 or bf16, and ``c`` may be f32; ``bias`` (n,) and
    ``c0`` (m, n), of contiguous rows ``c0m`` apart, are pointers or None; k >= 1. In a batch the maps have the axis
    ``batch`` first; A_EACH and B_EACH are then 1, or 0 where one matrix serves all products, and A_SHARED, B_SHARED and
    C_SHARED the layouts of blocks as matrices. Without a batch all five are None. LOWER: 0, or of a
    symmetric c the ratio of a tile's columns to its rows; only the tiles of the lower triangle are computed.

    ``partial``: None, or of the tiles from ``whole`` on (see ``range_of``) the f32 accumulators of each part along k,
    (parts, tiles, 128, BLOCK_N). Tiles are then neither shared in turns nor of a lower triangle.

    ``b_rest``: None, or a second map of ``b``, of blocks as wide as the last columns of a tile whose extent is no power
    of two. There are then no batch, no ``c0`` and no ``partial``.

    Runs on 4 warps, the first warpgroup, and 5 or 9 more that ``warp_specialize`` adds.
    """
    sa = gl.allocate_shared_memory(a.dtype, [STAGES * PIECES] + a.block_type.shape, a.layout)
    sb = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    sc = gl.allocate_shared_memory(c.dtype, [max(PIECES, 2) * BUFFERS] + c.block_type.shape, c.layout)
    if b_rest is None:
        sb_rest = sb
    else:
        sb_rest = gl.allocate_shared_memory(b.dtype, [STAGES] + b_rest.block_type.shape, b_rest.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PIECES)
    for i in gl.static_range(2):
        mbarrier.init(order.index(i), count=1)
    # TMA arrives at these barriers: the async proxy must see them initialised (CUDA programming guide, TMA).
    fence_async_shared()
    next_may_begin()
    ring = (sa, sb, sc, full, empty, order)
    extent = (batch, gl.cdiv(m, rows_of_tile(PIECES)), gl.cdiv(n, BLOCK_N), gl.cdiv(k, BLOCK_K), group_m)
    HAS_BIAS: gl.constexpr = bias is not None
    HAS_C0: gl.constexpr = c0 is not None
    HAS_BATCH: gl.constexpr = c0_batch is not None
    result = (c, bias if HAS_BIAS else alpha, alpha, n)
    CUT: gl.constexpr = partial is not None
    # A partition takes no None.
    cut = (whole, parts, depth) if CUT else (m,)
    added = (c0 if HAS_C0 else alpha, beta if HAS_C0 else alpha, c0m if HAS_C0 else m, c0_batch if HAS_BATCH else m, m)
    REST: gl.constexpr = 0 if b_rest is None else b_rest.block_type.shape[1 if B_ROWS else 0]
    what = (result, ring, extent, added, partial if CUT else alpha, cut, sb_rest)
    # A tuple that has a name would have no constexprs: the partitions are listed by a comprehension.
    gl.warp_specialize(
        [
            (
                multiply,
                (
                    what,
                    which,
                    A_ROWS,
                    B_ROWS,
                    PIECES,
                    BUFFERS,
                    BLOCK_N,
                    STAGES,
                    A_SHARED,
                    B_SHARED,
                    C_SHARED,
                    HAS_BIAS,
                    ACTIVATION,
                    HAS_C0,
                    C0_EACH,
                    LOWER,
                    CUT,
                    REST,
                ),
            )
            if which < 3
            else (
                load_operands,
                (
                    a,
                    b,
                    ring,
                    extent,
                    cut,
                    counter,
                    rounds,
                    A_ROWS,
                    B_ROWS,
                    A_EACH,
                    B_EACH,
                    PIECES,
                    BLOCK_N,
                    BLOCK_K,
                    STAGES,
                    LOWER,
                    CUT,
                    b_rest if REST else b,
                    sb_rest,
                    REST,
                ),
            )
            for which in ((0, 1, 2, 3) if PIECES == 3 else (0, 1, 3))
        ],
        # Warps of the partitions after the first, and registers of their threads.
        [4, 4, 1] if PIECES == 3 else [4, 1],
        [160, 160, 32] if PIECES == 3 else [232, 40],
    )
