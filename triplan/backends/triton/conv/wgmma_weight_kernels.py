"""Kernel of ``wgmma`` for the gradient of weight: products of boxes of pixels (Gluon), summed in a fixed order.

A step multiplies a box of 64 pixels of dout, transposed, by the boxes of x that lie under some taps. See
``wgmma_kernels`` for boxes, warps and barriers.
"""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import (
    gl,
    gluon,
    load_tile,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triplan.backends.triton.conv.wgmma_shared_kernels import (
    CHANNELS,
    box_of,
    column_blocks,
    load_under,
    matrix,
    next_slot,
    remainder_of,
    start_ring,
    times,
)


@gluon.jit
def blocks_under(
    block,
    blocks,
    taps,
    STRIDE_ROWS: gl.constexpr,
    STRIDE_COLUMNS: gl.constexpr,
    CLIPPED: gl.constexpr,
    COUNT: gl.constexpr,
):
    """Where COUNT blocks from ``block`` on lie: (map, rows down, columns along, channel) of each, in a tuple.

    Found before the loop over boxes, as the divisions would take as long as the products.
    """
    tap_columns, above, left, dilation_rows, dilation_columns = taps
    tap = block // blocks
    tap_column = tap % tap_columns
    down = tap // tap_columns * dilation_rows - above
    along = tap_column * dilation_columns - left
    if CLIPPED:
        which = (down & (STRIDE_ROWS - 1)) * tap_columns + tap_column
    else:
        which = remainder_of(down, along, STRIDE_ROWS, STRIDE_COLUMNS)
    found = ((which, down, along, block % blocks * CHANNELS),)
    if COUNT > 1:
        found = found + blocks_under(block + 1, blocks, taps, STRIDE_ROWS, STRIDE_COLUMNS, CLIPPED, COUNT - 1)
    return found


@gluon.jit
def block_of(buffer, i, COUNT: gl.constexpr, IMAGES: gl.constexpr, HIGH: gl.constexpr, WIDE: gl.constexpr):
    """The block ``i`` of the COUNT blocks (IMAGES, HIGH, WIDE, CHANNELS) that a buffer holds."""
    return reinterpret(buffer, buffer.dtype, [COUNT, IMAGES, HIGH, WIDE, CHANNELS], buffer.layout).index(i)


@gluon.jit
def load_sums(
    dout,
    maps,
    ring,
    extent,
    taps,
    IMAGES: gl.constexpr,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    STRIDE_ROWS: gl.constexpr,
    STRIDE_COLUMNS: gl.constexpr,
    CLIPPED: gl.constexpr,
    MAPS: gl.constexpr,
    FILTERS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The loading warp: for each box of this program's items FILTERS blocks of dout's channels and COLUMNS of x's."""
    sa, sb, full, empty = ring
    items, tiles, each, boxes, boxes_high, boxes_wide, tiles_filters, blocks = extent
    SHARES: gl.constexpr = 1 if FILTERS == 2 else 2
    OWN: gl.constexpr = COLUMNS // SHARES
    BYTES: gl.constexpr = (FILTERS + COLUMNS) * CHANNELS * IMAGES * HIGH * WIDE * 2
    slot = 0
    phase = 1
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        part = item // tiles
        tile = item % tiles
        filter_ = tile % tiles_filters * (FILTERS * CHANNELS)
        first = tile // tiles_filters * COLUMNS
        under = blocks_under(first, blocks, taps, STRIDE_ROWS, STRIDE_COLUMNS, CLIPPED, COLUMNS)
        image, row, column = box_of(part * each, boxes_high, boxes_wide)
        for _ in range(gl.minimum(each, boxes - part * each)):
            at = (image * IMAGES, row * HIGH, column * WIDE)
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(ready, BYTES)
            for i in gl.static_range(FILTERS):
                load_tile(dout, [at[0], at[1], at[2], filter_ + i * CHANNELS], ready, sa.index(slot * FILTERS + i))
            for i in gl.static_range(COLUMNS):
                which, down, along, channel = under[i]
                to = block_of(sb.index(slot * SHARES + i // OWN), i % OWN, OWN, IMAGES, HIGH, WIDE)
                load_under(maps, which, at, down, along, channel, ready, to, STRIDE_ROWS, STRIDE_COLUMNS, MAPS)
            slot, phase = next_slot(slot, phase, STAGES)
            column += 1
            row = gl.where(column == boxes_wide, row + 1, row)
            column = gl.where(column == boxes_wide, 0, column)
            image = gl.where(row == boxes_high, image + 1, image)
            row = gl.where(row == boxes_high, 0, row)


@gluon.jit
def store_sums(values, out, strides, row, column, rows, columns):
    """out[row:, column:] = values (CHANNELS, CHANNELS), of which there are ``rows`` and ``columns``."""
    layout: gl.constexpr = values.type.layout
    row += gl.arange(0, CHANNELS, layout=gl.SliceLayout(1, layout))
    column += gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, layout))
    at = times(row, strides[0])[:, None] + times(column, strides[1])[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    gl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def multiply_sums(
    out,
    out_strides,
    part_stride,
    sizes,
    ring,
    extent,
    WHICH: gl.constexpr,
    PIXELS: gl.constexpr,
    FILTERS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Warpgroup WHICH: with two blocks of FILTERS one of them, by all columns; with one block half of the columns."""
    sa, sb, full, empty = ring
    items, tiles, each, boxes, _, _, tiles_filters, blocks = extent
    filters, channels, tap_count, tap_columns = sizes
    SHARES: gl.constexpr = 1 if FILTERS == 2 else 2
    OWN: gl.constexpr = COLUMNS // SHARES
    N: gl.constexpr = OWN * CHANNELS
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    slot = 0
    phase = 0
    last = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        part = item // tiles
        tile = item % tiles
        acc = gl.zeros((CHANNELS, N), gl.float32, layout)
        steps = gl.minimum(each, boxes - part * each)
        for step in range(steps):
            mbarrier.wait(full.index(slot), phase)
            if FILTERS == 2:
                x = matrix(sa.index(slot * 2 + WHICH), PIXELS, CHANNELS).permute((1, 0))
                y = matrix(sb.index(slot), PIXELS, N)
            else:
                x = matrix(sa.index(slot), PIXELS, CHANNELS).permute((1, 0))
                y = matrix(sb.index(slot * 2 + WHICH), PIXELS, N)
            running = warpgroup_mma(x, y, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(running,))
            mbarrier.arrive(empty.index(last), count=1, pred=step > 0)
            last = slot
            slot, phase = next_slot(slot, phase, STAGES)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(last), count=1, pred=steps > 0)
        first = tile // tiles_filters * COLUMNS
        row = tile % tiles_filters * (FILTERS * CHANNELS)
        if FILTERS == 2:
            row += WHICH * CHANNELS
        else:
            first += WHICH * OWN
        parts = column_blocks(acc, OWN)
        for i in gl.static_range(OWN):
            tap = (first + i) // blocks
            channel = (first + i) % blocks * CHANNELS
            start = times(part, part_stride)
            start += times(tap // tap_columns, out_strides[2]) + times(tap % tap_columns, out_strides[3])
            inside = gl.where(tap < tap_count, channels, 0)
            store_sums(parts[i], out + start, out_strides, row, channel, filters, inside)


@gluon.jit
def conv2d_weight_wgmma_kernel(
    dout,
    x0,
    x1,
    x2,
    x3,
    x4,
    x5,
    x6,
    x7,
    out,
    out_strides,
    part_stride,
    sizes,
    extent,
    taps,
    IMAGES: gl.constexpr,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    STRIDE_ROWS: gl.constexpr,
    STRIDE_COLUMNS: gl.constexpr,
    CLIPPED: gl.constexpr,
    MAPS: gl.constexpr,
    FILTERS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """out[part, k, c, r, s] = sum over the pixels (n, p, q) of a part of dout[n, p, q, k] * x[n, p * STRIDE_ROWS + r *
    dilation_rows - above, q * STRIDE_COLUMNS + s * dilation_columns - left, c].

    A tile is FILTERS blocks of 64 filters by COLUMNS blocks of 64 channels under a tap: the blocks of all taps follow
    each other. A part is ``each`` boxes, in their order, which fixes the order of the sum. ``dout`` and ``x0`` to
    ``x3`` as in ``conv2d_wgmma_kernel``. Boxes end where rows and columns of dout do, or where there is no image: 0
    times an infinity of x would be NaN. With CLIPPED they may pass the last column: there is a map for each remainder
    of the rows and tap of a row, which ends where dout's last column meets x.
    ``out`` is f32, or has the element of the operands if there is one part; ``sizes``: filters, channels, taps, those
    of a row; ``extent``: items (parts of tiles), tiles, boxes of a part, boxes, those of a column and row of an image,
    tiles along the filters, blocks of channels; ``taps``: those of a row, the padding above and left, dilations.

    Runs on 4 warps, the first warpgroup, and 5 more that ``warp_specialize`` adds.
    """
    sa = gl.allocate_shared_memory(dout.dtype, [STAGES * FILTERS] + dout.block_type.shape, dout.layout)
    SHARES: gl.constexpr = 1 if FILTERS == 2 else 2
    own: gl.constexpr = [COLUMNS // SHARES * IMAGES, HIGH, WIDE, CHANNELS]
    sb = gl.allocate_shared_memory(x0.dtype, [STAGES * SHARES] + own, x0.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    start_ring(full, empty, STAGES)
    ring = (sa, sb, full, empty)
    PIXELS: gl.constexpr = IMAGES * HIGH * WIDE
    gl.warp_specialize(
        [
            (
                multiply_sums,
                (out, out_strides, part_stride, sizes, ring, extent, 0, PIXELS, FILTERS, COLUMNS, STAGES),
            ),
            (
                multiply_sums,
                (out, out_strides, part_stride, sizes, ring, extent, 1, PIXELS, FILTERS, COLUMNS, STAGES),
            ),
            (
                load_sums,
                (
                    dout,
                    (x0, x1, x2, x3, x4, x5, x6, x7),
                    ring,
                    extent,
                    taps,
                    IMAGES,
                    HIGH,
                    WIDE,
                    STRIDE_ROWS,
                    STRIDE_COLUMNS,
                    CLIPPED,
                    MAPS,
                    FILTERS,
                    COLUMNS,
                    STAGES,
                ),
            ),
        ],
        [4, 1],  # warps of the second and the third partition
        [224, 56],  # registers of their threads
    )
