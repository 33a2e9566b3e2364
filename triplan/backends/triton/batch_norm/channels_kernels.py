"""Kernels of ``channels``: partial statistics and sums of each channel, their merge in a fixed order, and the results.

    forward     out = (x - mean) * rstd * weight + bias             rstd = 1 / sqrt(var + eps)
    with RELU   out = max((x - mean) * rstd * weight + bias + residual, 0)
    backward    dx = (dout - mean(dout) - hat * mean(dout * hat)) * rstd * weight    hat = (x - mean) * rstd
                with ``out``, the result of relu, dout is 0 where out is

Images are (batch, channels, pixels) of f16, bf16, f32 or f64, with strides in this order, None for 1. A tile has ROWS
*rows* and BLOCK *columns*. With LAST, where channels are adjacent, columns are channels, and rows the pixels of all
images, ``inner`` of each (None: one); ``pixels`` is 1 then. Otherwise columns are pixels of one channel, rows images;
or, with ``inner``, so many rows of each image are vectors of ``pixels`` pixels, the columns. Programs that sum walk
``each`` tiles of one block of columns, others have one; there are ``blocks`` blocks. With ``own``, rows are several
pixels of ``own`` channels each: all of their elements are columns, which ``channels`` counts, and ``rest`` those of the
last pixels, which fill no row (None: there are none). Partial results are [parts, channels]
of COMPUTE, which is f32, or f64 for f64. No atomics: every order is fixed.

Kernels that sum come first, and allow the next launch only after they have waited for what is ahead. So the last kernel
may read images while sums are merged: see ``allow_next``. EARLY says that there are such launches ahead of it, none of
which writes what it reads.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import load_tile, store_tile
from triplan.backends.triton.common.overlap import allow_next, wait_for_previous
from triplan.backends.triton.common.rows_kernels import axis_offset


@jit
def columns_of(channels, pixels, blocks, LAST: tl.constexpr, BLOCK: tl.constexpr):
    """(channel, pixel, which columns exist, number of the block among those of the channel's pixels).

    [1, BLOCK], but the last, and without LAST the channel, are scalars. With LAST all pixels are 0.
    """
    block = tl.program_id(0) % blocks
    column = tl.arange(0, BLOCK)[None, :]
    if LAST:
        channel = block * BLOCK + column
        pixel = column * 0
        live = channel < channels
        part = block * 0
    else:
        across = tl.cdiv(pixels, BLOCK)
        channel = block // across
        part = block % across
        pixel = part * BLOCK + column
        live = pixel < pixels
    return channel, pixel, live, part


@jit
def place(base, strides, row, channel, pixel, inner):
    """Addresses of each row [:, None] and column [None, :]."""
    if inner is None:
        at = base + axis_offset(row.to(tl.int64), strides[0]) + axis_offset(pixel, strides[2])
    else:
        at = base + axis_offset((row // inner).to(tl.int64), strides[0]) + axis_offset(row % inner, strides[2]) + pixel
    return at + axis_offset(channel, strides[1])


@jit
def own_of(channel, own):
    """The channel of a column: see ``own`` above."""
    return channel if own is None else channel % own


@jit
def is_along(strides, inner):
    """Whether consecutive threads need not be told to access columns: the compiler knows that these are contiguous, or
    rows are pixels, which are likely nearer to each other than channels."""
    return strides[1] is None or strides[2] is None or inner is not None


@jit
def read(base, strides, row, channel, pixel, inner, mask):
    """The elements of each row and column, 0 without ``mask``."""
    return load_tile(place(base, strides, row, channel, pixel, inner), mask, 0.0, is_along(strides, inner))


@jit
def write(base, strides, row, channel, pixel, inner, v, mask):
    """Store ``v`` as the elements of each row and column."""
    v = v.to(base.dtype.element_ty)
    store_tile(place(base, strides, row, channel, pixel, inner), v, mask, is_along(strides, inner))


@jit
def of_channel(v, LAST: tl.constexpr):
    """The sum of a tile's elements for each of its channels: [1, BLOCK], or a scalar without LAST."""
    if LAST:
        total = tl.sum(v, 0, keep_dims=True)
    else:
        total = tl.sum(tl.sum(v, 0), 0)
    return total


@jit
def rest_of(rows, channel, rest, ROWS: tl.constexpr):
    """(rows, mask) of a tile that has the last pixels, beyond ``rows``, in its first row.

    They have a tile of their own: their mask would narrow the loads of all others.
    """
    row = rows + tl.arange(0, ROWS)[:, None]
    return row, (row == rows) & (channel < rest)


@jit
def step_of(a, b, v, inverse):
    """(mean, sum of squared deviations) of each place of a tile with one more element ``v``; inverse: 1 / their number
    (Welford 1962, "Note on a method for calculating corrected sums of squares and products")."""
    apart = v - a
    mean = a + apart * inverse
    return mean, b + apart * (v - mean)


@jit
def batch_norm_statistics_kernel(
    x,
    means,
    squares,
    x_strides,
    rows,
    channels,
    pixels,
    inner,
    each,
    blocks,
    rest,
    LAST: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """means[part, c] = mean, squares[part, c] = sum of (x - mean)^2, over the elements of channel c in one part.

    Each place of a tile has accumulators of its own, so that the loop needs no other thread; they are merged at the end
    (Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance").
    """
    wait_for_previous(OVERLAPS)
    allow_next(OVERLAPS)
    channel, pixel, live, beside = columns_of(channels, pixels, blocks, LAST, BLOCK)
    part = tl.program_id(0) // blocks
    row = part * each * ROWS + tl.arange(0, ROWS)[:, None]
    length = tl.minimum(rows - part * each * ROWS, each * ROWS)
    a = tl.zeros((ROWS, BLOCK), COMPUTE)
    b = tl.zeros((ROWS, BLOCK), COMPUTE)
    whole = length // ROWS
    following = read(x, x_strides, row, channel, pixel, inner, live & (whole > 0))
    for step in range(whole):
        v = following.to(COMPUTE)
        # (A tile is loaded while the one before it is added up.)
        following = read(x, x_strides, row + (step + 1) * ROWS, channel, pixel, inner, live & (step + 1 < whole))
        a, b = step_of(a, b, v, 1.0 / tl.full((), step + 1, COMPUTE))
    inside = tl.arange(0, ROWS)[:, None] < length - whole * ROWS
    if whole * ROWS < length:
        v = read(x, x_strides, row + whole * ROWS, channel, pixel, inner, inside & live).to(COMPUTE)
        c, d = step_of(a, b, v, 1.0 / tl.full((), whole + 1, COMPUTE))
        a, b = tl.where(inside, c, a), tl.where(inside, d, b)
    count = (whole + inside.to(tl.int32)).to(COMPUTE)
    total = tl.full((), length, COMPUTE)
    if rest is not None:
        beyond, more = rest_of(rows, channel, rest, ROWS)
        is_last = (part + 1) * each * ROWS >= rows
        if is_last:
            v = read(x, x_strides, beyond, channel, pixel, inner, more).to(COMPUTE)
            c, d = step_of(a, b, v, 1.0 / (count + 1.0))
            a, b = tl.where(more, c, a), tl.where(more, d, b)
        count += (more & is_last).to(COMPUTE)
        total += ((channel < rest) & is_last).to(COMPUTE)
    if not LAST:
        count = tl.where(live, count, 0.0)
        total = total * tl.minimum(pixels - beside * BLOCK, BLOCK).to(COMPUTE)
    mean = of_channel(a * (count / total), LAST)
    apart = a - mean
    square = of_channel(b + count * apart * apart, LAST)
    across = tl.cdiv(pixels, BLOCK)  # 1 with LAST
    to = (part.to(tl.int64) * across + beside) * channels + channel
    exists = channel < channels
    tl.store(means + to, mean, mask=exists)
    tl.store(squares + to, square, mask=exists)


@jit
def parameter_of(pointer, channel, exists, COMPUTE: tl.constexpr):
    """One number for each channel."""
    return tl.load(pointer + channel, mask=exists, other=0.0, eviction_policy="evict_last").to(COMPUTE)


@jit
def applied(v, m, r, shift, residual, strides, row, channel, pixel, inner, mask, RELU: tl.constexpr):
    """(v - m) * r + shift + residual, with RELU at least 0; ``shift`` and ``residual`` may be absent."""
    v = (v - m) * r
    if shift is not None:
        v = v + shift
    if residual is not None:
        v += read(residual, strides, row, channel, pixel, inner, mask).to(v.dtype)
    if RELU:
        v = tl.where(v <= 0, 0.0, v)  # NaN stays
    return v


@jit
def batch_norm_apply_kernel(
    x,
    out,
    mean,
    rstd,
    weight,
    bias,
    running_mean,
    running_var,
    residual,
    x_strides,
    out_strides,
    residual_strides,
    rows,
    channels,
    pixels,
    inner,
    blocks,
    own,
    rest,
    eps,
    RELU: tl.constexpr,
    EARLY: tl.constexpr,
    LAST: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out = (x - mean) * rstd * weight + bias; with RELU, of that and ``residual``, which may be absent, at least 0.

    mean, rstd: [channels] of COMPUTE; with ``running_mean`` and ``running_var`` they are computed from those, and
    written. weight, bias and running statistics: [channels] of a parameter's element, or absent.
    """
    allow_next(OVERLAPS)
    if not EARLY:
        wait_for_previous(OVERLAPS)
    channel, pixel, live, beside = columns_of(channels, pixels, blocks, LAST, BLOCK)
    part = tl.program_id(0) // blocks
    row = part * ROWS + tl.arange(0, ROWS)[:, None]
    mask = live & (row < rows)
    v = read(x, x_strides, row, channel, pixel, inner, mask).to(COMPUTE)
    if EARLY:
        wait_for_previous(OVERLAPS)
    exists = channel < channels
    number = own_of(channel, own)
    shift = None
    if running_var is not None:
        m = parameter_of(running_mean, number, exists, COMPUTE)
        r = tl.rsqrt(parameter_of(running_var, number, exists, COMPUTE) + eps)
        first = exists & (part + beside == 0)
        tl.store(mean + number, m, mask=first)
        tl.store(rstd + number, r, mask=first)
    else:
        m = parameter_of(mean, number, exists, COMPUTE)
        r = parameter_of(rstd, number, exists, COMPUTE)
    if weight is not None:
        r = r * parameter_of(weight, number, exists, COMPUTE)
    if bias is not None:
        shift = parameter_of(bias, number, exists, COMPUTE)
    v = applied(v, m, r, shift, residual, residual_strides, row, channel, pixel, inner, mask, RELU)
    write(out, out_strides, row, channel, pixel, inner, v, mask)
    if rest is not None:
        if (part + 1) * ROWS >= rows:
            row, mask = rest_of(rows, channel, rest, ROWS)
            v = read(x, x_strides, row, channel, pixel, inner, mask).to(COMPUTE)
            v = applied(v, m, r, shift, residual, residual_strides, row, channel, pixel, inner, mask, RELU)
            write(out, out_strides, row, channel, pixel, inner, v, mask)


@jit
def passed_on(g, out, strides, row, channel, pixel, inner, mask):
    """g where ``out``, the result of relu, is positive or NaN, and 0 elsewhere; g if ``out`` is absent."""
    if out is not None:
        y = read(out, strides, row, channel, pixel, inner, mask)
        g = tl.where(y <= 0, 0.0, g)
    return g


@jit
def both_of(dout, x, out, dresidual, strides, row, channel, pixel, inner, mask, COMPUTE: tl.constexpr):
    """(dout, x) of a tile; with ``out`` dout is 0 where that is, and ``dresidual``, if there is one, is that dout.

    strides: of dout, x, out and dresidual.
    """
    g = read(dout, strides[0], row, channel, pixel, inner, mask).to(COMPUTE)
    v = read(x, strides[1], row, channel, pixel, inner, mask).to(COMPUTE)
    g = passed_on(g, out, strides[2], row, channel, pixel, inner, mask)
    if dresidual is not None:
        write(dresidual, strides[3], row, channel, pixel, inner, g, mask)
    return g, v


@jit
def batch_norm_sums_kernel(
    dout,
    x,
    mean,
    rstd,
    totals,
    projections,
    out,
    dresidual,
    dout_strides,
    x_strides,
    out_strides,
    dresidual_strides,
    rows,
    channels,
    pixels,
    inner,
    groups,
    per,
    each,
    blocks,
    own,
    rest,
    AHEAD: tl.constexpr,
    LAST: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """totals[part, c] = sum(dout), projections[part, c] = sum(dout * hat), over the elements of channel c in one part.

    With ``out`` dout is 0 where that is; so it is written to ``dresidual``, if there is one. Each place of a tile has
    sums of its own, which are added at the end. With AHEAD a tile is loaded while the one before it is added up.
    Without ``per`` mean and rstd are [channels]; otherwise [images, groups], of groups of ``per`` channels.
    """
    wait_for_previous(OVERLAPS)
    allow_next(OVERLAPS)
    channel, pixel, live, beside = columns_of(channels, pixels, blocks, LAST, BLOCK)
    part = tl.program_id(0) // blocks
    exists = channel < channels
    if per is None:
        m = parameter_of(mean, own_of(channel, own), exists, COMPUTE)
        r = parameter_of(rstd, own_of(channel, own), exists, COMPUTE)
    strides = (dout_strides, x_strides, out_strides, dresidual_strides)
    a = tl.zeros((ROWS, BLOCK), COMPUTE)
    b = tl.zeros((ROWS, BLOCK), COMPUTE)
    if AHEAD:
        end = tl.minimum(rows, (part + 1) * each * ROWS)
        row = part * each * ROWS + tl.arange(0, ROWS)[:, None]
        g, v = both_of(dout, x, out, dresidual, strides, row, channel, pixel, inner, live & (row < end), COMPUTE)
    length = tl.minimum(rows - part * each * ROWS, each * ROWS)
    for step in range(tl.cdiv(length, ROWS)):
        row = (part * each + step) * ROWS + tl.arange(0, ROWS)[:, None]
        if not AHEAD:
            g, v = both_of(dout, x, out, dresidual, strides, row, channel, pixel, inner, live & (row < rows), COMPUTE)
        if per is not None:
            image = row if inner is None else row // inner
            at = image.to(tl.int64) * groups + channel // per
            m = parameter_of(mean, at, exists & (row < rows), COMPUTE)
            r = parameter_of(rstd, at, exists & (row < rows), COMPUTE)
        if AHEAD:
            term, product = g, g * ((v - m) * r)
            row += ROWS
            g, v = both_of(dout, x, out, dresidual, strides, row, channel, pixel, inner, live & (row < end), COMPUTE)
            a += term
            b += product
        else:
            a += g
            b += g * ((v - m) * r)
    if rest is not None:
        if (part + 1) * each * ROWS >= rows:
            row, mask = rest_of(rows, channel, rest, ROWS)
            g, v = both_of(dout, x, out, dresidual, strides, row, channel, pixel, inner, mask, COMPUTE)
            a += g
            b += g * ((v - m) * r)
    across = tl.cdiv(pixels, BLOCK)  # 1 with LAST
    to = (part.to(tl.int64) * across + beside) * channels + channel
    tl.store(totals + to, of_channel(a, LAST), mask=exists)
    tl.store(projections + to, of_channel(b, LAST), mask=exists)


@jit
def read_gradient(dout, x, out, total, strides, row, channel, pixel, inner, mask, COMPUTE: tl.constexpr):
    """(dout, x) of a tile; x is not read without ``total``. strides: of dout, x and out."""
    d = read(dout, strides[0], row, channel, pixel, inner, mask).to(COMPUTE)
    d = passed_on(d, out, strides[2], row, channel, pixel, inner, mask)
    v = d
    if total is not None:
        v = read(x, strides[1], row, channel, pixel, inner, mask).to(COMPUTE)
    return d, v


@jit
def write_gradient(d, v, dx, strides, row, channel, pixel, inner, mask, means, scale):
    """dx = (d - total - (v - mean) * slope) * scale of a tile; without ``means`` dx = d * scale.

    means: of the tile's channels the mean, the total and the slope, rstd * projection.
    """
    if means is not None:
        d = d - means[1] - (v - means[0]) * means[2]
    write(dx, strides, row, channel, pixel, inner, d * scale, mask)


@jit
def batch_norm_gradient_kernel(
    dout,
    x,
    mean,
    rstd,
    weight,
    total,
    projection,
    dx,
    out,
    dout_strides,
    x_strides,
    dx_strides,
    out_strides,
    rows,
    channels,
    pixels,
    inner,
    blocks,
    own,
    rest,
    EARLY: tl.constexpr,
    LAST: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """dx = (dout - total - hat * projection) * rstd * weight; without total and projection dx = dout * rstd * weight.

    total, projection: means of dout and of dout * hat, [channels] of COMPUTE. With ``out`` dout is 0 where that is.
    """
    allow_next(OVERLAPS)
    if not EARLY:
        wait_for_previous(OVERLAPS)
    channel, pixel, live, _ = columns_of(channels, pixels, blocks, LAST, BLOCK)
    part = tl.program_id(0) // blocks
    strides = (dout_strides, x_strides, out_strides)
    row = part * ROWS + tl.arange(0, ROWS)[:, None]
    mask = live & (row < rows)
    d, v = read_gradient(dout, x, out, total, strides, row, channel, pixel, inner, mask, COMPUTE)
    if EARLY:
        wait_for_previous(OVERLAPS)
    exists = channel < channels
    number = own_of(channel, own)
    r = parameter_of(rstd, number, exists, COMPUTE)
    scale = r
    if weight is not None:
        scale = scale * parameter_of(weight, number, exists, COMPUTE)
    means = None
    if total is not None:
        m = parameter_of(mean, number, exists, COMPUTE)
        t = parameter_of(total, number, exists, COMPUTE)
        means = (m, t, parameter_of(projection, number, exists, COMPUTE) * r)
    write_gradient(d, v, dx, dx_strides, row, channel, pixel, inner, mask, means, scale)
    if rest is not None:
        if (part + 1) * ROWS >= rows:
            row, mask = rest_of(rows, channel, rest, ROWS)
            d, v = read_gradient(dout, x, out, total, strides, row, channel, pixel, inner, mask, COMPUTE)
            write_gradient(d, v, dx, dx_strides, row, channel, pixel, inner, mask, means, scale)
