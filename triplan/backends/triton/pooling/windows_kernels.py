"""Kernels of ``windows``: a pixel of a result reads its window; a pixel of a gradient, the windows that contain it."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.rows_kernels import axis_offset


@triton.jit
def window(at, kernel, stride, padding, dilation, extent, windows, ADAPTIVE: tl.constexpr):
    """(start, end) of window ``at`` of ``windows`` along an axis, end at most that of the padding.

    ADAPTIVE: (floor(at * extent / windows), ceil((at + 1) * extent / windows)).
    """
    if ADAPTIVE:
        start = at * extent // windows
        end = ((at + 1) * extent + windows - 1) // windows
    else:
        start = at * stride - padding
        end = tl.minimum(start + (kernel - 1) * dilation + 1, extent + padding)
    return start, end


@triton.jit
def elements(start, end, extent, PADDED: tl.constexpr):
    """The number of positions of a window along an axis; those in the padding count only if PADDED."""
    return end - start if PADDED else tl.minimum(end, extent) - tl.maximum(start, 0)


@triton.jit
def coordinates(rows, columns, tiles_channels, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """(image, row, column) of this program's BLOCK_P pixels, and its BLOCK_C channels."""
    program = tl.program_id(0)
    channel = program % tiles_channels * BLOCK_C + tl.arange(0, BLOCK_C)
    pixel = program // tiles_channels * BLOCK_P + tl.arange(0, BLOCK_P)
    return pixel // (rows * columns), pixel // columns % rows, pixel % columns, channel


@triton.jit
def place(base, strides, image, row, column, channel):
    """The addresses [BLOCK_P, BLOCK_C] of pixels and channels."""
    at = axis_offset(image.to(tl.int64), strides[0]) + axis_offset(row, strides[2]) + axis_offset(column, strides[3])
    return base + at[:, None] + axis_offset(channel, strides[1])[None, :]


@triton.jit
def pool_kernel(
    x,
    out,
    indices,
    x_strides,
    out_strides,
    indices_strides,
    batch,
    channels,
    height,
    width,
    rows,
    columns,
    kernel_rows,
    kernel_columns,
    stride_rows,
    stride_columns,
    above,
    left,
    dilation_rows,
    dilation_columns,
    divisor,
    tiles_channels,
    MAX: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC: tl.constexpr,
):
    """MAX: out[pixel, channel] = max(window of x), indices = its position; else out = sum(window of x) / divisor.

    ``x`` and ``out``: (image, channel, row, column) of f16, bf16, f32 or f64; ``indices``: i64; strides in this order,
    None for 1. A program computes BLOCK_P pixels of any images by BLOCK_C channels. Without ``divisor``, a sum is
    divided by the number of the window's elements. Sums are accumulated in ACC, in row-major order. ``kernel_rows``,
    ``kernel_columns``: extents of the largest window.
    """
    image, row, column, channel = coordinates(rows, columns, tiles_channels, BLOCK_P, BLOCK_C)
    top, bottom = window(row, kernel_rows, stride_rows, above, dilation_rows, height, rows, ADAPTIVE)
    first, last = window(column, kernel_columns, stride_columns, left, dilation_columns, width, columns, ADAPTIVE)
    in_channels, in_images = (channel < channels)[None, :], image < batch
    acc = tl.zeros((BLOCK_P, BLOCK_C), ACC)
    if MAX:
        acc += float("-inf")
        found = tl.full((BLOCK_P, BLOCK_C), -1, tl.int32)
    for tap in range(kernel_rows * kernel_columns):
        y = top + tap // kernel_columns * dilation_rows
        z = first + tap % kernel_columns * dilation_columns
        live = in_images & (y >= 0) & (y < tl.minimum(bottom, height)) & (z >= 0) & (z < tl.minimum(last, width))
        v = tl.load(place(x, x_strides, image, y, z, channel), mask=live[:, None] & in_channels, other=0.0).to(ACC)
        if MAX:
            better = live[:, None] & ((v > acc) | (v != v) | (found < 0))
            acc = tl.where(better, v, acc)
            found = tl.where(better, (y * width + z)[:, None], found)
        else:
            acc += v
    mask = in_images[:, None] & in_channels
    if MAX:
        tl.store(place(indices, indices_strides, image, row, column, channel), found.to(tl.int64), mask=mask)
    else:
        if divisor is None:
            count = elements(top, bottom, height, PADDED) * elements(first, last, width, PADDED)
            acc = acc / tl.maximum(count, 1).to(ACC)[:, None]
        else:
            acc = acc / divisor.to(ACC)
    tl.store(place(out, out_strides, image, row, column, channel), acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def pool_backward_kernel(
    dout,
    dx,
    indices,
    dout_strides,
    dx_strides,
    indices_strides,
    batch,
    channels,
    height,
    width,
    rows,
    columns,
    kernel_rows,
    kernel_columns,
    stride_rows,
    stride_columns,
    above,
    left,
    dilation_rows,
    dilation_columns,
    reach_rows,
    reach_columns,
    divisor,
    tiles_channels,
    MAX: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC: tl.constexpr,
):
    """MAX: dx[pixel, channel] = sum of dout over the windows whose ``indices`` name the pixel; else dx = sum of dout /
    divisor over the windows that contain it.

    Operands as in ``pool_kernel``; a program computes BLOCK_P pixels by BLOCK_C channels. Sums are accumulated in ACC,
    in the order of windows. A pixel looks at ``reach_rows`` by ``reach_columns`` windows, which end at the last one
    that can contain it (ADAPTIVE: start at the first one); no other window contains it. No pixel is written twice.
    """
    image, row, column, channel = coordinates(height, width, tiles_channels, BLOCK_P, BLOCK_C)
    if ADAPTIVE:
        top, first = row * rows // height, column * columns // width
    else:
        top = (row + above) // stride_rows - (reach_rows - 1)
        first = (column + left) // stride_columns - (reach_columns - 1)
    in_channels, in_images = (channel < channels)[None, :], image < batch
    acc = tl.zeros((BLOCK_P, BLOCK_C), ACC)
    for step in range(reach_rows * reach_columns):
        p, q = top + step // reach_columns, first + step % reach_columns
        live = in_images & (p >= 0) & (p < rows) & (q >= 0) & (q < columns)
        if MAX:
            at = tl.load(
                place(indices, indices_strides, image, p, q, channel), mask=live[:, None] & in_channels, other=-1
            )
            hit = at == (row * width + column).to(tl.int64)[:, None]
            acc += tl.load(place(dout, dout_strides, image, p, q, channel), mask=hit, other=0.0).to(ACC)
        else:
            start, end = window(p, kernel_rows, stride_rows, above, dilation_rows, height, rows, ADAPTIVE)
            begin, stop = window(q, kernel_columns, stride_columns, left, dilation_columns, width, columns, ADAPTIVE)
            live = live & (row >= start) & (row < end) & (column >= begin) & (column < stop)
            mask = live[:, None] & in_channels
            g = tl.load(place(dout, dout_strides, image, p, q, channel), mask=mask, other=0.0).to(ACC)
            if divisor is None:
                count = elements(start, end, height, PADDED) * elements(begin, stop, width, PADDED)
                acc += g / tl.maximum(count, 1).to(ACC)[:, None]
            else:
                acc += g / divisor.to(ACC)
    mask = in_images[:, None] & in_channels
    tl.store(place(dx, dx_strides, image, row, column, channel), acc.to(dx.dtype.element_ty), mask=mask)
