"""Kernel of ``wgmma`` for the gradient of weight: products of boxes of pixels (Gluon), summed in a fixed order.

A step multiplies a box of 64 pixels of dout, transposed, by the boxes of x that lie under some taps. See
``wgmma_kernels`` for boxes, warps and barriers.

How tiles are divided into lanes, shares and pieces, much as in stream-k (Osama et al., arXiv:2301.03598), is said in
``wgmma_division``.
"""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import (
    gl,
    gluon,
    load_tile,
    mbarrier,
    mma,
    reinterpret,
    thread_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triplan.backends.triton.common.rings_kernels import matrix, next_slot
from triplan.backends.triton.conv.wgmma_shared_kernels import (
    CHANNELS,
    after_product,
    box_of,
    column_blocks,
    load_under,
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
        # (Strides are at most 2: of one remainder its number is 0, of two it is the remainder.)
        which = (down & (CLIPPED - 1)) * tap_columns + tap_column
    else:
        which = remainder_of(down, along, STRIDE_ROWS, STRIDE_COLUMNS)
    found = ((which, down, along, block % blocks * CHANNELS),)
    if COUNT > 1:
        found = found + blocks_under(block + 1, blocks, taps, STRIDE_ROWS, STRIDE_COLUMNS, CLIPPED, COUNT - 1)
    return found


@gluon.jit
def box_in(buffer, i, COUNT: gl.constexpr, BOX: gl.constexpr):
    """The box ``i`` of the COUNT boxes of shape BOX that a buffer holds."""
    return reinterpret(buffer, buffer.dtype, [COUNT] + BOX, buffer.layout).index(i)


@gluon.jit
def load_tap(
    map,
    at,
    channel,
    ready,
    to,
    slot,
    BOX: gl.constexpr,
    COLUMNS: gl.constexpr,
    OWN: gl.constexpr,
):
    """COLUMNS blocks of the pixels ``at`` from ``channel`` on, OWN in each buffer of ``to`` from ``slot`` on."""
    WIDTH: gl.constexpr = BOX[3]
    EACH: gl.constexpr = CHANNELS // WIDTH
    for i in gl.static_range(COLUMNS * EACH):
        box = box_in(to.index(slot + i // (OWN * EACH)), i % (OWN * EACH), OWN * EACH, BOX)
        load_tile(map, [at[0], at[1], at[2], channel + i * WIDTH], ready, box)


@gluon.jit
def pieces_of(share, work):
    """How many pieces a share has, and the first of the lanes left over that it has a part of."""
    tiles, shares, lanes, boxes = work
    length = boxes // lanes
    over = (lanes * tiles - shares) * length
    first = begin_of(share, over, shares) // length
    return gl.cdiv(begin_of(share + 1, over, shares), length) - first + 1, first


@gluon.jit
def begin_of(share, over, shares):
    """The first of ``over`` steps that ``share`` has: share * over / shares, rounded down, without an overflow."""
    return share * (over // shares) + share * (over % shares) // shares


@gluon.jit
def piece_of(share, piece, first, work):
    """Of piece ``piece`` of a share: (its tile, the first box, boxes, slot).

    Piece 0 is the share's own lane. The others are parts of the lanes left over, from lane ``first`` of these on.
    """
    tiles, shares, lanes, boxes = work
    length = boxes // lanes
    longer = boxes % lanes
    over = (lanes * tiles - shares) * length
    lane = first + piece - 1
    begin = gl.maximum(begin_of(share, over, shares) - lane * length, 0)
    end = gl.minimum(begin_of(share + 1, over, shares) - lane * length, length)
    own = piece == 0
    mine = share // tiles
    tile = gl.where(own, share % tiles, (shares + lane) % tiles)
    box = gl.where(own, mine * length + gl.minimum(mine, longer), (lanes - 1) * length + longer + begin)
    steps = gl.where(own, length + gl.where(mine < longer, 1, 0), end - begin)
    return tile, box, steps, gl.where(own, share, shares + share + lane)


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
    ONE_TAP: gl.constexpr,
):
    """The loading warp: for each step of this program's shares FILTERS blocks of dout's channels and COLUMNS of x's."""
    sa, sb, full, empty = ring
    work, tiles_filters, blocks, high, wide = extent
    SHARED: gl.constexpr = 1 if FILTERS == 2 else 2
    OWN: gl.constexpr = COLUMNS // SHARED
    BOX: gl.constexpr = dout.block_type.shape
    WIDTH: gl.constexpr = BOX[3]  # 128 bytes
    EACH: gl.constexpr = CHANNELS // WIDTH  # boxes of a block
    BYTES: gl.constexpr = (FILTERS + COLUMNS) * EACH * IMAGES * HIGH * WIDE * 128
    slot = 0
    phase = 1
    for share in range(gl.program_id(0), work[1], gl.num_programs(0)):
        pieces, lane = pieces_of(share, work)
        for piece in range(pieces):
            tile, box, steps, _place = piece_of(share, piece, lane, work)
            filter_ = tile % tiles_filters * (FILTERS * CHANNELS)
            first = tile // tiles_filters * COLUMNS
            under = blocks_under(first, blocks, taps, STRIDE_ROWS, STRIDE_COLUMNS, CLIPPED, 1 if ONE_TAP else COLUMNS)
            image, row, column = box_of(box, high, wide)
            for _ in range(steps):
                at = (image * IMAGES, row * HIGH, column * WIDE)
                ready = full.index(slot)
                mbarrier.wait(empty.index(slot), phase)
                mbarrier.expect(ready, BYTES)
                for i in gl.static_range(FILTERS * EACH):
                    to = box_in(sa.index(slot * FILTERS + i // EACH), i % EACH, EACH, BOX)
                    load_tile(dout, [at[0], at[1], at[2], filter_ + i * WIDTH], ready, to)
                if ONE_TAP:
                    which, down, along, channel = under[0]
                    of_x = (at[0], at[1] + (down >> (STRIDE_ROWS - 1)), at[2] + (along >> (STRIDE_COLUMNS - 1)))
                    for i in gl.static_range(MAPS):
                        if which == i:
                            load_tap(maps[i], of_x, channel, ready, sb, slot * SHARED, BOX, COLUMNS, OWN)
                else:
                    for i in gl.static_range(COLUMNS * EACH):
                        which, down, along, channel = under[i // EACH]
                        channel += i % EACH * WIDTH
                        to = box_in(sb.index(slot * SHARED + i // (OWN * EACH)), i % (OWN * EACH), OWN * EACH, BOX)
                        load_under(maps, which, at, down, along, channel, ready, to, STRIDE_ROWS, STRIDE_COLUMNS, MAPS)
                slot, phase = next_slot(slot, phase, STAGES)
                column += 1
                row = gl.where(column == wide, row + 1, row)
                column = gl.where(column == wide, 0, column)
                image = gl.where(row == high, image + 1, image)
                row = gl.where(row == high, 0, row)


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
def store_piece(values, out):
    """out = ``values`` (CHANNELS, CHANNELS) in blocks of 8 by 8, row by row: a warp writes 256 bytes side by side."""
    flat = values.reshape((CHANNELS // 8, 8, CHANNELS // 8, 8)).permute((0, 2, 1, 3)).reshape((CHANNELS * CHANNELS,))
    gl.store(out + gl.arange(0, CHANNELS * CHANNELS, layout=flat.type.layout), flat)


@gluon.constexpr_function
def turned_layout(pixels, channels):
    """Where boxes of 32 channels of 4 bytes lie, which TMA has swizzled: a matrix (pixels, channels).

    Pixels 1, 2 and 4 of eight change places (with 2, 4, 1): a thread of mma reads pixel ``lane % 4``, and the channel
    ``lane / 4``. So the 32 threads of a warp read 32 banks, where they would read each of 16 twice. Both factors have
    this order, so that the products are the same.
    """
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [4, 4], [1, 8], [2, 16]]
    bases += [[1 << i, 0] for i in range(3, pixels.bit_length() - 1)]
    bases += [[0, 1 << i] for i in range(5, channels.bit_length() - 1)]
    return gl.SharedLinearLayout(bases)


@gluon.constexpr_function
def accumulator(half, columns):
    """The layout of (CHANNELS, columns) sums of a warpgroup: of wgmma for halves, else of mma."""
    if half:
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, 2], instr_shape=[16, 8])


@gluon.jit
def turned(buffer, PIXELS: gl.constexpr, WIDTH: gl.constexpr):
    """A buffer of boxes of 4-byte elements as a matrix (PIXELS, WIDTH)."""
    return reinterpret(buffer, buffer.dtype, [PIXELS, WIDTH], turned_layout(PIXELS, WIDTH))


@gluon.jit
def add_product(x, y, acc):
    """acc + x.T @ y of tf32, (pixels, rows) and (pixels, columns): wgmma would read pixels side by side alone."""
    layout: gl.constexpr = acc.type.layout
    a = x.permute((1, 0)).load(gl.DotOperandLayout(0, layout, 1))
    b = y.load(gl.DotOperandLayout(1, layout, 1))
    return mma(a, b, acc, "tf32")


@gluon.jit
def multiply_sums(
    out,
    out_strides,
    sizes,
    ring,
    extent,
    WHICH: gl.constexpr,
    PIXELS: gl.constexpr,
    FILTERS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """Warpgroup WHICH: with two blocks of FILTERS one of them, by all columns; with one block half of the columns."""
    sa, sb, full, empty = ring
    work, tiles_filters, blocks = extent[0], extent[1], extent[2]
    filters, channels, tap_count, tap_columns = sizes
    SHARED: gl.constexpr = 1 if FILTERS == 2 else 2
    OWN: gl.constexpr = COLUMNS // SHARED
    N: gl.constexpr = OWN * CHANNELS
    HALF: gl.constexpr = sa.dtype.primitive_bitwidth == 16
    layout: gl.constexpr = accumulator(HALF, N)
    slot = 0
    phase = 0
    last = 0
    for share in range(gl.program_id(0), work[1], gl.num_programs(0)):
        pieces, lane = pieces_of(share, work)
        for piece in range(pieces):
            tile, _box, steps, place = piece_of(share, piece, lane, work)
            acc = gl.zeros((CHANNELS, N), gl.float32, layout)
            for step in range(steps):
                mbarrier.wait(full.index(slot), phase)
                x = sa.index(slot * FILTERS + WHICH % FILTERS)
                y = sb.index(slot * SHARED + WHICH % SHARED)
                if HALF:
                    x, y = matrix(x, PIXELS, CHANNELS).permute((1, 0)), matrix(y, PIXELS, N)
                    running = warpgroup_mma(x, y, acc, is_async=True)
                    acc, last, slot, phase = after_product(running, empty, last, slot, phase, step == 0, STAGES)
                else:
                    acc = add_product(turned(x, PIXELS, CHANNELS), turned(y, PIXELS, N), acc)
                    thread_barrier()  # all warps have read the slot
                    mbarrier.arrive(empty.index(slot), count=1)
                    slot, phase = next_slot(slot, phase, STAGES)
            if HALF:
                acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
                mbarrier.arrive(empty.index(last), count=1, pred=steps > 0)
            parts = column_blocks(acc, OWN)
            first = tile // tiles_filters * COLUMNS
            row = tile % tiles_filters * (FILTERS * CHANNELS)
            if FILTERS == 2:
                row += WHICH * CHANNELS
            else:
                first += WHICH * OWN
            for i in gl.static_range(OWN):
                tap = (first + i) // blocks
                if WHOLE:
                    channel = (first + i) % blocks * CHANNELS
                    start = times(tap // tap_columns, out_strides[2]) + times(tap % tap_columns, out_strides[3])
                    inside = gl.where(tap < tap_count, channels, 0)
                    store_sums(parts[i], out + start, out_strides, row, channel, filters, inside)
                elif tap < tap_count:  # a tile may have more columns than there are
                    block = times(place, FILTERS * COLUMNS) + (WHICH * OWN + i)
                    store_piece(parts[i], out + block * (CHANNELS * CHANNELS))


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
    WHOLE: gl.constexpr,
    ONE_TAP: gl.constexpr,
):
    """out[k, c, r, s] = sum over the pixels (n, p, q) of dout[n, p, q, k] * x[n, p * STRIDE_ROWS + r * dilation_rows -
    above, q * STRIDE_COLUMNS + s * dilation_columns - left, c].

    A tile is FILTERS blocks of 64 filters by COLUMNS blocks of 64 channels under a tap: the blocks of all taps follow
    each other. A block of halves is one box of channels, of f32 (multiplied as tf32 by mma) two. ``pieces_of`` and
    ``piece_of`` say which boxes of which tiles a share sums, which fixes the order of the sum.
    ``dout`` and ``x0`` to ``x3`` as in ``conv2d_wgmma_kernel``. Boxes end where rows and columns of dout do, or where
    there is no image: 0 times an infinity of x would be NaN. With CLIPPED they may pass the last column: there is a map
    for each of CLIPPED remainders of the rows and tap of a row, which ends where dout's last column meets x.
    With WHOLE the shares are whole tiles, and ``out`` has the element of the operands. Without, ``out`` is the slots of
    pieces in f32, of (FILTERS, COLUMNS) blocks as ``store_piece`` writes them; ``out_strides`` is not read.
    ``sizes``: filters, channels, taps, those of a row; ``extent``: ``work`` (tiles, shares, lanes of a tile, boxes),
    tiles along the filters, blocks of channels, boxes of a column and of a row; ``taps``: those of a row, the padding
    above and left, dilations.

    ONE_TAP: the channels of a tile are those under one tap, so that one map is chosen for all loads of a step.

    Runs on 4 warps, the first warpgroup, and 5 more that ``warp_specialize`` adds.
    """
    SHARED: gl.constexpr = 1 if FILTERS == 2 else 2
    WIDTH: gl.constexpr = dout.block_type.shape[3]
    EACH: gl.constexpr = CHANNELS // WIDTH * IMAGES
    sa = gl.allocate_shared_memory(dout.dtype, [STAGES * FILTERS, EACH, HIGH, WIDE, WIDTH], dout.layout)
    own: gl.constexpr = [COLUMNS // SHARED * EACH, HIGH, WIDE, WIDTH]
    sb = gl.allocate_shared_memory(x0.dtype, [STAGES * SHARED] + own, x0.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    start_ring(full, empty, STAGES)
    ring = (sa, sb, full, empty)
    PIXELS: gl.constexpr = IMAGES * HIGH * WIDE
    gl.warp_specialize(
        [
            (
                multiply_sums,
                (out, out_strides, sizes, ring, extent, 0, PIXELS, FILTERS, COLUMNS, STAGES, WHOLE),
            ),
            (
                multiply_sums,
                (out, out_strides, sizes, ring, extent, 1, PIXELS, FILTERS, COLUMNS, STAGES, WHOLE),
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
                    ONE_TAP,
                ),
            ),
        ],
        [4, 1],  # warps of the second and the third partition
        [224, 56],  # registers of their threads
    )
