"""Kernels of ``windows``: a pixel of a result reads its window; a pixel of a gradient, the windows that contain it.

Extents (``rows``, ``height``, …), strides of windows and ``channels`` are (size, multiplier, shift), by which
``quotient`` divides; of one by which a kernel does not divide, the last two are None. Loops go through ROWS by COLUMNS
elements or windows at a time, whose loads do not wait for each other; COLUMNS is at least the extent if ROWS is not 1,
so that the order is row-major. What lies beyond is masked.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import load_tile, quotient, store_tile
from triplan.backends.triton.common.rows_kernels import axis_offset


@jit
def dilated(n, dilation):
    """n * dilation, which is None for 1."""
    return n if dilation is None else n * dilation


@jit
def window(at, kernel, stride, padding, dilation, extent, windows, ADAPTIVE: tl.constexpr):
    """(start, end) of window ``at`` of ``windows`` along an axis, end at most that of the padding.

    ADAPTIVE: (floor(at * extent / windows), ceil((at + 1) * extent / windows)).
    """
    if ADAPTIVE:
        start = quotient(at * extent[0], windows)
        end = quotient((at + 1) * extent[0] + windows[0] - 1, windows)
    else:
        start = at * stride[0] - padding
        end = tl.minimum(start + dilated(kernel - 1, dilation) + 1, extent[0] + padding)
    return start, end


@jit
def elements(start, end, extent, PADDED: tl.constexpr):
    """The number of positions of a window along an axis; those in the padding count only if PADDED."""
    return end - start if PADDED else tl.minimum(end, extent[0]) - tl.maximum(start, 0)


@jit
def share(count, ACC: tl.constexpr):
    """1 / count, or 1 if that is 0. One division serves all channels of a pixel that a thread has."""
    return 1.0 / tl.maximum(count, 1).to(ACC)


@jit
def nearest(at, end):
    """The position of [0, end) that is nearest to ``at``."""
    return tl.minimum(tl.maximum(at, 0), end - 1)


@jit
def coordinates(
    strides, batch, channels, rows, columns, tiles_channels, LAST: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """(image, row, column, channel, which exist) of this program's results, which broadcast to [BLOCK_P, BLOCK_C].

    BLOCK_P pixels of any images by BLOCK_C channels, [BLOCK_P, 1] and [1, BLOCK_C]: the first ones of each pixel if
    ``tiles_channels`` is None. With BLOCK_C = 1, BLOCK_P neighbouring results, of channels last if LAST and of rows
    otherwise: all [BLOCK_P, 1], and ``tiles_channels`` is None. LAST is None: of what has the smaller of ``strides``.
    """
    program = tl.program_id(0)
    if BLOCK_C == 1:
        point = program * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
        if LAST is None:
            channel = tl.zeros_like(point)
            if strides[1] < strides[3]:
                pixel = quotient(point, channels)
                channel = point - pixel * channels[0]
                point = pixel
        elif LAST:
            pixel = quotient(point, channels)
            channel = point - pixel * channels[0]
            point = pixel
    elif tiles_channels is None:
        point = program * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
        channel = tl.arange(0, BLOCK_C)[None, :]
    else:
        point = program // tiles_channels * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
        channel = program % tiles_channels * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    line = quotient(point, columns)
    column = point - line * columns[0]
    image = quotient(line, rows)
    row = line - image * rows[0]
    if BLOCK_C == 1 and LAST is None:
        if strides[1] >= strides[3]:
            plane = image
            image = quotient(plane, channels)
            channel = plane - image * channels[0]
    elif BLOCK_C == 1 and not LAST:
        plane = image
        image = quotient(plane, channels)
        channel = plane - image * channels[0]
    return image, row, column, channel, (image < batch) & (channel < channels[0])


@jit
def offset(position, stride):
    """position * stride, where a stride of None is 1: of 32 bits if the stride is."""
    found = position
    if stride is not None:
        if stride.dtype.primitive_bitwidth == 32:
            found = position * stride
        else:
            found = position.to(tl.int64) * stride
    return found


@jit
def place(base, strides, image, row, column, channel):
    """The addresses of elements: of all that the coordinates broadcast to.

    Offsets within an image are added before the image's, which has 64 bits: those of 32 bits take a third of the
    instructions. Channels that have an axis of their own are added to the addresses of pixels.
    """
    within = offset(row, strides[2]) + offset(column, strides[3])
    beside: tl.constexpr = channel.shape[0] == row.shape[0]
    if beside:
        within += offset(channel, strides[1])
    at = base + (axis_offset(image.to(tl.int64), strides[0]) + within)
    if not beside:
        at += offset(channel, strides[1])
    return at


@jit
def read(base, strides, image, row, column, channel, mask):
    """Elements, 0 without ``mask``."""
    return load_tile(
        place(base, strides, image, row, column, channel), mask, 0.0, strides[1] is None or strides[3] is None
    )


@jit
def write(base, strides, image, row, column, channel, v, mask):
    """Store ``v``."""
    v = v.to(base.dtype.element_ty)
    store_tile(place(base, strides, image, row, column, channel), v, mask, strides[1] is None or strides[3] is None)


@jit
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC: tl.constexpr,
):
    """MAX: out[pixel, channel] = max(window of x), indices = its position; else out = sum(window of x) / divisor.

    ``x`` and ``out``: (image, channel, row, column) of f16, bf16, f32 or f64; ``indices``: i64; strides in this order,
    None for 1. A program computes the results at its ``coordinates``. Without ``divisor``, a sum is divided by the
    number of the window's elements. Sums are accumulated in ACC, in row-major order. ``kernel_rows``,
    ``kernel_columns``: extents of the largest window; dilations: None for 1.
    """
    image, row, column, channel, inside = coordinates(
        out_strides, batch, channels, rows, columns, tiles_channels, LAST, BLOCK_P, BLOCK_C
    )
    top, bottom = window(row, kernel_rows, stride_rows, above, dilation_rows, height, rows, ADAPTIVE)
    first, last = window(column, kernel_columns, stride_columns, left, dilation_columns, width, columns, ADAPTIVE)
    low, right = tl.minimum(bottom, height[0]), tl.minimum(last, width[0])
    acc = tl.zeros((BLOCK_P, BLOCK_C), ACC)
    # Without dilation each window has an element of the image, and positions beyond the image are moved to the nearest
    # one of the window: its maximum and the position of that stay the same, and no element needs a mask of its own.
    NEAREST: tl.constexpr = MAX and dilation_rows is None and dilation_columns is None
    if NEAREST:
        at = x + (axis_offset(image.to(tl.int64), x_strides[0]) + offset(channel, x_strides[1]))
    else:
        at = place(x, x_strides, image, top, first, channel)
    if MAX:
        acc += float("-inf")
        found = tl.full((BLOCK_P, BLOCK_C), -1, tl.int32)
        if NEAREST:
            found = tl.broadcast_to(tl.maximum(top, 0) * width[0] + tl.maximum(first, 0), found.shape)
    for i in range(0, kernel_rows, ROWS):
        for j in range(0, kernel_columns, COLUMNS):
            taken = ()
            for tap in tl.static_range(ROWS * COLUMNS):
                down = dilated(tl.full((), i + tap // COLUMNS, tl.int32), dilation_rows)
                across = dilated(tl.full((), j + tap % COLUMNS, tl.int32), dilation_columns)
                y, z, live = top + down, first + across, inside
                if NEAREST:
                    y, z = nearest(y, low), nearest(z, right)
                    own = at + (offset(y, x_strides[2]) + offset(z, x_strides[3]))
                else:
                    live = live & (y >= 0) & (y < low) & (z >= 0) & (z < right)
                    own = at + (offset(down, x_strides[2]) + offset(across, x_strides[3]))
                v = load_tile(own, live, 0.0, x_strides[1] is None or x_strides[3] is None)
                if MAX:
                    taken = taken + ((v, live, y, z),)
                else:
                    acc += v.to(ACC)
            # Only now are they compared: loads between comparisons would wait for these.
            for tap in tl.static_range(len(taken)):
                v, live, y, z = taken[tap]
                v = v.to(ACC)
                better = (v > acc) | (v != v)
                if not NEAREST:
                    better = live & (better | (found < 0))
                acc = tl.where(better, v, acc)
                found = tl.where(better, y * width[0] + z, found)
    if MAX:
        write(indices, indices_strides, image, row, column, channel, found, inside)
    else:
        if divisor is None:
            count = elements(top, bottom, height, PADDED) * elements(first, last, width, PADDED)
            acc = acc / tl.maximum(count, 1).to(ACC)
        else:
            acc = acc / divisor.to(ACC)
    write(out, out_strides, image, row, column, channel, acc, inside)


@jit
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
    EVEN: tl.constexpr,
    RARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC: tl.constexpr,
):
    """MAX: dx[pixel, channel] = sum of dout over the windows whose ``indices`` name the pixel; else dx = sum of dout /
    divisor over the windows that contain it.

    Operands as in ``pool_kernel``; each ``dout`` is multiplied by the reciprocal of its divisor. A program computes the
    pixels at its ``coordinates``. Sums are accumulated in ACC, in the order of windows. A pixel looks at ``reach_rows``
    by ``reach_columns`` windows, which end at the last one that can contain it (ADAPTIVE: start at the first one); no
    other window contains it. EVEN: all of them do, as strides divide windows. RARE: so many windows that
    few name the pixel, of which alone dout is loaded. No pixel is written twice.
    """
    image, row, column, channel, inside = coordinates(
        dx_strides, batch, channels, height, width, tiles_channels, LAST, BLOCK_P, BLOCK_C
    )
    if ADAPTIVE:
        top, first = quotient(row * rows[0], height), quotient(column * columns[0], width)
    else:
        top = quotient(row + above, stride_rows) - (reach_rows - 1)
        first = quotient(column + left, stride_columns) - (reach_columns - 1)
    at = place(dout, dout_strides, image, top, first, channel)
    if MAX:
        named = place(indices, indices_strides, image, top, first, channel)
        own = (row * width[0] + column).to(tl.int64)
    acc = tl.zeros((BLOCK_P, BLOCK_C), ACC)
    for i in range(0, reach_rows, ROWS):
        for j in range(0, reach_columns, COLUMNS):
            hits = ()
            for tap in tl.static_range(ROWS * COLUMNS):
                down = tl.full((), i + tap // COLUMNS, tl.int32)
                across = tl.full((), j + tap % COLUMNS, tl.int32)
                p, q = top + down, first + across
                live = inside & (p >= 0) & (p < rows[0]) & (q >= 0) & (q < columns[0])
                if MAX:
                    live = live & (down < reach_rows) & (across < reach_columns)
                    step = offset(down, indices_strides[2]) + offset(across, indices_strides[3])
                    hit = (
                        load_tile(named + step, live, 0.0, indices_strides[1] is None or indices_strides[3] is None)
                        == own
                    )
                    if RARE:
                        hits = hits + (live & hit,)
                else:
                    start, end = window(p, kernel_rows, stride_rows, above, dilation_rows, height, rows, ADAPTIVE)
                    begin, stop = window(
                        q, kernel_columns, stride_columns, left, dilation_columns, width, columns, ADAPTIVE
                    )
                    if EVEN:
                        live = live & (down < reach_rows) & (across < reach_columns)
                    else:
                        live = live & (row >= start) & (row < end) & (column >= begin) & (column < stop)
                if not RARE:
                    step = offset(down, dout_strides[2]) + offset(across, dout_strides[3])
                    g = load_tile(at + step, live, 0.0, dout_strides[1] is None or dout_strides[3] is None).to(ACC)
                    if MAX:
                        acc += tl.where(hit, g, 0.0)
                    elif divisor is None:
                        count = elements(start, end, height, PADDED) * elements(begin, stop, width, PADDED)
                        acc = tl.fma(g, share(count, ACC), acc)
                    else:
                        acc = tl.fma(g, share(divisor, ACC), acc)
            # Only now: a load that depends on an index would keep the next index from being loaded.
            for tap in tl.static_range(len(hits)):
                step = offset(tl.full((), i + tap // COLUMNS, tl.int32), dout_strides[2])
                step += offset(tl.full((), j + tap % COLUMNS, tl.int32), dout_strides[3])
                acc += load_tile(at + step, hits[tap], 0.0, dout_strides[1] is None or dout_strides[3] is None).to(ACC)
    write(dx, dx_strides, image, row, column, channel, acc, inside)


@jit
def average_backward_kernel(
    dout,
    dx,
    dout_strides,
    dx_strides,
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
    ADAPTIVE: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC: tl.constexpr,
):
    """dx[pixel, channel] = sum of dout / divisor over the windows that contain the pixel, as ``pool_backward_kernel``.

    A program finds the ROWS by COLUMNS windows of BLOCK_P pixels once, for all channels: a pixel's windows take far
    more instructions than an element.
    """
    image, row, column, channel, inside = coordinates(
        dx_strides, batch, channels, height, width, None, True, BLOCK_P, BLOCK_C
    )
    if ADAPTIVE:
        top, first = quotient(row * rows[0], height), quotient(column * columns[0], width)
    else:
        top = quotient(row + above, stride_rows) - (ROWS - 1)
        first = quotient(column + left, stride_columns) - (COLUMNS - 1)
    taps = ()
    for tap in tl.static_range(ROWS * COLUMNS):
        p, q = top + tap // COLUMNS, first + tap % COLUMNS
        start, end = window(p, kernel_rows, stride_rows, above, dilation_rows, height, rows, ADAPTIVE)
        begin, stop = window(q, kernel_columns, stride_columns, left, dilation_columns, width, columns, ADAPTIVE)
        live = (image < batch) & (p >= 0) & (p < rows[0]) & (q >= 0) & (q < columns[0])
        live = live & (row >= start) & (row < end) & (column >= begin) & (column < stop)
        if divisor is None:
            count = elements(start, end, height, PADDED) * elements(begin, stop, width, PADDED)
        else:
            count = divisor
        taps = taps + ((place(dout, dout_strides, image, p, q, p * 0), live, share(count, ACC)),)
    to = place(dx, dx_strides, image, row, column, row * 0)
    for below in range(0, channels[0], BLOCK_C):
        lane = below + channel
        inside = (image < batch) & (lane < channels[0])
        loaded = ()
        for tap in tl.static_range(ROWS * COLUMNS):
            own = taps[tap][0] + offset(lane, dout_strides[1])
            loaded = loaded + (load_tile(own, taps[tap][1] & inside, 0.0, dout_strides[1] is None),)
        acc = tl.zeros((BLOCK_P, BLOCK_C), ACC)
        for tap in tl.static_range(ROWS * COLUMNS):
            acc = tl.fma(loaded[tap].to(ACC), taps[tap][2], acc)
        store_tile(to + offset(lane, dx_strides[1]), acc.to(dx.dtype.element_ty), inside, dx_strides[1] is None)
