"""Kernel of ``wgmma`` for strides of 1 whose taps of a column share the rows that they read (Gluon).

A step multiplies all taps of a column of the filter, and CHANNELS channels. What they read of x for a box of HIGH by
WIDE results are HIGH + REACH rows of WIDE pixels, which TMA reads once; the taps' factors begin so many rows apart in
shared memory. WIDE is a multiple of 8, so that each row begins where the swizzle of shared memory does.

See ``wgmma_kernels`` for the rest: there each tap reads its own box.
"""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import (
    gl,
    gluon,
    load_tile,
    mbarrier,
    next_may_begin,
    previous_wait,
    reinterpret,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triplan.backends.triton.common.rings_kernels import matrix, next_slot, tile_of
from triplan.backends.triton.conv.wgmma_kernels import store_block
from triplan.backends.triton.conv.wgmma_shared_kernels import box_of, column_blocks, rounded, start_ring


@gluon.jit
def places_of(box, boxes_high, boxes_wide, HIGH: gl.constexpr, WIDE: gl.constexpr, COUNT: gl.constexpr):
    """The first (image, row, column) of COUNT boxes from ``box`` on, in a tuple."""
    image, row, column = box_of(box, boxes_high, boxes_wide)
    found = ((image, row * HIGH, column * WIDE),)
    if COUNT > 1:
        found = found + places_of(box + 1, boxes_high, boxes_wide, HIGH, WIDE, COUNT - 1)
    return found


@gluon.jit
def load_from(source, at, ready, rows, first):
    """rows[first:] = the block of the map ``source`` at ``at``."""
    row = rows.index(first)
    load_tile(source, at, ready, reinterpret(row, row.dtype, source.block_type.shape, source.layout))


@gluon.jit
def load_rows(
    x,
    rest,
    weight,
    ring,
    extent,
    taps,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    REACH: gl.constexpr,
    BACK: gl.constexpr,
    FLIPPED: gl.constexpr,
    CHANNELS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TAPS: gl.constexpr,
    BOXES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The loading warp: for each step of this program's tiles the rows of 2 * BOXES boxes, and weights of TAPS taps."""
    sa, sb, _, full, empty = ring
    boxes, boxes_high, boxes_wide, tiles_n, group, chunks = extent
    first_row, step_row, _, down, step_down, first_column, step_column, tap_columns, along, step_along = taps
    tiles_m = gl.cdiv(boxes, 2 * BOXES)
    LINES: gl.constexpr = HIGH + REACH
    PIXELS: gl.constexpr = 2 * BOXES * LINES * WIDE
    BYTES: gl.constexpr = (PIXELS + TAPS * BLOCK_N) * CHANNELS * weight.dtype.primitive_bitwidth // 8
    if FLIPPED:
        down += (TAPS - 1) * step_down  # the last tap reads the first row
    previous_wait()
    slot = 0
    phase = 1  # all slots are free at first
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, group)
        places = places_of(tile_m * (2 * BOXES), boxes_high, boxes_wide, HIGH, WIDE, 2 * BOXES)
        feature = tile_n * BLOCK_N
        for chunk in range(chunks):
            channel = chunk * CHANNELS
            for s in range(tap_columns):
                ready = full.index(slot)
                mbarrier.wait(empty.index(slot), phase)
                mbarrier.expect(ready, BYTES)
                for i in gl.static_range(2 * BOXES):
                    image, row, column = places[i]
                    row += down
                    column += along + s * step_along
                    first = (slot * (2 * BOXES) + i) * LINES
                    load_from(x, [image, row, column, channel], ready, sa, first)
                    load_from(rest, [image, row + HIGH, column, channel], ready, sa, first + HIGH)
                tap_column = first_column + s * step_column
                for r in gl.static_range(TAPS):
                    tap_row = first_row + r * step_row
                    to = sb.index(slot * TAPS + r)
                    if BACK:
                        load_tile(weight, [channel, tap_row, tap_column, feature], ready, to)
                    else:
                        load_tile(weight, [feature, tap_row, tap_column, channel], ready, to)
                slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def begin_products(
    sums,
    ring,
    slot,
    phase,
    WHICH: gl.constexpr,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    REACH: gl.constexpr,
    BACK: gl.constexpr,
    FLIPPED: gl.constexpr,
    CHANNELS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TAPS: gl.constexpr,
    BOXES: gl.constexpr,
):
    """``sums`` of warpgroup WHICH's boxes plus the products of a slot, which wgmma computes from now on."""
    sa, sb, _, full, _ = ring
    mbarrier.wait(full.index(slot), phase)
    first = (slot * 2 + WHICH) * (BOXES * (HIGH + REACH))
    for r in gl.static_range(TAPS):
        if BACK:
            y = matrix(sb.index(slot * TAPS + r), CHANNELS, BLOCK_N)
        else:
            y = matrix(sb.index(slot * TAPS + r), BLOCK_N, CHANNELS).permute((1, 0))
        lower = (TAPS - 1 - r if FLIPPED else r) * (REACH // (TAPS - 1))
        running = ()
        for i in gl.static_range(BOXES):
            box = matrix(sa.index(first + (i * (HIGH + REACH) + lower)), HIGH * WIDE, CHANNELS)
            running = running + (warpgroup_mma(box, y, sums[i], is_async=True),)
        sums = running
    return sums


@gluon.jit
def finished(sums, outstanding: gl.constexpr):
    """The tuple ``sums``, of which ``outstanding`` products still run at most."""
    if len(sums) == 1:
        return (warpgroup_mma_wait(num_outstanding=outstanding, deps=sums),)
    else:  # noqa: RET505 - Gluon also compiles what follows a return
        return warpgroup_mma_wait(num_outstanding=outstanding, deps=sums)


@gluon.jit
def store_boxes(
    results, out, ring, extent, box, feature, WHICH: gl.constexpr, BUFFERS: gl.constexpr, BLOCKS: gl.constexpr
):
    """Warpgroup WHICH's ``results`` (of the element of ``out``) are those of boxes from ``box`` on, and ``feature``."""
    HIGH: gl.constexpr = out.block_type.shape[1]
    WIDE: gl.constexpr = out.block_type.shape[2]
    for i in gl.static_range(len(results)):
        image, row, column = box_of(box + i, extent[1], extent[2])
        place = (image, row * HIGH, column * WIDE, feature)
        parts = column_blocks(results[i], BLOCKS)
        for j in gl.static_range(BLOCKS):
            store_block(parts[j], out, ring, place, j, WHICH, BUFFERS, i * BLOCKS)


@gluon.jit
def multiply_rows(
    out,
    bias,
    ring,
    extent,
    steps,
    features,
    WHICH: gl.constexpr,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    REACH: gl.constexpr,
    BACK: gl.constexpr,
    FLIPPED: gl.constexpr,
    CHANNELS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TAPS: gl.constexpr,
    BOXES: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    HOLDS: gl.constexpr,
):
    """Warpgroup WHICH: BOXES boxes of each of this program's tiles, by BLOCK_N features.

    With HOLDS the results of a tile are stored during the first products of the next one.
    """
    empty = ring[4]
    boxes, _, _, tiles_n, group, _ = extent
    tiles_m = gl.cdiv(boxes, 2 * BOXES)
    ROWS: gl.constexpr = HIGH * WIDE
    BLOCKS: gl.constexpr = BLOCK_N // out.block_type.shape[3]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 256 // ring[0].dtype.primitive_bitwidth]
    )
    previous_wait()
    slot = 0
    phase = 0
    if HOLDS:
        held = (gl.zeros((ROWS, BLOCK_N), out.dtype, layout),) * BOXES
        box = boxes  # behind all images: TMA writes nothing
        feature = boxes * 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, group)
        if bias is not None:  # asked for before the products, which hide the latency
            spread: gl.constexpr = gl.BlockedLayout(
                [BLOCK_N // 32 if BLOCK_N < 128 else BLOCK_N // 128], [32], [4], [0]
            )
            at = tile_n * BLOCK_N + gl.arange(0, BLOCK_N, layout=spread)
            added = gl.load(bias + at, mask=at < features, other=0.0)
        sums = (gl.zeros((ROWS, BLOCK_N), gl.float32, layout),) * BOXES
        sums = begin_products(
            sums, ring, slot, phase, WHICH, HIGH, WIDE, REACH, BACK, FLIPPED, CHANNELS, BLOCK_N, TAPS, BOXES
        )
        if HOLDS:
            store_boxes(held, out, ring, extent, box, feature, WHICH, BUFFERS, BLOCKS)
        last = slot
        slot, phase = next_slot(slot, phase, STAGES)
        for _ in range(1, steps):
            sums = begin_products(
                sums, ring, slot, phase, WHICH, HIGH, WIDE, REACH, BACK, FLIPPED, CHANNELS, BLOCK_N, TAPS, BOXES
            )
            sums = finished(sums, TAPS * BOXES)  # those of the step before have read their slot
            mbarrier.arrive(empty.index(last), count=1)
            last = slot
            slot, phase = next_slot(slot, phase, STAGES)
        sums = finished(sums, 0)
        mbarrier.arrive(empty.index(last), count=1)
        results = ()
        for i in gl.static_range(BOXES):
            value = sums[i]
            if bias is not None:
                value += gl.convert_layout(added, gl.SliceLayout(0, layout)).to(gl.float32)[None, :]
            results = results + (rounded(value.to(out.dtype)) if HOLDS else value.to(out.dtype),)
        box = (tile_m * 2 + WHICH) * BOXES
        feature = tile_n * BLOCK_N
        if HOLDS:
            held = results
        else:
            store_boxes(results, out, ring, extent, box, feature, WHICH, BUFFERS, BLOCKS)
    if HOLDS:
        store_boxes(held, out, ring, extent, box, feature, WHICH, BUFFERS, BLOCKS)
    store_wait(0)


@gluon.jit
def conv2d_rows_wgmma_kernel(
    x,
    rest,
    weight,
    out,
    bias,
    bias_first,
    features,
    extent,
    taps,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    REACH: gl.constexpr,
    BACK: gl.constexpr,
    FLIPPED: gl.constexpr,
    CHANNELS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TAPS: gl.constexpr,
    BOXES: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    HOLDS: gl.constexpr,
):
    """out[n, p, q, k] = bias[k] + sum over taps (r, s) and channels c of x[n, p + down + r * step_down, q + along + s *
    step_along, c] * weight[k, first_row + r * step_row, first_column + s * step_column, c].

    Arguments as those of ``conv2d_wgmma_kernel``, and the same order of sums. TAPS: the taps of a column, which read
    REACH rows more than the HIGH rows of a box; ``x`` is a map of boxes of HIGH rows, ``rest`` of REACH rows. FLIPPED:
    ``step_down`` is negative. A tile's pixels are 2 * BOXES boxes, half of them of each warpgroup. HOLDS, of elements
    of 2 bytes: results are stored during the next products.
    """
    LINES: gl.constexpr = STAGES * 2 * BOXES * (HIGH + REACH)
    row: gl.constexpr = [WIDE, CHANNELS]
    sa = gl.allocate_shared_memory(x.dtype, [LINES] + row, gl.NVMMASharedLayout.get_default_for(row, x.dtype))
    sb = gl.allocate_shared_memory(weight.dtype, [STAGES * TAPS] + weight.block_type.shape, weight.layout)
    sc = gl.allocate_shared_memory(out.dtype, [2 * BUFFERS] + out.block_type.shape, out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    start_ring(full, empty, STAGES)
    next_may_begin()
    if bias_first is not None:
        bias += bias_first
    ring = (sa, sb, sc, full, empty)
    steps = extent[5] * taps[7]
    gl.warp_specialize(
        [
            (
                multiply_rows,
                (
                    out,
                    bias,
                    ring,
                    extent,
                    steps,
                    features,
                    0,
                    HIGH,
                    WIDE,
                    REACH,
                    BACK,
                    FLIPPED,
                    CHANNELS,
                    BLOCK_N,
                    TAPS,
                    BOXES,
                    STAGES,
                    BUFFERS,
                    HOLDS,
                ),
            ),
            (
                multiply_rows,
                (
                    out,
                    bias,
                    ring,
                    extent,
                    steps,
                    features,
                    1,
                    HIGH,
                    WIDE,
                    REACH,
                    BACK,
                    FLIPPED,
                    CHANNELS,
                    BLOCK_N,
                    TAPS,
                    BOXES,
                    STAGES,
                    BUFFERS,
                    HOLDS,
                ),
            ),
            (
                load_rows,
                (
                    x,
                    rest,
                    weight,
                    ring,
                    extent,
                    taps,
                    HIGH,
                    WIDE,
                    REACH,
                    BACK,
                    FLIPPED,
                    CHANNELS,
                    BLOCK_N,
                    TAPS,
                    BOXES,
                    STAGES,
                ),
            ),
        ],
        [4, 1],  # warps of the second and the third partition
        [224, 56],  # registers of their threads
    )
