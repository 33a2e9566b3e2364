"""Kernel of ``fma``: convolution of f32 by FMAs, whose source passes through shared memory as it lies (Gluon)."""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import (
    copies_committed,
    copies_wait,
    copy_block,
    gl,
    gluon,
    next_may_begin,
    previous_wait,
    thread_barrier,
)
from triplan.backends.triton.common.registers_kernels import multiply_step, opaque


@gluon.jit
def scaled(index, stride):
    """``index * stride`` in i64; a ``stride`` of None is 1."""
    wide = index.to(gl.int64)
    if stride is not None:
        wide = wide * stride
    return wide


@gluon.jit
def place_of(pixel, rows, columns):
    """(image, row, column) of ``pixel``."""
    line = pixel // columns
    image = line // rows
    return image, line - image * rows, pixel - line * columns


@gluon.jit
def start_step(source, weight, ring, slot, step, extents, taps, source_strides, weight_strides):
    """Start to copy the blocks of ``step`` into ``slot`` of the ring; nothing of a step behind the last."""
    a_at, top, side, a_depth, b_at, b_depth, b_in = source + weight
    sa, sb = ring
    steps, blocks, channels, source_channels, source_rows, source_columns = extents
    tap_columns, down, along = taps
    tap = step // blocks
    first = (step - tap * blocks) * sa.shape[2]
    tap_row = tap // tap_columns
    tap_column = tap - tap_row * tap_columns
    lower = tap_row * down
    further = tap_column * along
    y = top + lower
    x = side + further
    inside = (y >= 0) & (y < source_rows) & (x >= 0) & (x < source_columns)
    left = gl.where(step < steps, source_channels - first, 0)
    reached = scaled(lower, source_strides[2]) + scaled(further, source_strides[3]) + first
    copy_block(sa.index(slot), a_at + reached, mask=inside[:, None] & (a_depth < left))
    left = gl.where(step < steps, channels - first, 0)
    reached = scaled(first, weight_strides[1]) + scaled(tap_row, weight_strides[2])
    reached += scaled(tap_column, weight_strides[3])
    copy_block(sb.index(slot), b_at + reached, mask=b_in & (b_depth < left))
    copies_committed()


