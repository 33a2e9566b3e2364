"""Kernel of ``converted``: images from channels first to channels last, or back."""

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
    """out[image, pixel, channel] = source[image, channel, pixel], or with LAST False the other way round: BLOCK_P of
    ``pixels`` and BLOCK_C of ``channels`` of one image.

    Both packed, of one element. Each side is read or written along its own last axis: the compiler turns the tile in
    shared memory.
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
