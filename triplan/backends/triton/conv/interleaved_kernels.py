"""Kernels of ``interleaved``: filters of all remainders modulo the strides, and the pixels that they give."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.conv.shared_kernels import offset, within


@jit
def tap_for(at, dilation, taps):
    """(r, whether there is a tap r) with ``r * dilation`` = ``at``."""
    return at // dilation, (at >= 0) & (at % dilation == 0) & (at // dilation < taps)


@jit
def conv2d_interleave_kernel(
    weight,
    out,
    weight_strides,
    elements,
    channels,
    filters,
    kernel_rows,
    kernel_columns,
    stride_rows,
    stride_columns,
    above,
    left,
    dilation_rows,
    dilation_columns,
    taps_rows,
    taps_columns,
    first_row,
    first_column,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out[(a, b, c), u, v, k] = weight[k, c, r, s] of the tap by which row ``i * stride_rows + a`` of x meets row ``i +
    u + first_row`` of dout, and likewise columns; 0 if there is none, or no channel c.

    ``weight`` (filters, channels, kernel_rows, kernel_columns), its strides in this order, None for 1; ``out``
    (features, taps_rows, taps_columns, filters), packed: BLOCK of its ``elements``.
    """
    begin(OVERLAPS)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k, rest = at % filters, at // filters
    v, rest = rest % taps_columns, rest // taps_columns
    u, feature = rest % taps_rows, rest // taps_rows
    c, remainder = feature % channels, feature // channels
    a, b = remainder // stride_columns, remainder % stride_columns
    r, in_rows = tap_for(a + above - (u + first_row) * stride_rows, dilation_rows, kernel_rows)
    s, in_columns = tap_for(b + left - (v + first_column) * stride_columns, dilation_columns, kernel_columns)
    found = (at < elements) & (a < stride_rows) & in_rows & in_columns
    place = offset(k, weight_strides[0]) + offset(c, weight_strides[1])
    place += offset(r, weight_strides[2]) + offset(s, weight_strides[3])
    tl.store(out + at, tl.load(weight + place, mask=found, other=0.0), mask=at < elements)


@jit
def summed(
    dout,
    weight,
    weight_strides,
    channel,
    row,
    column,
    inside,
    stride_filters,
    stride_rows_dout,
    stride_columns_dout,
    filters,
    kernel_rows,
    kernel_columns,
    stride_rows,
    stride_columns,
    above,
    left,
    dilation_rows,
    dilation_columns,
    dout_rows,
    dout_columns,
):
    """The gradient of x at (row, column, channel): the products of the taps that reach it with dout.

    As in ``wgmma``, dout is continued by zeros, which are multiplied.
    """
    acc = tl.zeros(column.shape, tl.float32)
    for tap in range(kernel_rows * kernel_columns):
        r, s = tap // kernel_columns, tap % kernel_columns
        y, x = row + above - r * dilation_rows, column + left - s * dilation_columns
        p, q = y // stride_rows, x // stride_columns
        reached = inside & (y % stride_rows == 0) & (x % stride_columns == 0)
        found = reached & within(p, dout_rows) & within(q, dout_columns)
        of_dout = dout + offset(p, stride_rows_dout) + offset(q, stride_columns_dout)
        of_weight = weight + offset(channel, weight_strides[1])
        of_weight += offset(r, weight_strides[2]) + offset(s, weight_strides[3])
        for k in range(filters):
            g = tl.load(of_dout + offset(k, stride_filters), mask=found, other=0.0).to(tl.float32)
            w = tl.load(of_weight + offset(k, weight_strides[0]), mask=reached, other=0.0).to(tl.float32)
            acc += g * w
    return acc


@jit
def conv2d_separate_kernel(
    source,
    dout,
    weight,
    dx,
    source_strides,
    dout_strides,
    weight_strides,
    dx_strides,
    rows,
    columns,
    dout_rows,
    dout_columns,
    channels,
    filters,
    kernel_rows,
    kernel_columns,
    stride_rows,
    stride_columns,
    above,
    left,
    dilation_rows,
    dilation_columns,
    tiles,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """dx[n, c, i * stride_rows + a, j * stride_columns + b] = source[n, i, j, (a, b, c)], or if that is not finite the
    sum of the products that reach it.

    ``source``: (images, rows, columns, features), strides of the first three. ``dx`` and ``dout`` (image, channel, row,
    column), ``weight`` (filter, channel, row, column), their strides in this order, None for 1. A program copies BLOCK
    elements (column, channel) of a row.
    """
    begin(OVERLAPS)
    program = tl.program_id(0)
    at = program % tiles * BLOCK + tl.arange(0, BLOCK)
    program = program // tiles
    row, image = program % rows, program // rows
    column, channel = at // channels, at % channels
    inside = column < columns
    feature = (row % stride_rows * stride_columns + column % stride_columns) * channels + channel
    read = source + offset(image, source_strides[0]) + offset(row // stride_rows, source_strides[1])
    value = tl.load(read + offset(column // stride_columns, source_strides[2]) + feature, mask=inside, other=0.0)
    infinite = inside & ~(tl.abs(value.to(tl.float32)) < float("inf"))
    if tl.max(infinite.to(tl.int32), 0) > 0:
        again = summed(
            dout + offset(image, dout_strides[0]),
            weight,
            weight_strides,
            channel,
            row,
            column,
            infinite,
            dout_strides[1],
            dout_strides[2],
            dout_strides[3],
            filters,
            kernel_rows,
            kernel_columns,
            stride_rows,
            stride_columns,
            above,
            left,
            dilation_rows,
            dilation_columns,
            dout_rows,
            dout_columns,
        )
        value = tl.where(infinite, again.to(value.dtype), value)
    to = dx + offset(image, dx_strides[0]) + offset(row, dx_strides[2])
    tl.store(to + offset(column, dx_strides[3]) + offset(channel, dx_strides[1]), value, mask=inside)