@gluon.jit
def conv2d_fma_kernel(
    source,
    weight,
    bias,
    out,
    source_strides,
    weight_strides,
    bias_stride,
    out_strides,
    pixels,
    rows,
    columns,
    source_rows,
    source_columns,
    source_channels,
    channels,
    own_features,
    features,
    first_feature,
    tiles_n,
    taps,
    tap_columns,
    stride_rows,
    stride_columns,
    above,
    left,
    down,
    along,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    OUT_VECTOR: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """out[pixel, feature] = bias[feature] + sum over (tap, channel) of source[pixel at tap, channel] * weight: BLOCK_M
    pixels by BLOCK_N features, from ``first_feature`` on (None: from the first).

    ``source`` and ``out`` (image, channel, row, column), ``weight`` (feature, channel, tap row, tap column) of f32,
    their strides in this order, None for 1; those of the source's channels and the weight's features are 1, and both
    are read in vectors: the source has ``source_channels``, of which all but ``channels`` are 0, and the weight
    ``own_features``. Tap 0 of a result reads the source at (row * stride_rows - above, column * stride_columns - left),
    each further one ``down`` rows or ``along`` columns beside it; of the gradient of x they go back.

    A thread accumulates 8 rows by 16 columns, as in a product of matrices: for 128 FMAs, 24 elements come from shared
    memory, which passes 32 a clock to all warps of a multiprocessor. All that the pixels of a tile differ in is known
    before the steps: their addresses under tap 0, and where that is. A step adds what all of them have in common.
    """
    if OVERLAPS:
        next_may_begin()
        previous_wait()
    # Rows of the source stay rows in shared memory, from which vectors along the channels are read. Threads down have
    # adjacent rows, which lie in different banks.
    across: gl.constexpr = BLOCK_N // 16
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // across, across], [WARPS, 1], [1, 0])
    # Two threads read a sector of 32 bytes. Of many rows, which take registers, a thread has all sectors.
    beside: gl.constexpr = BLOCK_K // 4 if BLOCK_M <= 32 * WARPS else 2
    a_copies: gl.constexpr = gl.BlockedLayout([1, 4], [32 // beside, beside], [WARPS, 1], [1, 0])
    wide: gl.constexpr = BLOCK_N // 4
    b_copies: gl.constexpr = gl.BlockedLayout([1, 4], [32 // wide, wide], [WARPS, 1], [1, 0])
    # Vectors of one column from eight adjacent rows are in different banks.
    a_shared: gl.constexpr = gl.SwizzledSharedLayout(4, 32 // BLOCK_K, BLOCK_K // 4, [1, 0])
    b_shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    sa = gl.allocate_shared_memory(source.dtype.element_ty, [STAGES, BLOCK_M, BLOCK_K], a_shared)
    sb = gl.allocate_shared_memory(weight.dtype.element_ty, [STAGES, BLOCK_K, BLOCK_N], b_shared)
    program = gl.program_id(0)
    begins = program // tiles_n * BLOCK_M
    starts = program % tiles_n * BLOCK_N
    if first_feature is not None:
        starts += first_feature

    pixel = begins + gl.arange(0, BLOCK_M, gl.SliceLayout(1, a_copies))
    image, row, column = place_of(pixel, rows, columns)
    if stride_rows is not None:
        row = row * stride_rows
        column = column * stride_columns
    # No tap reaches the image from rows behind the last pixel.
    top = gl.where(pixel < pixels, row - above, -(2**30))
    side = column - left
    a_at = scaled(image, source_strides[0]) + scaled(row - above, source_strides[2])
    a_at += scaled(side, source_strides[3])
    a_depth = gl.arange(0, BLOCK_K, gl.SliceLayout(0, a_copies))[None, :]
    a_at = source + (a_at[:, None] + a_depth)
    feature = starts + gl.arange(0, BLOCK_N, gl.SliceLayout(0, b_copies))
    b_depth = gl.arange(0, BLOCK_K, gl.SliceLayout(1, b_copies))[:, None]
    b_at = weight + (scaled(b_depth, weight_strides[1]) + feature[None, :])
    b_in = (feature < own_features)[None, :]

    blocks = gl.cdiv(channels, BLOCK_K)
    steps = taps * blocks
    extents = (steps, blocks, channels, source_channels, source_rows, source_columns)
    ways = (tap_columns, down, along)
    images = (a_at, top, side, a_depth)
    filters = (b_at, b_depth, b_in)
    for i in gl.static_range(STAGES - 1):
        start_step(images, filters, (sa, sb), i, i, extents, ways, source_strides, weight_strides)
    acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
    slot = 0
    free = STAGES - 1
    for step in range(steps):
        copies_wait(STAGES - 2)
        # This step has come for every warp, and all are done with the one before, whose slot is filled again.
        thread_barrier()
        ahead = step + STAGES - 1
        start_step(images, filters, (sa, sb), free, ahead, extents, ways, source_strides, weight_strides)
        acc = multiply_step(acc, sa.index(slot), sb.index(slot), layout)
        free = slot
        slot = gl.where(slot + 1 == STAGES, 0, slot + 1)
    copies_wait(0)

    if OUT_VECTOR == 1 and BLOCK_N == 128:
        # Elements are stored one by one: those that a warp stores at a time are adjacent. In narrow tiles a thread
        # would have more rows than registers hold addresses.
        stored: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
        acc = gl.convert_layout(acc, stored)
    else:
        stored: gl.constexpr = layout
    # (opaque, lest what the pixels' places have in common with those of the source is kept in registers)
    pixel = opaque(begins) + gl.arange(0, BLOCK_M, gl.SliceLayout(1, stored))
    feature = starts + gl.arange(0, BLOCK_N, gl.SliceLayout(0, stored))
    if bias is not None:
        acc += gl.load(bias + scaled(feature, bias_stride), mask=feature < features, other=0.0)[None, :]
    image, row, column = place_of(pixel, rows, columns)
    at = scaled(image, out_strides[0]) + scaled(row, out_strides[2]) + scaled(column, out_strides[3])
    at = at[:, None] + scaled(feature, out_strides[1])[None, :]
    gl.store(out + at, acc, mask=(pixel < pixels)[:, None] & (feature < features)[None, :])
