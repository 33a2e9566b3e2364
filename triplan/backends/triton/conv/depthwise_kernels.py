"""Kernels of ``depthwise``: convolution of each channel separately.

Channels share no factors, so there is no matrix product. Lanes are columns of a row by some channels, whatever their
number: what is adjacent in memory is adjacent in a warp, and no lane is idle. A thread computes several rows and
adjacent columns of its lanes: what it reads once is a factor of every result and tap that meets it. Rows, columns and
taps are unrolled, so that all loads wait together and no tap is divided into its row and column.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.conv.shared_kernels import offset, within


@triton.constexpr_function
def place(down, along, steps, extents):
    """The index, in ``extents``, of what lies so far down and along, in ``steps``; -1 if nothing does."""
    row, column = down // steps[0], along // steps[1]
    exists = (
        down == row * steps[0] and along == column * steps[1] and 0 <= row < extents[0] and 0 <= column < extents[1]
    )
    return row * extents[1] + column if exists else -1


@triton.constexpr_function
def tap_of(line, column, down, along, rest, which, strides, dilations, taps, transposed):
    """Which of ``taps`` a result reads from what lies so far down and along in the source; -1: none.

    Of the gradient of x, ``rest`` and ``which`` are added to rows and columns before they are divided.
    """
    if transposed:
        at = (line + rest - down * strides[0], which - (along - column) * strides[1])
    else:
        at = (down - line * strides[0], along - column * strides[1])
    return place(at[0], at[1], dilations, taps)


@triton.constexpr_function
def result_of(tap, down, along, dilations, taps, strides, results):
    """Which of ``results`` reads by a tap what lies so far down and along in the source; -1: none."""
    row, column = tap // taps[1] * dilations[0], tap % taps[1] * dilations[1]
    return place(down - row, along - column, strides, results)


@jit
def lanes_of(lane, of_channels, block, groups):
    """(group of columns, channel) of each lane: ``block`` adjacent channels, or (None) all groups of a channel."""
    if block is None:
        return lane % groups, lane // groups
    else:  # noqa: RET505 - Triton also compiles what follows a return
        return lane // block, of_channels * block + lane % block


@jit
def columns_from(at, column, inside, step, COUNT: tl.constexpr):
    """(addresses, columns) of COUNT columns from ``column`` on; what is not ``inside`` has column 2**30 or later."""
    found = ((at + offset(column, step), tl.where(inside, column, 2**30)),)
    if COUNT > 1:
        found = found + columns_from(at, column + 1, inside, step, COUNT - 1)
    return found


@jit
def read(column, plane, row, stride, rows, columns, ACC: tl.constexpr):
    """What a column (of ``columns_from``) has in a row of the image that begins at ``plane``; 0 outside of it.

    One comparison a load: a row that is outside has no columns.
    """
    at, which = column
    found = within(which, tl.where(within(row, rows), columns, 0))
    return tl.load(at + (plane + offset(row, stride)), mask=found, other=0.0).to(ACC)


@jit
def load_taps(weight, channel, inside, strides, tap_row, tap_column, ROWS: tl.constexpr, TAPS: tl.constexpr, ACC):
    """A tuple of ROWS by TAPS taps of each channel."""
    weight += offset(channel, strides[0])
    found = ()
    for i in tl.static_range(ROWS):
        for j in tl.static_range(TAPS):
            at = weight + (offset(tap_row + i, strides[2]) + offset(tap_column + j, strides[3]))
            found = found + (tl.load(at, mask=inside, other=0.0).to(ACC),)
    return found


@jit
def add_row(
    acc,
    weights,
    sources,
    plane,
    row,
    stride,
    rows,
    columns,
    SHIFT: tl.constexpr,
    WHICH: tl.constexpr,
    REST: tl.constexpr,
    RESULTS: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDES: tl.constexpr,
    DILATIONS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ACC: tl.constexpr,
):
    """acc (a tuple, RESULTS rows and columns) plus the products of row SHIFT of source with the taps that read it.

    ``sources``: columns. Tap j of column c reads ``c * stride + j * dilation`` of them, or of the gradient of x ``c +
    (WHICH - j * dilation) / stride``.
    """
    for p in tl.static_range(len(sources)):
        a = read(sources[p], plane, row, stride, rows, columns, ACC)
        sums = ()
        for line in tl.static_range(RESULTS[0]):
            for c in tl.static_range(RESULTS[1]):
                value = acc[line * RESULTS[1] + c]
                if tap_of(line, c, SHIFT, p, REST, WHICH, STRIDES, DILATIONS, KERNEL, TRANSPOSED) >= 0:
                    tap = weights[tap_of(line, c, SHIFT, p, REST, WHICH, STRIDES, DILATIONS, KERNEL, TRANSPOSED)]
                    value += a * tap
                sums = sums + (value,)
        acc = sums
    return acc


@jit
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
    period,
    block,
    groups,
    first_row,
    first_column,
    tiles_rows,
    tiles_lanes,
    tiles_channels,
    tiles_taps,
    tiles_tap_columns,
    turns,
    LINES: tl.constexpr,
    ACROSS: tl.constexpr,
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
    LEFT: tl.constexpr,
    COUNT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ACC: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out[pixel, channel] = bias[channel] + sum over taps of source[pixel at tap, channel] * weight[channel, tap].

    ``source`` and ``out``: (image, channel, row, column) of f16, bf16, f32 or f64; ``weight``: (channel, 1, tap row,
    tap column); strides in this order, None for 1; sums in ACC. A lane is one of ``groups`` groups of ACROSS columns of
    a channel. A program computes LANES lanes of ``turns`` tiles of LINES rows of one image, ROWS by TAPS taps at a time
    (these divide the kernel; ``tiles_taps`` is None if they are all). Tap row r of row p reads row ``p * STRIDE_ROWS +
    r * DILATION_ROWS + first_row`` of source; a tile reads SPAN rows from LOWEST on, and COUNT columns from LEFT on. Of
    each result the taps are added row by row. Channels have the weights of those modulo ``period``, unless it is None.

    TRANSPOSED: the gradient of x. Tap row r reads row ``(p + REST_ROWS - r * DILATION_ROWS) / STRIDE_ROWS +
    first_row`` if that is whole; LINES is a multiple of STRIDE_ROWS, so it is known when compiling which taps reach a
    row. A column of a group are then STRIDE_COLUMNS columns, one after the other, each with its own taps.
    """
    begin(OVERLAPS)
    program = tl.program_id(0)
    of_channels = program % tiles_channels
    program = program // tiles_channels
    lane = program % tiles_lanes * LANES + tl.arange(0, LANES)
    program = program // tiles_lanes
    first = program % tiles_rows * turns
    image = program // tiles_rows
    CLASSES: tl.constexpr = STRIDE_COLUMNS if TRANSPOSED else 1
    group, channel = lanes_of(lane, of_channels, block, groups)
    inside = (group < groups) & (channel < channels)
    own = channel if period is None else channel % period
    wide = group * ACROSS
    source += offset(channel, source_strides[1])
    plane = offset(image, source_strides[0])
    out += offset(image, out_strides[0]) + offset(channel, out_strides[1])
    if tiles_taps is None:
        weights = load_taps(weight, own, inside, weight_strides, 0, 0, ROWS, TAPS, ACC)
        x = (wide if TRANSPOSED else wide * STRIDE_COLUMNS) + (first_column + LEFT)
        sources = columns_from(source, x, inside, source_strides[3], COUNT)
    for which in tl.static_range(CLASSES):
        for turn in range(turns):
            top = (first + turn) * LINES
            acc = (tl.zeros((LANES,), ACC),) * (LINES * ACROSS)
            for tile in range(1 if tiles_taps is None else tiles_taps):
                y = (top // STRIDE_ROWS if TRANSPOSED else top * STRIDE_ROWS) + first_row
                if tiles_taps is not None:
                    tap_row, tap_column = tile // tiles_tap_columns * ROWS, tile % tiles_tap_columns * TAPS
                    weights = load_taps(weight, own, inside, weight_strides, tap_row, tap_column, ROWS, TAPS, ACC)
                    if TRANSPOSED:  # tiles of taps are multiples of the strides
                        y -= tap_row * DILATION_ROWS // STRIDE_ROWS
                        x = wide + (first_column + LEFT - tap_column * DILATION_COLUMNS // STRIDE_COLUMNS)
                    else:
                        y += tap_row * DILATION_ROWS
                        x = wide * STRIDE_COLUMNS + (first_column + LEFT + tap_column * DILATION_COLUMNS)
                    sources = columns_from(source, x, inside, source_strides[3], COUNT)
                for k in tl.static_range(SPAN):
                    acc = add_row(
                        acc,
                        weights,
                        sources,
                        plane,
                        y + (LOWEST + (SPAN - 1 - k if TRANSPOSED else k)),
                        source_strides[2],
                        source_rows,
                        source_columns,
                        LOWEST + (SPAN - 1 - k if TRANSPOSED else k),
                        which + REST_COLUMNS - LEFT * STRIDE_COLUMNS,
                        REST_ROWS,
                        (LINES, ACROSS),
                        (ROWS, TAPS),
                        (STRIDE_ROWS, STRIDE_COLUMNS),
                        (DILATION_ROWS, DILATION_COLUMNS),
                        TRANSPOSED,
                        ACC,
                    )
            for c in tl.static_range(ACROSS):
                column = (wide + c) * CLASSES + which
                to, found = out + offset(column, out_strides[3]), inside & (column < columns)
                for line in tl.static_range(LINES):
                    value = acc[line * ACROSS + c]
                    if bias is not None:
                        value += tl.load(bias + offset(own, bias_stride), mask=inside, other=0.0).to(ACC)
                    at = to + offset(top + line, out_strides[2])
                    tl.store(at, value.to(out.dtype.element_ty), mask=found & (top + line < rows))


@jit
def add_lines(
    acc,
    g,
    sources,
    plane,
    y,
    stride,
    height,
    width,
    RESULTS: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDES: tl.constexpr,
    DILATIONS: tl.constexpr,
):
    """acc (a tuple, of each tap of KERNEL the sums of the lanes) plus the products of RESULTS rows and columns of dout,
    ``g``, with the rows from ``y`` on of ``sources``, the columns of x under their taps."""
    for k in tl.static_range((RESULTS[0] - 1) * STRIDES[0] + (KERNEL[0] - 1) * DILATIONS[0] + 1):
        for p in tl.static_range(len(sources)):
            a = read(sources[p], plane, y + k, stride, height, width, acc[0].dtype)
            sums = ()
            for tap in tl.static_range(len(acc)):
                value = acc[tap]
                if result_of(tap, k, p, DILATIONS, KERNEL, STRIDES, RESULTS) >= 0:
                    value += a * g[result_of(tap, k, p, DILATIONS, KERNEL, STRIDES, RESULTS)]
                sums = sums + (value,)
            acc = sums
    return acc


@jit
def load_lines(columns, plane, row, stride, inside, LINES: tl.constexpr, ACROSS: tl.constexpr, ACC: tl.constexpr):
    """A tuple of LINES rows of ACROSS ``columns``, from ``row`` on."""
    found = ()
    for line in tl.static_range(LINES):
        for c in tl.static_range(ACROSS):
            at, _ = columns[c]
            found = found + (tl.load(at + (plane + offset(row + line, stride)), mask=inside, other=0.0).to(ACC),)
    return found


@jit
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
    groups,
    first_row,
    first_column,
    tiles_rows,
    tiles_lanes,
    tiles_channels,
    tiles_taps,
    tiles_tap_columns,
    LINES: tl.constexpr,
    ACROSS: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    TAPS: tl.constexpr,
    STRIDE_ROWS: tl.constexpr,
    STRIDE_COLUMNS: tl.constexpr,
    DILATION_ROWS: tl.constexpr,
    DILATION_COLUMNS: tl.constexpr,
    ACC: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out[part, channel, tap] = sum over the pixels of a part of dout[pixel, channel] * x[pixel at tap, channel].

    ``x`` and ``dout``: (image, channel, row, column) of f16, bf16, f32 or f64; ``out``: (part, channel, 1, tap row, tap
    column), where parts have the stride ``part_stride``; strides in this order, None for 1. A part is one of ``groups``
    groups of ACROSS columns (which divide ``columns``) of ``each`` of the ``units``: LINES rows of one image,
    ``tiles_rows`` of which make an image; the rows that are left are added one by one (0 times an infinity would be
    NaN). Each lane sums its own columns, and the sum of the parts adds the groups. A program computes LANES lanes and
    ROWS by TAPS taps, which divide the kernel.
    """
    begin(OVERLAPS)
    program = tl.program_id(0)
    tile = program % tiles_taps
    tap_row, tap_column = tile // tiles_tap_columns * ROWS, tile % tiles_tap_columns * TAPS
    program = program // tiles_taps
    of_channels = program % tiles_channels
    program = program // tiles_channels
    lane = program % tiles_lanes * LANES + tl.arange(0, LANES)
    part = program // tiles_lanes
    group, channel = lanes_of(lane, of_channels, block, groups)
    wide = group * ACROSS
    inside = (group < groups) & (channel < channels)  # also under the padding: 0 times infinity is NaN
    REACH: tl.constexpr = (ACROSS - 1) * STRIDE_COLUMNS + (TAPS - 1) * DILATION_COLUMNS
    at = wide * STRIDE_COLUMNS + (first_column + tap_column * DILATION_COLUMNS)
    sources = columns_from(x + offset(channel, x_strides[1]), at, inside, x_strides[3], REACH + 1)
    results = columns_from(dout + offset(channel, dout_strides[1]), wide, inside, dout_strides[3], ACROSS)
    above = first_row + tap_row * DILATION_ROWS
    acc = (tl.zeros((LANES,), ACC),) * (ROWS * TAPS)
    start = part * each
    last = tl.minimum(start + each, units)
    for unit in range(start, last):
        image, top = unit // tiles_rows, unit % tiles_rows * LINES
        plane = offset(image, dout_strides[0])
        acc = add_lines(
            acc,
            load_lines(results, plane, top, dout_strides[2], inside, LINES, ACROSS, ACC),
            sources,
            offset(image, x_strides[0]),
            top * STRIDE_ROWS + above,
            x_strides[2],
            height,
            width,
            (LINES, ACROSS),
            (ROWS, TAPS),
            (STRIDE_ROWS, STRIDE_COLUMNS),
            (DILATION_ROWS, DILATION_COLUMNS),
        )
    left = rows - tiles_rows * LINES
    for i in range(start // tiles_rows * left, tl.cdiv(last, tiles_rows) * left):
        image, row = i // left, tiles_rows * LINES + i % left
        # The rows that are left of an image belong to the part that has its first unit.
        own = (image * tiles_rows >= start) & (image * tiles_rows < last)
        acc = add_lines(
            acc,
            load_lines(results, offset(image, dout_strides[0]), row, dout_strides[2], inside & own, 1, ACROSS, ACC),
            sources,
            offset(image, x_strides[0]),
            row * STRIDE_ROWS + above,
            x_strides[2],
            tl.where(own, height, 0),
            width,
            (1, ACROSS),
            (ROWS, TAPS),
            (STRIDE_ROWS, STRIDE_COLUMNS),
            (DILATION_ROWS, DILATION_COLUMNS),
        )
    to = out + (part * groups + group).to(tl.int64) * part_stride + offset(channel, out_strides[0])
    for i in tl.static_range(ROWS):
        for j in tl.static_range(TAPS):
            at = to + (offset(tap_row + i, out_strides[2]) + offset(tap_column + j, out_strides[3]))
            tl.store(at, acc[i * TAPS + j].to(out.dtype.element_ty), mask=inside)
