"""Kernel of ``converted``: transposes images from channels first to channels last, or back."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl


@triton.jit
def conv2d_order_kernel(
    source,
    out,
    channels,
    pixels,
    tiles_channels,
    tiles_pixels,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    LAST: tl.constexpr,
):
    """out[image, pixel, channel] = source[image, channel, pixel]; with LAST False, the inverse.

    source, out: packed, of the same element. A program moves BLOCK_P pixels by BLOCK_C channels of one image. It reads
    and writes along the last axis of each side; the compiler transposes the tile through shared memory.
    """
    program = tl.program_id(0)
    pixel = program % tiles_pixels * BLOCK_P + tl.arange(0, BLOCK_P)
    program = program // tiles_pixels
    channel = program % tiles_channels * BLOCK_C + tl.arange(0, BLOCK_C)
    image = (program // tiles_channels).to(tl.int64) * channels * pixels
    inside = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    first = image + channel.to(tl.int64)[None, :] * pixels + pixel[:, None]
    last = image + pixel.to(tl.int64)[:, None] * channels + channel[None, :]
    tile = tl.load(source + (first if LAST else last), mask=inside)
    tl.store(out + (last if LAST else first), tile, mask=inside)
