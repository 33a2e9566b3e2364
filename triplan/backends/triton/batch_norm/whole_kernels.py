"""Kernel of ``whole``: a program walks whole channels twice, for their sums and for the gradient; with running
statistics, on which the gradient alone depends, once.

Formulas, tiles and operands are those of ``channels``; tiles lie one after another along the pixels of a channel
(``across`` of them, without LAST), then along the rows.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.batch_norm.channels_kernels import parameter_of, passed_on, read, write
from triplan.backends.triton.common.overlap import begin


@jit
def position(step, rows, exists, pixels, across, LAST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(row, pixel, which exist) of tile number ``step`` of channels, of which ``exists`` says the same."""
    row = step // across * ROWS + tl.arange(0, ROWS)[:, None]
    pixel = tl.arange(0, BLOCK)[None, :]
    if LAST:
        pixel = pixel * 0
    else:
        pixel += step % across * BLOCK
    return row, pixel, exists & (row < rows) & (pixel < pixels)


@jit
def of_channels(v, LAST: tl.constexpr):
    """The sum of a tile's elements for each of its channels: [1, BLOCK], or a scalar without LAST: then each thread
    adds its own before threads exchange any."""
    return tl.sum(v, 0, keep_dims=True) if LAST else tl.sum(v)


@jit
def batch_norm_whole_kernel(
    dout,
    x,
    mean,
    rstd,
    weight,
    dx,
    dweight,
    dbias,
    out,
    dresidual,
    dout_strides,
    x_strides,
    dx_strides,
    out_strides,
    dresidual_strides,
    rows,
    channels,
    pixels,
    inner,
    across,
    steps,
    TRAINING: tl.constexpr,
    LAST: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """dx = (dout - mean(dout) - hat * mean(dout * hat)) * rstd * weight, dbias = sum(dout), dweight = sum(dout * hat).

    Without TRAINING dx = dout * rstd * weight. With ``out``, the result of relu, dout is 0 where that is; so it is
    written to ``dresidual``, if there is one.
    ``steps``: tiles of a program; None is one, whose elements stay in registers between the walks.
    """
    begin(OVERLAPS)
    channel = tl.program_id(0)
    if LAST:
        channel = channel * BLOCK + tl.arange(0, BLOCK)[None, :]
    exists = channel < channels
    m = parameter_of(mean, channel, exists, COMPUTE)
    r = parameter_of(rstd, channel, exists, COMPUTE)
    scale = r
    if weight is not None:
        scale = scale * parameter_of(weight, channel, exists, COMPUTE)
    a = tl.zeros((ROWS, BLOCK), COMPUTE)
    b = tl.zeros((ROWS, BLOCK), COMPUTE)
    g, v = a, a
    for step in range(1 if steps is None else steps):
        row, pixel, mask = position(step, rows, exists, pixels, across, LAST, ROWS, BLOCK)
        g = read(dout, dout_strides, row, channel, pixel, inner, mask).to(COMPUTE)
        v = read(x, x_strides, row, channel, pixel, inner, mask).to(COMPUTE)
        g = passed_on(g, out, out_strides, row, channel, pixel, inner, mask)
        if dresidual is not None:
            write(dresidual, dresidual_strides, row, channel, pixel, inner, g, mask)
        if not TRAINING:
            write(dx, dx_strides, row, channel, pixel, inner, g * scale, mask)
        a += g
        b += g * ((v - m) * r)
    total, projection = of_channels(a, LAST), of_channels(b, LAST)
    if dbias is not None:
        tl.store(dbias + channel, total.to(dbias.dtype.element_ty), mask=exists)
    if dweight is not None:
        tl.store(dweight + channel, projection.to(dweight.dtype.element_ty), mask=exists)
    if TRAINING:
        count = tl.full((), rows, COMPUTE) * tl.full((), pixels, COMPUTE)
        total, projection = total / count, projection / count
        for step in range(1 if steps is None else steps):
            row, pixel, mask = position(step, rows, exists, pixels, across, LAST, ROWS, BLOCK)
            if steps is not None:
                g = read(dout, dout_strides, row, channel, pixel, inner, mask).to(COMPUTE)
                v = read(x, x_strides, row, channel, pixel, inner, mask).to(COMPUTE)
                g = passed_on(g, out, out_strides, row, channel, pixel, inner, mask)
            g = (g - total - (v - m) * r * projection) * scale
            write(dx, dx_strides, row, channel, pixel, inner, g, mask)
