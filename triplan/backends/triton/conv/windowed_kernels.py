"""Kernel of ``windowed``: images (or filters) of few channels, copied so that the taps of a row are adjacent."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.conv.shared_kernels import offset


@triton.jit
def conv2d_pad_kernel(
    source,
    out,
    strides,
    channels,
    rows,
    columns,
    left,
    width,
    blocks,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[image, row, column, channel] = source[image, channel, row, column - left], and 0 where source has none.

    ``source`` (images, channels, rows, columns) of ``strides``, of which None is 1. ``out`` is packed, with ``width`` =
    columns * CHANNELS elements a row; ``blocks`` of BLOCK elements, one a program, make a row.
    """
    program = tl.program_id(0)
    line = program // blocks
    at = program % blocks * BLOCK + tl.arange(0, BLOCK)
    column = at // CHANNELS - left
    channel = at % CHANNELS
    image = line // rows
    inside = (column >= 0) & (column < columns) & (channel < channels)
    place = offset(image, strides[0]) + offset(line % rows, strides[2])
    found = tl.load(source + place + offset(channel, strides[1]) + offset(column, strides[3]), mask=inside, other=0)
    tl.store(out + line.to(tl.int64) * width + at, found, mask=at < width)
