"""Kernels of ``tiles``: convolution as a matrix product whose factors are read where they lie, through pointers.

A row of the product is a pixel of the result, a column one of its channels, and a term a tap of the filters and a
channel that is summed ("implicit GEMM"; Chetlur et al., cuDNN, arXiv 1410.0759). Padding is loads that are masked off.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import quotient
from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.conv.shared_kernels import first, offset, place_of, position


@jit
def first_tap(at, dilation, stride, period):
    """The first tap r of ``period`` with (at - r * dilation) divisible by ``stride``; beyond all if there is none."""
    found = at * 0 + 2**30
    for i in range(period):
        tap = period - 1 - i
        found = tl.where((at - tap * dilation) % stride == 0, tap, found)
    return found


@jit
def conv2d_tiles_kernel(
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
    features,
    channels,
    own_weights,
    taps,
    kernel_columns,
    stride_rows,
    stride_columns,
    above,
    left,
    dilation_rows,
    dilation_columns,
    tiles_m,
    tiles_n,
    period_rows,
    period_columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FLAT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out[pixel, feature] = bias[feature] + sum over (tap, channel) of source[pixel at tap, channel] * weight: BLOCK_M
    pixels by BLOCK_N features of one group.

    ``source`` and ``out`` (image, channel, row, column) of f16, bf16, f32 or f64, their strides in this order, None for
    1; ``weight`` (feature, channel, tap row, tap column), its groups ``own_weights`` apart along its first axis in
    memory; sums in ACC. ``features`` and ``channels`` are those of a group. ``rows``, ``columns`` and ``channels``
    are (size, multiplier, shift), by which ``quotient`` divides. TRANSPOSED: the gradient of x; features are then x's
    channels. FLAT: a step takes BLOCK_K pairs of a tap and a channel; else channels of one tap, whose addresses are
    next to each other where the stride of channels is 1. An even number of channels has no multiplier: of its
    remainders the compiler knows which are adjacent.

    ``period_rows`` and ``period_columns`` are given for the gradient of x of a strided convolution: a program's pixels
    are then those whose rows (and columns) have one remainder modulo the stride. The same taps reach all of them, one
    in so many, and only these are multiplied.
    """
    begin(OVERLAPS)
    program = tl.program_id(0)
    feature = program % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    program = program // tiles_n
    pixel = program % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    group = program // tiles_m
    if period_rows is None:
        image, row, column = place_of(pixel, rows, columns)
        at_row, at_column = row + above, column + left
        if not TRANSPOSED:
            at_row, at_column = first(row, stride_rows, above), first(column, stride_columns, left)
        first_row, first_column, step_rows, step_columns = 0, 0, 1, 1
        tap_columns, used = kernel_columns, taps
        reach_rows, reach_columns = dilation_rows, dilation_columns
    else:
        row_of, column_of = group % stride_rows, group // stride_rows % stride_columns
        group = group // stride_rows // stride_columns
        own_rows = tl.maximum(tl.cdiv(rows[0] - row_of, stride_rows), 1)
        own_columns = tl.maximum(tl.cdiv(columns[0] - column_of, stride_columns), 1)
        line = pixel // own_columns
        image = line // own_rows
        at_row, at_column = line - image * own_rows, pixel - line * own_columns
        row, column = row_of + at_row * stride_rows, column_of + at_column * stride_columns
        first_row = first_tap(row_of + above, dilation_rows, stride_rows, period_rows)
        first_column = first_tap(column_of + left, dilation_columns, stride_columns, period_columns)
        step_rows, step_columns = period_rows, period_columns
        tap_columns = tl.maximum(tl.cdiv(kernel_columns - first_column, period_columns), 0)
        used = tl.maximum(tl.cdiv(taps // kernel_columns - first_row, period_rows), 0) * tap_columns
        # What the taps reach is a multiple of the strides: both are divided, and no step has to.
        at_row += (row_of + above - first_row * dilation_rows) // stride_rows
        at_column += (column_of + left - first_column * dilation_columns) // stride_columns
        reach_rows = period_rows * dilation_rows // stride_rows
        reach_columns = period_columns * dilation_columns // stride_columns
    in_pixels = ((image < pixels // (rows[0] * columns[0])) & (row < rows[0]) & (column < columns[0]))[:, None]
    in_features = (feature < features)[None, :]
    source += offset(group * channels[0], source_strides[1])
    weight += offset(group * own_weights, weight_strides[0])
    images = source + offset(image, source_strides[0])[:, None]
    filters = weight + offset(feature, weight_strides[1 if TRANSPOSED else 0])[None, :]
    depth = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    blocks = tl.cdiv(channels[0], BLOCK_K)
    steps = tl.cdiv(used * channels[0], BLOCK_K) if FLAT else used * blocks
    for step in range(steps):
        if FLAT:
            term = step * BLOCK_K + depth
            if channels[1] is None:
                tap, channel = term // channels[0], term % channels[0]
            else:
                tap = quotient(term, channels)
                channel = term - tap * channels[0]
            inside = term < used * channels[0]
        else:
            tap, channel = step // blocks, step % blocks * BLOCK_K + depth
            inside = channel < channels[0]
        down, along = tap // tap_columns, tap % tap_columns
        tap_row, tap_column = first_row + down * step_rows, first_column + along * step_columns
        if FLAT:
            down, along = down[None, :], along[None, :]
        y, in_rows = position(at_row[:, None], down * reach_rows, source_rows, TRANSPOSED)
        x, in_columns = position(at_column[:, None], along * reach_columns, source_columns, TRANSPOSED)
        at = images + offset(y, source_strides[2]) + offset(x, source_strides[3])
        at = at + offset(channel, source_strides[1])[None, :]
        a = tl.load(at, mask=in_pixels & in_rows & in_columns & inside[None, :], other=0.0)
        at = filters + offset(channel, weight_strides[0 if TRANSPOSED else 1])[:, None]
        if FLAT:
            at += offset(tap_row, weight_strides[2])[:, None] + offset(tap_column, weight_strides[3])[:, None]
        else:
            at += offset(tap_row, weight_strides[2]) + offset(tap_column, weight_strides[3])
        b = tl.load(at, mask=inside[:, None] & in_features, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=ACC)
    whole = group * features + feature
    if bias is not None:
        acc += tl.load(bias + offset(whole, bias_stride), mask=feature < features, other=0.0).to(ACC)[None, :]
    at = out + (offset(image, out_strides[0]) + offset(row, out_strides[2]) + offset(column, out_strides[3]))[:, None]
    at = at + offset(whole, out_strides[1])[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=in_pixels & in_features)


@jit
def conv2d_weight_kernel(
    x,
    dout,
    out,
    x_strides,
    dout_strides,
    out_strides,
    part_stride,
    pixels,
    each,
    rows,
    columns,
    height,
    width,
    filters,
    channels,
    groups,
    taps,
    kernel_columns,
    stride_rows,
    stride_columns,
    above,
    left,
    dilation_rows,
    dilation_columns,
    tiles_m,
    tiles_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FLAT: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out[filter, channel, tap] = sum over ``each`` pixels of dout[pixel, filter] * x[pixel at tap, channel]: BLOCK_M
    filters by BLOCK_N channels of one group, one tap, and one part of the pixels.

    ``x`` and ``dout`` (image, channel, row, column) of f16, bf16, f32 or f64; ``out`` (part, filter, channel, tap row,
    tap column), its parts ``part_stride`` apart. Strides are in this order, None for 1; ``filters`` and ``channels``
    those of a group. FLAT: BLOCK_N pairs of a tap and a channel, instead of channels of one tap, each with an address
    of its own.
    """
    begin(OVERLAPS)
    program = tl.program_id(0)
    term = program % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    program = program // tiles_n
    own = program % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    program = program // tiles_m
    if FLAT:
        channel, tap = term % channels, (term // channels)[None, :]
        in_columns = (term < taps * channels)[None, :]
    else:
        channel, tap = term, program % taps
        in_columns = (channel < channels)[None, :]
        program = program // taps
    group, part = program % groups, program // groups
    tap_row, tap_column = tap // kernel_columns, tap % kernel_columns
    in_filters = (own < filters)[None, :]
    whole = group * filters + own
    dout += offset(whole, dout_strides[1])[None, :]
    x += offset(group * channels + channel, x_strides[1])[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    last = tl.minimum((part + 1) * each, pixels)
    for start in range(part * each, last, BLOCK_K):
        pixel = start + tl.arange(0, BLOCK_K)
        image, row, column = place_of(pixel, rows, columns)
        inside = pixel < last
        at = offset(image, dout_strides[0]) + offset(row, dout_strides[2]) + offset(column, dout_strides[3])
        a = tl.load(dout + at[:, None], mask=inside[:, None] & in_filters, other=0.0)
        y = first(row, stride_rows, above)[:, None] + tap_row * dilation_rows
        z = first(column, stride_columns, left)[:, None] + tap_column * dilation_columns
        found = inside[:, None] & (y >= 0) & (y < height) & (z >= 0) & (z < width) & in_columns
        at = offset(image, x_strides[0])[:, None] + offset(y, x_strides[2]) + offset(z, x_strides[3])
        b = tl.load(x + at, mask=found, other=0.0)
        acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION, out_dtype=ACC)
    at = out + part.to(tl.int64) * part_stride + offset(tap_row, out_strides[2]) + offset(tap_column, out_strides[3])
    at = at + offset(whole, out_strides[0])[:, None] + offset(channel, out_strides[1])[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(own < filters)[:, None] & in_columns)
