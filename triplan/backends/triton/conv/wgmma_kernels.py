"""Kernels of ``wgmma``: convolution on Hopper as matrix products of boxes of pixels (Gluon), by TMA and wgmma.

A tile's pixels are two boxes of ROWS = IMAGES * HIGH * WIDE pixels, each of some images, rows and columns; its columns
are features. A step multiplies one tap and CHANNELS channels, of 128 or 64 bytes: TMA reads the box of the other tensor
that lies under the tap and fills with zeros what is outside the image, which is the padding. In shared memory a box is
a matrix (pixels, channels), swizzled, as wgmma takes it. Nothing is unfolded.

One warp loads, two warpgroups multiply, a box each, and the tiles are dealt to one program per multiprocessor. With
swapped factors, products are of features by pixels: a warpgroup has both boxes and half of the features. The ring's
barriers are those of the matrix product: TMA arrives at ``full``, each warpgroup at ``empty``.

With strides, the rows and columns of one remainder are a tensor map of their own, so that a box is always dense.
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
    store_tile,
    store_wait,
    thread_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triplan.backends.triton.common.rings_kernels import matrix, next_slot, tile_of
from triplan.backends.triton.conv.wgmma_shared_kernels import (
    after_product,
    box_of,
    column_blocks,
    load_under,
    remainder_of,
    rounded,
    start_ring,
)


@gluon.jit
def load_pixels(
    maps,
    weight,
    ring,
    extent,
    taps,
    IMAGES: gl.constexpr,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    STRIDE_ROWS: gl.constexpr,
    STRIDE_COLUMNS: gl.constexpr,
    BACK: gl.constexpr,
    CHANNELS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The loading warp: for each step of this program's tiles two boxes of pixels and blocks of weights."""
    sa, sb, _, full, empty = ring
    start, boxes, boxes_high, boxes_wide, tiles_n, group, chunks = extent
    first_row, step_row, tap_rows, down, step_down, first_column, step_column, tap_columns, along, step_along = taps
    tiles_m = gl.cdiv(boxes, 2)
    FEATURES: gl.constexpr = weight.block_type.shape[3 if BACK else 0]
    PARTS: gl.constexpr = BLOCK_N // FEATURES
    BYTES: gl.constexpr = (2 * IMAGES * HIGH * WIDE + BLOCK_N) * CHANNELS * weight.dtype.primitive_bitwidth // 8
    MAPS: gl.constexpr = STRIDE_ROWS * STRIDE_COLUMNS
    previous_wait()
    slot = 0
    phase = 1  # all slots are free at first: waiting for the phase before the first one returns at once
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, group)
        image, row, column = box_of(start + tile_m * 2, boxes_high, boxes_wide)
        upper = (image * IMAGES, row * HIGH, column * WIDE)
        image, row, column = box_of(start + tile_m * 2 + 1, boxes_high, boxes_wide)
        lower = (image * IMAGES, row * HIGH, column * WIDE)
        feature = tile_n * BLOCK_N
        for chunk in range(chunks):
            channel = chunk * CHANNELS
            for s in range(tap_columns):
                for r in range(tap_rows):
                    ready = full.index(slot)
                    mbarrier.wait(empty.index(slot), phase)
                    mbarrier.expect(ready, BYTES)
                    d = down + r * step_down
                    a = along + s * step_along
                    i = remainder_of(d, a, STRIDE_ROWS, STRIDE_COLUMNS)
                    to = sa.index(slot * 2)
                    load_under(maps, i, upper, d, a, channel, ready, to, STRIDE_ROWS, STRIDE_COLUMNS, MAPS)
                    to = sa.index(slot * 2 + 1)
                    load_under(maps, i, lower, d, a, channel, ready, to, STRIDE_ROWS, STRIDE_COLUMNS, MAPS)
                    tap_row = first_row + r * step_row
                    tap_column = first_column + s * step_column
                    for part in gl.static_range(PARTS):
                        to = sb.index(slot * PARTS + part)
                        here = feature + part * FEATURES
                        if BACK:
                            load_tile(weight, [channel, tap_row, tap_column, here], ready, to)
                        else:
                            load_tile(weight, [here, tap_row, tap_column, channel], ready, to)
                    slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def product_of(
    acc,
    ring,
    slot,
    phase,
    WHICH: gl.constexpr,
    ROWS: gl.constexpr,
    BACK: gl.constexpr,
    CHANNELS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    SWAPPED: gl.constexpr,
):
    """acc + x @ y of a slot, which wgmma computes from now on; x and y are those of warpgroup WHICH.

    x: (ROWS pixels, CHANNELS), y: (CHANNELS, BLOCK_N features). SWAPPED: x: (BLOCK_N / 2 features, CHANNELS), y:
    (CHANNELS, 2 * ROWS pixels). acc: f32.
    """
    sa, sb, _, full, _ = ring
    mbarrier.wait(full.index(slot), phase)
    if SWAPPED:
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * ROWS, CHANNELS], sa.dtype)
        y = reinterpret(sa, sa.dtype, [STAGES, 2 * ROWS, CHANNELS], layout).index(slot).permute((1, 0))
        own = sb.index(slot * 2 + WHICH)
        if BACK:
            x = matrix(own, CHANNELS, BLOCK_N // 2).permute((1, 0))
        else:
            x = matrix(own, BLOCK_N // 2, CHANNELS)
    else:
        x = matrix(sa.index(slot * 2 + WHICH), ROWS, CHANNELS)
        if BACK:
            y = matrix(sb.index(slot), CHANNELS, BLOCK_N)
        else:
            y = matrix(sb.index(slot), BLOCK_N, CHANNELS).permute((1, 0))
    return warpgroup_mma(x, y, acc, is_async=True)


@gluon.jit
def store_block(block, out, ring, place, i, WHICH: gl.constexpr, BUFFERS: gl.constexpr, BEFORE: gl.constexpr = 0):
    """Block ``i`` of the columns of warpgroup WHICH's results, of the element of ``out``, at ``place``.

    Blocks take buffers in turns; BEFORE: blocks of other boxes.
    """
    sc = ring[2]
    buffer = sc.index(WHICH * BUFFERS + (BEFORE + i) % BUFFERS)
    store_wait(BUFFERS - 1)  # TMA has read what these threads last put into this buffer
    thread_barrier()
    matrix(buffer, block.shape[0], block.shape[1]).store(block)
    fence_async_shared()
    thread_barrier()
    image, row, column, feature = place
    store_tile(out, [image, row, column, feature + i * block.shape[1]], buffer)


@gluon.jit
def place_of(box, column, boxes_high, boxes_wide, IMAGES: gl.constexpr, HIGH: gl.constexpr, WIDE: gl.constexpr):
    """The first (image, row, column, feature) of a box."""
    image, row, along = box_of(box, boxes_high, boxes_wide)
    return image * IMAGES, row * HIGH, along * WIDE, column


@gluon.jit
def store_part(
    parts,
    i,
    out,
    ring,
    places,
    WHICH: gl.constexpr,
    IMAGES: gl.constexpr,
    HIGH: gl.constexpr,
    BUFFERS: gl.constexpr,
    SWAPPED: gl.constexpr,
):
    """out[place ...] = parts[i] of warpgroup WHICH, of the element of ``out``.

    A part is (pixels of a box, a block of features) at places[0]. SWAPPED: (features, half the pixels of a box), stored
    transposed; two parts for each of ``places``.
    """
    if SWAPPED:
        image, row, column, feature = places[i // 2]
        half: gl.constexpr = i % 2
        if half:
            if out.block_type.shape[0] < IMAGES:
                image += IMAGES // 2
            elif out.block_type.shape[1] < HIGH:
                row += HIGH // 2
            else:
                column += out.block_type.shape[2]
        block = parts[i].permute((1, 0))
        store_block(block, out, ring, (image, row, column, feature), 0, WHICH, BUFFERS, i)
    else:
        store_block(parts[i], out, ring, places[0], i, WHICH, BUFFERS)


@gluon.jit
def multiply_pixels(
    out,
    bias,
    ring,
    extent,
    steps,
    features,
    WHICH: gl.constexpr,
    IMAGES: gl.constexpr,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    BACK: gl.constexpr,
    CHANNELS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    HOLDS: gl.constexpr,
    SWAPPED: gl.constexpr,
):
    """Warpgroup WHICH: one box of each of this program's tiles, by BLOCK_N features; SWAPPED: both, by half of these.

    With HOLDS the results of a tile are stored during the first products of the next one, a part each.
    """
    empty = ring[4]
    start, boxes, boxes_high, boxes_wide, tiles_n, group, _ = extent
    tiles_m = gl.cdiv(boxes, 2)
    ROWS: gl.constexpr = IMAGES * HIGH * WIDE
    OWN: gl.constexpr = BLOCK_N // 2 if SWAPPED else BLOCK_N  # features
    FIRST: gl.constexpr = WHICH * OWN if SWAPPED else 0
    HEIGHT: gl.constexpr = OWN if SWAPPED else ROWS
    WIDTH: gl.constexpr = 2 * ROWS if SWAPPED else OWN
    PARTS: gl.constexpr = 4 if SWAPPED else BLOCK_N // out.block_type.shape[3]
    DURING: gl.constexpr = PARTS if HOLDS else 0
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 256 // ring[0].dtype.primitive_bitwidth]
    )
    previous_wait()
    slot = 0
    phase = 0
    last = 0
    if HOLDS:
        held = gl.zeros((HEIGHT, WIDTH), out.dtype, layout)
        places = ((1 << 30, 0, 0, 0),) * (2 if SWAPPED else 1)  # behind all images: TMA writes nothing
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, group)
        if bias is not None:  # asked for before the products, which hide the latency
            spread: gl.constexpr = gl.BlockedLayout([OWN // 32 if OWN < 128 else OWN // 128], [32], [4], [0])
            at = tile_n * BLOCK_N + FIRST + gl.arange(0, OWN, layout=spread)
            added = gl.load(bias + at, mask=at < features, other=0.0)
        acc = gl.zeros((HEIGHT, WIDTH), gl.float32, layout)
        if HOLDS:
            parts = column_blocks(held, PARTS)
            for i in gl.static_range(PARTS):
                running = product_of(acc, ring, slot, phase, WHICH, ROWS, BACK, CHANNELS, BLOCK_N, STAGES, SWAPPED)
                store_part(parts, i, out, ring, places, WHICH, IMAGES, HIGH, BUFFERS, SWAPPED)
                acc, last, slot, phase = after_product(running, empty, last, slot, phase, i == 0, STAGES)
        for step in range(DURING, steps):
            running = product_of(acc, ring, slot, phase, WHICH, ROWS, BACK, CHANNELS, BLOCK_N, STAGES, SWAPPED)
            acc, last, slot, phase = after_product(running, empty, last, slot, phase, step == 0, STAGES)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(last), count=1, pred=steps > 0)
        if bias is not None:
            if SWAPPED:
                acc += gl.convert_layout(added, gl.SliceLayout(1, layout)).to(gl.float32)[:, None]
            else:
                acc += gl.convert_layout(added, gl.SliceLayout(0, layout)).to(gl.float32)[None, :]
        box = start + tile_m * 2
        feature = tile_n * BLOCK_N + FIRST
        if SWAPPED:
            here = (
                place_of(box, feature, boxes_high, boxes_wide, IMAGES, HIGH, WIDE),
                place_of(box + 1, feature, boxes_high, boxes_wide, IMAGES, HIGH, WIDE),
            )
        else:
            here = (place_of(box + WHICH, feature, boxes_high, boxes_wide, IMAGES, HIGH, WIDE),)
        if HOLDS:
            held = rounded(acc.to(out.dtype))
            places = here
        else:
            parts = column_blocks(acc, PARTS)
            for i in gl.static_range(PARTS):
                store_block(parts[i].to(out.dtype), out, ring, here[0], i, WHICH, BUFFERS)
    if HOLDS:
        parts = column_blocks(held, PARTS)
        for i in gl.static_range(PARTS):
            store_part(parts, i, out, ring, places, WHICH, IMAGES, HIGH, BUFFERS, SWAPPED)
    store_wait(0)


@gluon.jit
def conv2d_wgmma_kernel(
    x0,
    x1,
    x2,
    x3,
    weight,
    out,
    bias,
    bias_first,
    features,
    extent,
    taps,
    IMAGES: gl.constexpr,
    HIGH: gl.constexpr,
    WIDE: gl.constexpr,
    STRIDE_ROWS: gl.constexpr,
    STRIDE_COLUMNS: gl.constexpr,
    BACK: gl.constexpr,
    CHANNELS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    HOLDS: gl.constexpr,
    SWAPPED: gl.constexpr,
):
    """out[n, p, q, k] = bias[k] + sum over taps (r, s) and channels c of x[n, p * STRIDE_ROWS + down + r * step_down, q
    * STRIDE_COLUMNS + along + s * step_along, c] * weight[k, first_row + r * step_row, first_column + s * step_column,
    c].

    ``x0`` to ``x3`` are tensor maps (images, rows, columns, channels) of the rows and columns of each remainder modulo
    the strides, or None; ``out`` likewise, and ``weight`` (features, rows, columns, channels), with BACK (channels,
    rows, columns, features). f16, bf16, or f32 that is multiplied as tf32 (without BACK: wgmma takes tf32 with what is
    summed adjacent), accumulated in f32; ``bias`` (features,) from ``bias_first`` (None: 0) on, or None. ``extent``:
    the first box, how many there are from it on, those of a column and row of an image, tiles along the features, rows
    of tiles in a group, blocks of CHANNELS. ``taps``: for rows, then columns, what the formula names and how many taps
    there are. HOLDS, of elements of 2 bytes: a tile has at least as many steps as parts that are stored. SWAPPED, with
    HOLDS: the products' rows are features, their columns the pixels of both boxes.

    Runs on 4 warps, the first warpgroup, and 5 more that ``warp_specialize`` adds.
    """
    sa = gl.allocate_shared_memory(x0.dtype, [STAGES * 2] + x0.block_type.shape, x0.layout)
    PARTS: gl.constexpr = BLOCK_N // weight.block_type.shape[3 if BACK else 0]
    sb = gl.allocate_shared_memory(weight.dtype, [STAGES * PARTS] + weight.block_type.shape, weight.layout)
    sc = gl.allocate_shared_memory(out.dtype, [2 * BUFFERS] + out.block_type.shape, out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    start_ring(full, empty, STAGES)
    next_may_begin()
    if bias_first is not None:
        bias += bias_first
    ring = (sa, sb, sc, full, empty)
    steps = extent[6] * taps[2] * taps[7]
    gl.warp_specialize(
        [
            (
                multiply_pixels,
                (
                    out,
                    bias,
                    ring,
                    extent,
                    steps,
                    features,
                    0,
                    IMAGES,
                    HIGH,
                    WIDE,
                    BACK,
                    CHANNELS,
                    BLOCK_N,
                    STAGES,
                    BUFFERS,
                    HOLDS,
                    SWAPPED,
                ),
            ),
            (
                multiply_pixels,
                (
                    out,
                    bias,
                    ring,
                    extent,
                    steps,
                    features,
                    1,
                    IMAGES,
                    HIGH,
                    WIDE,
                    BACK,
                    CHANNELS,
                    BLOCK_N,
                    STAGES,
                    BUFFERS,
                    HOLDS,
                    SWAPPED,
                ),
            ),
            (
                load_pixels,
                (
                    (x0, x1, x2, x3),
                    weight,
                    ring,
                    extent,
                    taps,
                    IMAGES,
                    HIGH,
                    WIDE,
                    STRIDE_ROWS,
                    STRIDE_COLUMNS,
                    BACK,
                    CHANNELS,
                    BLOCK_N,
                    STAGES,
                ),
            ),
        ],
        [4, 1],  # warps of the second and the third partition
        [224, 56],  # registers of their threads
    )
