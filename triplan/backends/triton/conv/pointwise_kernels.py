"""Kernel of ``pointwise``: a convolution by filters of one tap, as a product of pixels that lie one after another."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.conv.shared_kernels import offset


@jit
def product(index, stride):
    """``index * stride``, of as many bits as ``stride`` has; None is 1."""
    return index if stride is None else index * stride


@jit
def conv2d_pointwise_kernel(
    source,
    weight,
    bias,
    out,
    feature_stride,
    channel_stride,
    bias_stride,
    pixels,
    features,
    channels,
    each,
    tiles_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out[pixel, feature] = bias[feature] + sum over channels of source[pixel, channel] * weight[feature, channel].

    ``source`` (pixels, ``channels``) and ``out`` (pixels, ``features``) of f16 or bf16, without gaps; ``weight`` of any
    strides, None for 1; sums in f32. A program has ``each`` tiles of BLOCK_M pixels by BLOCK_N features, whose weights
    it reads once. All channels are summed in one step of BLOCK_K. Within a tile the offsets of elements do not change,
    so that they cost no instructions: rows that begin anywhere are read element by element.
    """
    begin(OVERLAPS)
    feature = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(0) // tiles_n * each * BLOCK_M
    channel, row = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_M)
    in_features, in_channels = feature < features, channel < channels
    at = product(feature, feature_stride)[None, :] + product(channel, channel_stride)[:, None]
    y = tl.load(weight + at, mask=in_channels[:, None] & in_features[None, :], other=0.0)
    if bias is not None:
        added = tl.load(bias + offset(feature, bias_stride), mask=in_features, other=0.0).to(tl.float32)
    read = (row * channels)[:, None] + channel[None, :]
    written = (row * features)[:, None] + feature[None, :]
    source += start.to(tl.int64) * channels
    out += start.to(tl.int64) * features
    for tile in range(each):
        inside = row < pixels - start - tile * BLOCK_M
        x = tl.load(source + read, mask=inside[:, None] & in_channels[None, :], other=0.0)
        acc = tl.dot(x, y)
        if bias is not None:
            acc += added[None, :]
        tl.store(out + written, acc.to(out.dtype.element_ty), mask=inside[:, None] & in_features[None, :])
        source += BLOCK_M * channels
        out += BLOCK_M * features
