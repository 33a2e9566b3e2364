"""Kernel of copies in the workspace: channels last, with channels and columns that are added."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.conv.shared_kernels import load_near, offset, store_near


@jit
def conv2d_copy_kernel(
    source,
    out,
    source_strides,
    out_strides,
    source_channels,
    channels,
    rows,
    source_columns,
    columns,
    left,
    step,
    dilation,
    taps,
    tap_stride,
    filled,
    tiles_channels,
    tiles_columns,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out[image, channel, row, column] = source[image, channel, row, column - left], and 0 where source has none.

    ``source`` and ``out`` (images, channels, rows, columns) of one element; their strides in this order, None for 1;
    ``left`` of None is 0. With ``taps`` there is such an ``out`` for each tap, ``tap_stride`` apart, which has source's
    column * ``step`` + tap * ``dilation`` - ``left`` in the first ``filled`` columns, and 0 in the others. A program
    moves BLOCK_P columns of a row by BLOCK_C channels; the next one has further channels, which may begin in the sector
    where these end. It reads along the axis that is adjacent in ``source`` and writes along that of ``out``; if these
    differ, the compiler transposes through shared memory.
    """
    begin(OVERLAPS)
    program = tl.program_id(0)
    channel = program % tiles_channels * BLOCK_C + tl.arange(0, BLOCK_C)
    program = program // tiles_channels
    column = program % tiles_columns * BLOCK_P + tl.arange(0, BLOCK_P)
    line = program // tiles_columns
    image, row = line // rows, line % rows
    at = column if left is None else column - left
    if taps is not None:
        at = column * step + image % taps * dilation - left
        out += offset(image % taps, tap_stride)
        image = image // taps
    found = (at < source_columns) if left is None else (at >= 0) & (at < source_columns)
    if taps is not None:
        found = found & (column < filled)
    read = source + offset(image, source_strides[0]) + offset(row, source_strides[2])
    read = read + offset(at, source_strides[3])[:, None] + offset(channel, source_strides[1])[None, :]
    inside = found[:, None] & (channel < source_channels)[None, :]
    tile = load_near(read, inside, (source_strides[3], source_strides[1]))
    to = out + offset(image, out_strides[0]) + offset(row, out_strides[2])
    to = to + offset(column, out_strides[3])[:, None] + offset(channel, out_strides[1])[None, :]
    inside = (column < columns)[:, None] & (channel < channels)[None, :]
    store_near(to, tile, inside, (out_strides[3], out_strides[1]))
