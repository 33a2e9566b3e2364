"""Kernels of ``depthwise``: convolution of each channel separately.

Channels share no factors, so there is no matrix product. Lanes are the columns of a row by some channels, whatever
their number: what is adjacent in memory is adjacent in a warp, and no lane is idle. A thread computes several rows of
its lanes: what it reads once is a factor of every row and tap that meets it. Rows and taps are unrolled, so that all
loads wait together and no tap is divided into its row and column.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.conv.shared_kernels import offset, within


@triton.jit
def lanes_of(lane, of_channels, block, columns):
    """(column, channel) of each lane: ``block`` adjacent channels of a column, or (None) all columns of a channel."""
    if block is None:
        return lane % columns, lane // columns
    else:  # noqa: RET505 - Triton also compiles what follows a return
        return lane // block, of_channels * block + lane % block


@triton.jit
def read(at, inside, column, step, extent, MOVED: tl.constexpr, ACC: tl.constexpr):
    """What lies MOVED columns after ``column`` (of ``extent``, ``step`` apart), whose addresses are ``at``."""
    found = inside & within(column + MOVED, extent)
    return tl.load(at + offset(MOVED, step), mask=found, other=0.0).to(ACC)


@triton.jit
def add_row(
    acc,
    weights,
    at,
    inside,
    column,
    step,
    extent,
    SHIFT: tl.constexpr,
    WHICH: tl.constexpr,
    LINES: tl.constexpr,
    ROWS: tl.constexpr,
    TAPS: tl.constexpr,
    STRIDE_ROWS: tl.constexpr,
    STRIDE_COLUMNS: tl.constexpr,
    DILATION_ROWS: tl.constexpr,
    DILATION_COLUMNS: tl.constexpr,
    REST_ROWS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ACC: tl.constexpr,
):
    """acc (a tuple of LINES rows) plus the products of row SHIFT of source, whose addresses are ``at``: with the taps
    that read it for a row. WHICH: the remainder of the columns, modulo the stride, of the gradient of x."""
    for j in tl.static_range(TAPS):
        if not TRANSPOSED or (WHICH - j * DILATION_COLUMNS) % STRIDE_COLUMNS == 0:
            if TRANSPOSED:
                a = read(at, inside, column, step, extent, (WHICH - j * DILATION_COLUMNS) // STRIDE_COLUMNS, ACC)
            else:
                a = read(at, inside, column, step, extent, j * DILATION_COLUMNS, ACC)
            sums = ()
            for line in tl.static_range(LINES):
                value = acc[line]
                for i in tl.static_range(ROWS):
                    if TRANSPOSED:
                        if line + REST_ROWS - i * DILATION_ROWS == SHIFT * STRIDE_ROWS:
                            value += a * weights[i * TAPS + j]
                    elif line * STRIDE_ROWS + i * DILATION_ROWS == SHIFT:
                        value += a * weights[i * TAPS + j]
                sums = sums + (value,)
            acc = sums
    return acc


@triton.jit
def conv2d_depthwise_kernel(
    source,
    weight,
    bias,
    out,
    source_strides,
    weight_strides,
    bias_stride,
    out_strides,
    rows,
    columns,
    source_rows,
    source_columns,
    channels,
    block,
    first_row,
    first_column,
    tiles_rows,
    tiles_lanes,
    tiles_channels,
    tiles_taps,
    tiles_tap_columns,
    LINES: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    TAPS: tl.constexpr,
    STRIDE_ROWS: tl.constexpr,
    STRIDE_COLUMNS: tl.constexpr,
    DILATION_ROWS: tl.constexpr,
    DILATION_COLUMNS: tl.constexpr,
    REST_ROWS: tl.constexpr,
    REST_COLUMNS: tl.constexpr,
    LOWEST: tl.constexpr,
    SPAN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ACC: tl.constexpr,
):
    """out[pixel, channel] = bias[channel] + sum over taps of source[pixel at tap, channel] * weight[channel, tap].

    ``source`` and ``out``: (image, channel, row, column) of f16, bf16, f32 or f64; ``weight``: (channel, 1, tap row,
    tap column); strides in this order, None for 1; sums in ACC. A program computes LANES lanes of LINES rows of one
    image, ROWS by TAPS taps at a time (these divide the kernel): tap row r of row p reads row ``p * STRIDE_ROWS + r *
    DILATION_ROWS + first_row`` of source, SPAN rows from LOWEST on. Of each result the taps are added row by row.

    TRANSPOSED: the gradient of x. Tap row r reads row ``(p + REST_ROWS - r * DILATION_ROWS) / STRIDE_ROWS +
    first_row`` if that is whole; LINES is a multiple of STRIDE_ROWS, so it is known when compiling which taps reach a
    row. A column of lanes are then STRIDE_COLUMNS columns, one after the other, each with its own taps.
    """
    program = tl.program_id(0)
    of_channels = program % tiles_channels
    program = program // tiles_channels
    lane = program % tiles_lanes * LANES + tl.arange(0, LANES)
    program = program // tiles_lanes
    top = program % tiles_rows * LINES
    image = program // tiles_rows
    CLASSES: tl.constexpr = STRIDE_COLUMNS if TRANSPOSED else 1
    wide, channel = lanes_of(lane, of_channels, block, (columns + CLASSES - 1) // CLASSES)
    origin = source + offset(image, source_strides[0]) + offset(channel, source_strides[1])
    for which in tl.static_range(CLASSES):
        column = wide * CLASSES + which
        inside = (column < columns) & (channel < channels)
        acc = (tl.zeros((LANES,), ACC),) * LINES
        for tile in range(tiles_taps):
            tap_row, tap_column = tile // tiles_tap_columns * ROWS, tile % tiles_tap_columns * TAPS
            if TRANSPOSED:  # tiles of taps are multiples of the strides, or all taps
                y = top // STRIDE_ROWS + first_row - tap_row * DILATION_ROWS // STRIDE_ROWS
                x = wide + first_column - tap_column * DILATION_COLUMNS // STRIDE_COLUMNS
            else:
                y = top * STRIDE_ROWS + first_row + tap_row * DILATION_ROWS
                x = wide * STRIDE_COLUMNS + first_column + tap_column * DILATION_COLUMNS
            weights = ()
            for i in tl.static_range(ROWS):
                for j in tl.static_range(TAPS):
                    at = offset(tap_row + i, weight_strides[2]) + offset(tap_column + j, weight_strides[3])
                    at = weight + offset(channel, weight_strides[0]) + at
                    weights = weights + (tl.load(at, mask=inside, other=0.0).to(ACC),)
            for k in tl.static_range(SPAN):
                row = y + (LOWEST + (SPAN - 1 - k if TRANSPOSED else k))
                acc = add_row(
                    acc,
                    weights,
                    origin + offset(row, source_strides[2]) + offset(x, source_strides[3]),
                    inside & within(row, source_rows),
                    x,
                    source_strides[3],
                    source_columns,
                    LOWEST + (SPAN - 1 - k if TRANSPOSED else k),
                    which + REST_COLUMNS,
                    LINES,
                    ROWS,
                    TAPS,
                    STRIDE_ROWS,
                    STRIDE_COLUMNS,
                    DILATION_ROWS,
                    DILATION_COLUMNS,
                    REST_ROWS,
                    TRANSPOSED,
                    ACC,
                )
        to = out + offset(image, out_strides[0]) + offset(channel, out_strides[1]) + offset(column, out_strides[3])
        for line in tl.static_range(LINES):
            value = acc[line]
            if bias is not None:
                value += tl.load(bias + offset(channel, bias_stride), mask=inside, other=0.0).to(ACC)
            at = to + offset(top + line, out_strides[2])
            tl.store(at, value.to(out.dtype.element_ty), mask=inside & (top + line < rows))


@triton.jit
def add_lines(
    acc,
    g,
    x,
    at_column,
    inside,
    y,
    row_stride,
    column_stride,
    height,
    width,
    LINES: tl.constexpr,
    ROWS: tl.constexpr,
    TAPS: tl.constexpr,
    STRIDE: tl.constexpr,
    DILATION_ROWS: tl.constexpr,
    DILATION_COLUMNS: tl.constexpr,
):
    """acc (a tuple, of each tap the sums of the lanes) plus the products of LINES rows of dout, ``g``, with x's rows
    from ``y`` on, whose columns are ``at_column`` under the first tap."""
    SPAN: tl.constexpr = (LINES - 1) * STRIDE + (ROWS - 1) * DILATION_ROWS + 1
    for k in tl.static_range(SPAN):
        in_row = inside & within(y + k, height)
        at_row = x + offset(y + k, row_stride)
        for j in tl.static_range(TAPS):
            a = read(at_row, in_row, at_column, column_stride, width, j * DILATION_COLUMNS, acc[0].dtype)
            sums = ()
            for tap in tl.static_range(ROWS * TAPS):
                value = acc[tap]
                if tap % TAPS == j:
                    for line in tl.static_range(LINES):
                        if line * STRIDE + tap // TAPS * DILATION_ROWS == k:
                            value += a * g[line]
                sums = sums + (value,)
            acc = sums
    return acc


@triton.jit
def conv2d_depthwise_weight_kernel(
    x,
    dout,
    out,
    x_strides,
    dout_strides,
    out_strides,
    part_stride,
    units,
    each,
    rows,
    columns,
    height,
    width,
    channels,
    block,
    first_row,
    first_column,
    tiles_rows,
    tiles_lanes,
    tiles_channels,
    tiles_taps,
    tiles_tap_columns,
    LINES: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    TAPS: tl.constexpr,
    STRIDE_ROWS: tl.constexpr,
    STRIDE_COLUMNS: tl.constexpr,
    DILATION_ROWS: tl.constexpr,
    DILATION_COLUMNS: tl.constexpr,
    ACC: tl.constexpr,
):
    """out[part, channel, tap] = sum over a column of a part's rows of dout[pixel, channel] * x[pixel at tap, channel].

    ``x`` and ``dout``: (image, channel, row, column) of f16, bf16, f32 or f64; ``out``: (part, channel, 1, tap row, tap
    column), where parts have the stride ``part_stride``; strides in this order, None for 1. A part is a column of
    ``each`` of the ``units``: LINES rows of one image, ``tiles_rows`` of which make an image; the rows that are left
    are added one by one (0 times an infinity would be NaN). Each lane sums its own column, and the sum of the parts
    adds columns. A program computes LANES lanes and ROWS by TAPS taps, which divide the kernel.
    """
    program = tl.program_id(0)
    tile = program % tiles_taps
    tap_row, tap_column = tile // tiles_tap_columns * ROWS, tile % tiles_tap_columns * TAPS
    program = program // tiles_taps
    of_channels = program % tiles_channels
    program = program // tiles_channels
    lane = program % tiles_lanes * LANES + tl.arange(0, LANES)
    part = program // tiles_lanes
    column, channel = lanes_of(lane, of_channels, block, columns)
    inside = (column < columns) & (channel < channels)  # also under the padding: 0 times infinity is NaN
    at_column = column * STRIDE_COLUMNS + first_column + tap_column * DILATION_COLUMNS
    dout += offset(channel, dout_strides[1]) + offset(column, dout_strides[3])
    x += offset(channel, x_strides[1]) + offset(at_column, x_strides[3])
    above = first_row + tap_row * DILATION_ROWS
    acc = (tl.zeros((LANES,), ACC),) * (ROWS * TAPS)
    start = part * each
    last = tl.minimum(start + each, units)
    for unit in range(start, last):
        image, top = unit // tiles_rows, unit % tiles_rows * LINES
        g = ()
        for line in tl.static_range(LINES):
            at = offset(image, dout_strides[0]) + offset(top + line, dout_strides[2])
            g = g + (tl.load(dout + at, mask=inside, other=0.0).to(ACC),)
        acc = add_lines(
            acc,
            g,
            x + offset(image, x_strides[0]),
            at_column,
            inside,
            top * STRIDE_ROWS + above,
            x_strides[2],
            x_strides[3],
            height,
            width,
            LINES,
            ROWS,
            TAPS,
            STRIDE_ROWS,
            DILATION_ROWS,
            DILATION_COLUMNS,
        )
    left = rows - tiles_rows * LINES
    for i in range(start // tiles_rows * left, tl.cdiv(last, tiles_rows) * left):
        image, row = i // left, tiles_rows * LINES + i % left
        # The rows that are left of an image belong to the part that has its first unit.
        own = (image * tiles_rows >= start) & (image * tiles_rows < last)
        at = offset(image, dout_strides[0]) + offset(row, dout_strides[2])
        found = inside & own
        g = (tl.load(dout + at, mask=found, other=0.0).to(ACC),)
        acc = add_lines(
            acc,
            g,
            x + offset(image, x_strides[0]),
            at_column,
            found,
            row * STRIDE_ROWS + above,
            x_strides[2],
            x_strides[3],
            height,
            width,
            1,
            ROWS,
            TAPS,
            STRIDE_ROWS,
            DILATION_ROWS,
            DILATION_COLUMNS,
        )
    to = out + (part * columns + column).to(tl.int64) * part_stride + offset(channel, out_strides[0])
    for i in tl.static_range(ROWS):
        for j in tl.static_range(TAPS):
            at = to + (offset(tap_row + i, out_strides[2]) + offset(tap_column + j, out_strides[3]))
            tl.store(at, acc[i * TAPS + j].to(out.dtype.element_ty), mask=inside)
