"""Kernel of ``dots``: sums over all pixels in one program."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.conv.shared_kernels import first, offset, place_of, within


@jit
def conv2d_weight_dots_kernel(
    x,
    dout,
    out,
    x_strides,
    dout_strides,
    out_strides,
    pixels,
    rows,
    columns,
    height,
    width,
    filters,
    channels,
    taps,
    kernel_columns,
    stride_rows,
    stride_columns,
    above,
    left,
    dilation_rows,
    dilation_columns,
    PIXELS: tl.constexpr,
    TERMS: tl.constexpr,
    ACC: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out[filter, channel, tap] = sum over pixels of dout[pixel, filter] * x[pixel at tap, channel]: one filter and
    TERMS pairs of a tap and a channel.

    ``x`` and ``dout`` (image, channel, row, column) of f16, bf16, f32 or f64; ``out`` (filter, channel, tap row, tap
    column). Strides are in this order, None for 1; ``filters`` and ``channels`` are those of a group. Each thread
    accumulates every so many pixels, and the threads are summed at the end.
    """
    begin(OVERLAPS)
    blocks = tl.cdiv(taps * channels, TERMS)
    own = tl.program_id(0) // blocks
    term = tl.program_id(0) % blocks * TERMS + tl.arange(0, TERMS)
    channel, tap = term % channels, term // channels
    tap_row, tap_column = tap // kernel_columns, tap % kernel_columns
    x += offset(own // filters * channels + channel, x_strides[1])[None, :]
    dout += offset(own, dout_strides[1])
    acc = tl.zeros((PIXELS, TERMS), ACC)
    for start in range(0, pixels, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        image, row, column = place_of(pixel, rows, columns)
        at = offset(image, dout_strides[0]) + offset(row, dout_strides[2]) + offset(column, dout_strides[3])
        a = tl.load(dout + at, mask=pixel < pixels, other=0.0).to(ACC)
        y = first(row, stride_rows, above)[:, None] + (tap_row * dilation_rows)[None, :]
        z = first(column, stride_columns, left)[:, None] + (tap_column * dilation_columns)[None, :]
        inside = (pixel < pixels)[:, None] & (tap < taps)[None, :] & within(y, height) & within(z, width)
        at = offset(image, x_strides[0])[:, None] + offset(y, x_strides[2]) + offset(z, x_strides[3])
        acc += a[:, None] * tl.load(x + at, mask=inside, other=0.0).to(ACC)
    at = offset(own, out_strides[0]) + offset(channel, out_strides[1])
    at = at + offset(tap_row, out_strides[2]) + offset(tap_column, out_strides[3])
    tl.store(out + at, tl.sum(acc, 0).to(out.dtype.element_ty), mask=tap < taps)
