"""Kernel of ``wgmma``: a persistent, warp-specialised matrix product on Hopper (Gluon).

One warp loads by TMA, two warpgroups multiply by ``wgmma``, and the tiles are dealt to one program per multiprocessor.
The two warpgroups multiply halves of one tile (cooperative), or take tiles in turns (ping-pong).

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
    load_tile,
    mbarrier,
    next_may_begin,
    previous_wait,
    store_wait,
    thread_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triplan.backends.triton.common.meeting_kernels import PATIENCE, close_meetings, meet, open_meetings
from triplan.backends.triton.common.rings_kernels import next_slot
from triplan.backends.triton.gemm.wgmma_column_sums_kernels import add_rows
from triplan.backends.triton.gemm.wgmma_shared_kernels import (
    HALF,
    as_matrix,
    first_of_c0,
    load_bias,
    place_of,
    tiles_in,
    write_lower,
    write_tile,
)


@gluon.jit
def load_block(operand, product, x, y, ready, buffer, EACH: gl.constexpr, pred=True):
    """buffer = the block of a matrix at (x, y); barrier ``ready`` counts its bytes.

    EACH: None without a batch, 1 if each product has a matrix of its own, 0 if one matrix serves all.
    """
    if EACH is None:
        load_tile(operand, [x, y], ready, buffer, pred=pred)
    else:
        load_tile(operand, [product * EACH, x, y], ready, buffer, pred=pred)


@gluon.jit
def load_operands(
    a,
    b,
    ring,
    extent,
    cut,
    counter,
    rounds,
    A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr,
    A_EACH: gl.constexpr,
    B_EACH: gl.constexpr,
    PIECES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    LOWER: gl.constexpr,
    CUT: gl.constexpr,
):
    """The loading warp: the operands of every step of this program's items, through the ring.

    ``extent`` is (batch, tiles along m, tiles along n, steps along k, group_m); ``cut`` and CUT: see ``range_of``.
    A_ROWS, B_ROWS: A and B are row-major; else the maps are those of their transposes.
    """
    sa, sb, _, full, empty, _ = ring
    previous_wait()
    BYTES: gl.constexpr = (2 * HALF + BLOCK_N) * BLOCK_K * (a.dtype.primitive_bitwidth // 8)
    slot = 0
    phase = 1  # all slots are free at first: waiting for the phase before the first one returns at once
    meetings = open_meetings(counter, rounds)
    patience = gl.to_tensor(PATIENCE)
    for item in range(gl.program_id(0), items_in(extent, cut, LOWER, CUT), gl.num_programs(0)):
        patience = meet(meetings, item // gl.num_programs(0), patience)
        tile, first, steps = range_of(item, extent, cut, LOWER, CUT)
        product, tile_m, tile_n = place_of(tile, extent, LOWER)
        row = tile_m * 2 * HALF
        column = tile_n * BLOCK_N
        for step in range(steps):
            depth = (first + step) * BLOCK_K
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(ready, BYTES)
            for piece in gl.static_range(PIECES):
                if A_ROWS:
                    load_block(a, product, row + piece * HALF, depth, ready, sa.index(slot * PIECES + piece), A_EACH)
                else:
                    load_block(a, product, depth, row + piece * HALF, ready, sa.index(slot * PIECES + piece), A_EACH)
            if B_ROWS:
                load_block(b, product, depth, column, ready, sb.index(slot), B_EACH)
            else:
                load_block(b, product, column, depth, ready, sb.index(slot), B_EACH)
            slot, phase = next_slot(slot, phase, STAGES)
    close_meetings(meetings)


@gluon.jit
def items_in(extent, cut, LOWER: gl.constexpr, CUT: gl.constexpr):
    """How many items all programs share: tiles, and parts along k of those tiles that are cut."""
    tiles = tiles_in(extent, LOWER)
    if CUT:
        whole, parts, _ = cut
        return whole + (tiles - whole) * parts
    else:  # noqa: RET505 - Gluon also compiles what follows a return
        return tiles


@gluon.jit
def range_of(item, extent, cut, LOWER: gl.constexpr, CUT: gl.constexpr):
    """(tile, first step, steps along k) of an item.

    With CUT, ``cut`` is (whole, parts, depth). The first ``whole`` items are whole tiles. Each other tile is cut
    into ``parts`` of ``depth`` steps, of which the last may have some beyond k, where TMA reads zeros. The first parts
    of all tiles precede the second ones: what runs at a time reads the same rows.
    """
    steps = extent[3]
    if CUT:
        whole, _, depth = cut
        rest = tiles_in(extent, LOWER) - whole
        is_whole = item < whole
        first = gl.where(is_whole, 0, (item - whole) // rest * depth)
        tile = gl.where(is_whole, item, whole + (item - whole) % rest)
        return tile, first, gl.where(is_whole, steps, depth)
    else:  # noqa: RET505 - as above
        return item, 0, steps


@gluon.jit
def store_part(acc, partial, place, layout: gl.constexpr):
    """partial[place] = acc; ``partial`` (places, rows, columns) is packed, in f32."""
    row = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    at = partial + place * (acc.shape[0] * acc.shape[1])
    gl.store(at + (row * acc.shape[1])[:, None] + column[None, :], acc)


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
):
    """acc += x @ y over ``steps`` slots, for warpgroup WHICH: its half of a tile, or with PINGPONG all of it.

    ``acc`` (rows, columns) f32. VIEW(buffer, of_x) and VIEW(buffer, of_y) give the factors in a slot; X_ROWS, Y_ROWS:
    they lie row-major. ``last`` is the slot before ``slot``. With SUMS_X, ``total`` = add_rows(total, x) in each step,
    of x as it lies, while ``wgmma`` runs. Returns acc, the next slot, its phase, the last slot and total.
    """
    sx, sy, _, full, empty, order = ring
    for step in range(steps):
        mbarrier.wait(full.index(slot), phase)
        x = VIEW(sx.index(slot if PINGPONG else slot * 2 + WHICH), of_x)
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
def multiply(
    result,
    ring,
    extent,
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
    added,
    HAS_C0: gl.constexpr,
    C0_EACH: gl.constexpr,
    LOWER: gl.constexpr,
    partial,
    cut,
    CUT: gl.constexpr,
):
    """C = act(alpha * A @ B + beta * C0 + bias) on warpgroup WHICH's share of this program's tiles (WHICH is 0 or 1).

    With 2 PIECES (cooperative): rows WHICH * 64 to WHICH * 64 + 63 of each tile. With 1 (ping-pong): every other tile,
    so that one group writes while the other multiplies. ``result``, ``added`` and ``extent``: see ``write_tile`` and
    ``load_operands``. Of a tile that is CUT along k, each part of A @ B goes to ``partial``.
    """
    _, _, sc, _, _, order = ring
    previous_wait()
    PINGPONG: gl.constexpr = PIECES == 1
    ROWS: gl.constexpr = 2 * HALF // PIECES
    WIDTH: gl.constexpr = sc.shape[len(sc.shape) - 1]
    # There are no registers for elements of four bytes, nor in ping-pong, where the other group multiplies meanwhile.
    EARLY: gl.constexpr = HAS_C0 and not PINGPONG and sc.dtype.primitive_bitwidth == 16
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
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
        held = load_bias(result, tile_n * BLOCK_N, BLOCK_N, 4, HAS_BIAS)
        acc = gl.zeros((ROWS, BLOCK_N), gl.float32, layout)
        row = tile_m * 2 * HALF + (0 if PINGPONG else WHICH * HALF)
        column = tile_n * BLOCK_N
        if EARLY:
            ahead = first_of_c0(acc, WIDTH, added, product, row, column, result[3], C0_EACH)
        else:
            ahead = held
        acc, slot, phase, last, _none = multiply_steps(
            acc, ring, steps, slot, phase, last, as_matrix, A_SHARED, B_SHARED, WHICH, A_ROWS, B_ROWS, PINGPONG, STAGES
        )
        first: gl.constexpr = WHICH * BUFFERS
        if CUT:
            is_whole = item < cut[0]
        else:
            is_whole: gl.constexpr = True
        if LOWER:
            write_lower(acc, result, sc, product, row, column, C_SHARED, first, added, HAS_C0, ahead, C0_EACH)
        elif not is_whole:
            store_part(acc, partial, (item - cut[0]) * 2 + WHICH, layout)
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
    """c = act(alpha * a @ b + beta * c0 + bias) in tiles of 128 by BLOCK_N.

    ``a`` (m, k), ``b`` (k, n) and ``c`` (m, n) are tensor maps: f16 or bf16, and ``c`` may be f32; ``bias`` (n,) and
    ``c0`` (m, n), of contiguous rows ``c0m`` apart, are pointers or None; k >= 1. In a batch the maps have the axis
    ``batch`` first; A_EACH and B_EACH are then 1, or 0 where one matrix serves all products, and A_SHARED, B_SHARED and
    C_SHARED the layouts of blocks as matrices. Without a batch all five are None. LOWER: 0, or of a
    symmetric c the ratio of a tile's columns to its rows; only the tiles of the lower triangle are computed.

    ``partial``: None, or of the tiles from ``whole`` on (see ``range_of``) the f32 accumulators of each part along k,
    (parts, tiles, 128, BLOCK_N). Tiles are then neither shared in turns nor of a lower triangle.

    Runs on 4 warps, the first warpgroup, and 5 more that ``warp_specialize`` adds.
    """
    sa = gl.allocate_shared_memory(a.dtype, [STAGES * PIECES] + a.block_type.shape, a.layout)
    sb = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    sc = gl.allocate_shared_memory(c.dtype, [2 * BUFFERS] + c.block_type.shape, c.layout)
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
    extent = (batch, gl.cdiv(m, 2 * HALF), gl.cdiv(n, BLOCK_N), gl.cdiv(k, BLOCK_K), group_m)
    HAS_BIAS: gl.constexpr = bias is not None
    HAS_C0: gl.constexpr = c0 is not None
    HAS_BATCH: gl.constexpr = c0_batch is not None
    result = (c, bias if HAS_BIAS else alpha, alpha, n)
    CUT: gl.constexpr = partial is not None
    # A partition takes no None.
    cut = (whole, parts, depth) if CUT else (m,)
    added = (c0 if HAS_C0 else alpha, beta if HAS_C0 else alpha, c0m if HAS_C0 else m, c0_batch if HAS_BATCH else m, m)
    gl.warp_specialize(
        [
            (
                multiply,
                (
                    result,
                    ring,
                    extent,
                    0,
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
                    added,
                    HAS_C0,
                    C0_EACH,
                    LOWER,
                    partial if CUT else alpha,
                    cut,
                    CUT,
                ),
            ),
            (
                multiply,
                (
                    result,
                    ring,
                    extent,
                    1,
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
                    added,
                    HAS_C0,
                    C0_EACH,
                    LOWER,
                    partial if CUT else alpha,
                    cut,
                    CUT,
                ),
            ),
            (
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
                ),
            ),
        ],
        [4, 1],  # warps of the second and the third partition
        [232, 40],  # registers of their threads
    )
