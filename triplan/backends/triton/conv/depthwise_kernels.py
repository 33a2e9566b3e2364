"""Kernels of ``depthwise``: convolution of each channel separately.

Channels share no factors, so there is no matrix product. A thread multiplies and adds for a few pixels of a few
channels, which are adjacent in memory if channels are last.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.conv.shared_kernels import first, offset, position


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
    taps,
    kernel_columns,
    stride_rows,
    stride_columns,
    above,
    left,
    dilation_rows,
    dilation_columns,
    tiles_rows,
    tiles_columns,
    tiles_channels,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ACC: tl.constexpr,
):
    """out[pixel, channel] = bias[channel] + sum over taps of source[pixel at tap, channel] * weight[channel, tap].

    ``source`` and ``out``: (image, channel, row, column) of f16, bf16, f32 or f64; ``weight``: (channel, 1, tap row,
    tap column); strides in this order, None for 1; sums in ACC. A program computes BLOCK_C channels of TILE_ROWS by
    TILE_COLUMNS pixels of one image; tiles are nearly square, so that the taps of their pixels share lines of the L1
    cache; ``tiles_rows`` of None: pixels follow each other row by row. TRANSPOSED: the gradient of x.
    """
    program = tl.program_id(0)
    channel = program % tiles_channels * BLOCK_C + tl.arange(0, BLOCK_C)
    program = program // tiles_channels
    lane = tl.arange(0, TILE_ROWS * TILE_COLUMNS)
    if tiles_rows is None:
        pixel = program % tiles_columns * TILE_COLUMNS + lane
        row, column, image = pixel // columns, pixel % columns, program // tiles_columns
    else:
        column = program % tiles_columns * TILE_COLUMNS + lane % TILE_COLUMNS
        program = program // tiles_columns
        row = program % tiles_rows * TILE_ROWS + lane // TILE_COLUMNS
        image = program // tiles_rows
    inside = channel < channels
    at_row, at_column = row + above, column + left
    if not TRANSPOSED:
        at_row, at_column = first(row, stride_rows, above), first(column, stride_columns, left)
    lanes = source + offset(image, source_strides[0]) + offset(channel, source_strides[1])[None, :]
    weights = weight + offset(channel, weight_strides[0])
    acc = tl.zeros((TILE_ROWS * TILE_COLUMNS, BLOCK_C), ACC)
    SKIPPING: tl.constexpr = TRANSPOSED and stride_rows is not None
    if not SKIPPING:  # then a tap moves all pixels alike
        lanes += (offset(at_row, source_strides[2]) + offset(at_column, source_strides[3]))[:, None]
    for tap in range(taps):
        tap_row, tap_column = tap // kernel_columns, tap % kernel_columns
        if SKIPPING:
            y, in_rows = position(at_row, tap_row, dilation_rows, stride_rows, source_rows, TRANSPOSED)
            x, in_columns = position(
                at_column, tap_column, dilation_columns, stride_columns, source_columns, TRANSPOSED
            )
            at = lanes + (offset(y, source_strides[2]) + offset(x, source_strides[3]))[:, None]
        else:
            down, along = tap_row * dilation_rows, tap_column * dilation_columns
            if TRANSPOSED:
                down, along = -down, -along
            y, x = at_row + down, at_column + along
            in_rows, in_columns = (y >= 0) & (y < source_rows), (x >= 0) & (x < source_columns)
            at = lanes + (offset(down, source_strides[2]) + offset(along, source_strides[3]))
        a = tl.load(at, mask=(in_rows & in_columns)[:, None] & inside[None, :], other=0.0).to(ACC)
        at = weights + offset(tap_row, weight_strides[2]) + offset(tap_column, weight_strides[3])
        w = tl.load(at, mask=inside, other=0.0).to(ACC)[None, :]
        if SKIPPING:  # 0 times an infinite weight would be NaN
            reached = ((at_row - tap_row * dilation_rows) % stride_rows == 0) & (
                (at_column - tap_column * dilation_columns) % stride_columns == 0
            )
            w = tl.where(reached[:, None], w, 0.0)
        acc += a * w
    if bias is not None:
        acc += tl.load(bias + offset(channel, bias_stride), mask=inside, other=0.0).to(ACC)[None, :]
    at = out + offset(image, out_strides[0]) + offset(channel, out_strides[1])[None, :]
    at = at + (offset(row, out_strides[2]) + offset(column, out_strides[3]))[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=((row < rows) & (column < columns))[:, None] & inside[None, :])


@triton.jit
def conv2d_depthwise_weight_kernel(
    x,
    dout,
    out,
    x_strides,
    dout_strides,
    out_strides,
    part_stride,
    lines,
    each,
    rows,
    columns,
    height,
    width,
    channels,
    kernel_rows,
    kernel_columns,
    stride_rows,
    stride_columns,
    above,
    left,
    dilation_rows,
    dilation_columns,
    tiles_channels,
    TAPS: tl.constexpr,
    LINES: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC: tl.constexpr,
):
    """out[part, channel, tap] = sum over the part's ``each`` lines of dout[pixel, channel] * x[pixel at tap, channel].

    ``x`` and ``dout``: (image, channel, row, column) of f16, bf16, f32 or f64; ``out``: (part, channel, 1, tap row, tap
    column), where parts have the stride ``part_stride``; strides in this order, None for 1. ``lines``: rows of dout in
    all images. A program computes BLOCK_C channels, one row of taps (TAPS, of which ``kernel_columns`` exist) and one
    part. A step takes WIDE columns of LINES lines, whose numbers are not divided pixel by pixel. dout is read once for
    a row of taps; each of LINES * WIDE lanes sums its own pixels, and the lanes are added at the end.
    """
    program = tl.program_id(0)
    tap_row = program % kernel_rows
    program = program // kernel_rows
    channel = program % tiles_channels * BLOCK_C + tl.arange(0, BLOCK_C)
    part = program // tiles_channels
    tap_column = tl.arange(0, TAPS)
    lane = tl.arange(0, LINES * WIDE)
    inside, in_taps = channel < channels, tap_column < kernel_columns
    of_dout = dout + offset(channel, dout_strides[1])[None, :]
    of_x = x + offset(channel, x_strides[1])[None, None, :]
    shift = (tap_column * dilation_columns - left)[:, None]
    acc = tl.zeros((TAPS, LINES * WIDE, BLOCK_C), ACC)
    last = tl.minimum((part + 1) * each, lines)
    for first_line in range(part * each, last, LINES):
        line = first_line if LINES == 1 else first_line + lane // WIDE
        image, row = line // rows, line % rows
        y = first(row, stride_rows, above) + tap_row * dilation_rows
        in_x = (y >= 0) & (y < height)
        line_of_dout = offset(image, dout_strides[0]) + offset(row, dout_strides[2])
        line_of_x = offset(image, x_strides[0]) + offset(y, x_strides[2])
        for start in range(0, columns, WIDE):
            column = start + lane % WIDE
            found = (line < last) & (column < columns)  # also under the padding: 0 times infinity is NaN
            at = line_of_dout + offset(column, dout_strides[3])
            g = tl.load(of_dout + at[:, None], mask=found[:, None] & inside[None, :], other=0.0).to(ACC)
            z = (column if stride_columns is None else column * stride_columns)[None, :] + shift
            found = (found & in_x)[None, :] & in_taps[:, None] & (z >= 0) & (z < width)
            at = offset(z, x_strides[3]) + (line_of_x if LINES == 1 else line_of_x[None, :])
            a = tl.load(of_x + at[:, :, None], mask=found[:, :, None] & inside[None, None, :], other=0.0).to(ACC)
            acc += a * g[None, :, :]
    at = out + part.to(tl.int64) * part_stride + offset(tap_row, out_strides[2])
    at = at + offset(tap_column, out_strides[3])[:, None] + offset(channel, out_strides[0])[None, :]
    tl.store(at, tl.sum(acc, 1).to(out.dtype.element_ty), mask=in_taps[:, None] & inside[None, :])
