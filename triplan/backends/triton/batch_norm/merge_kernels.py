"""Kernels of ``channels`` and ``groups`` that merge partial results of each channel in a fixed order.

Partial results are [parts, channels] of COMPUTE: see ``channels_kernels``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin


@jit
def next_of(running, next, channel, exists, statistic, momentum):
    """next = (1 - momentum) * running + momentum * statistic."""
    old = tl.load(running + channel, mask=exists, other=0.0).to(statistic.dtype)
    new = old * (1.0 - momentum) + statistic * momentum
    tl.store(next + channel, new.to(next.dtype.element_ty), mask=exists)


@jit
def count_of(part, full, pixels, held, width, across, parts, more, COMPUTE: tl.constexpr):
    """Elements of a part, see ``batch_norm_merge_kernel``."""
    line, beside, last = part, part * 0, parts - 1
    if across is not None:
        line, beside, last = part // across, part % across, parts // across - 1
    height = tl.minimum(full - line * held, held)
    if more is None:
        count = height.to(COMPUTE) * tl.minimum(pixels - beside * width, width).to(COMPUTE)
    else:
        count = (height + ((line == last) & (beside < more)).to(height.dtype)).to(COMPUTE)
    return count


@jit
def batch_norm_merge_kernel(
    means,
    squares,
    mean,
    rstd,
    running_mean,
    running_var,
    next_mean,
    next_var,
    rows,
    channels,
    pixels,
    held,
    width,
    across,
    parts,
    full,
    more,
    momentum,
    eps,
    COMPUTE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """mean, rstd and the next running statistics of BLOCK channels, from the partial ones in their order.

    means, squares: [parts, channels]; a part has at most ``held`` rows and ``width`` pixels of a channel, ``across``
    parts (None: one) the same rows, of which there are ``full``. With ``more``, each of the ``across`` parts has one
    pixel of these rows; the last rows are followed by ``more`` pixels. mean, rstd: [channels] of COMPUTE; running and
    next statistics: of a parameter's element, or absent.
    """
    begin(OVERLAPS)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    exists = channel < channels
    total = tl.full((), rows, COMPUTE) * tl.full((), pixels, COMPUTE)
    part = tl.arange(0, PARTS)[:, None]
    # Of the first parts, which are mostly all, nothing is read twice.
    count = count_of(part, full, pixels, held, width, across, parts, more, COMPUTE)
    live = exists & (part < parts)
    at = part.to(tl.int64) * channels + channel
    v = tl.load(means + at, mask=live, other=0.0)
    b = tl.load(squares + at, mask=live, other=0.0)
    a = tl.where(live, v * (count / total), 0.0)
    for step in range(1, tl.cdiv(parts, PARTS)):
        later = step * PARTS + part
        of_later = count_of(later, full, pixels, held, width, across, parts, more, COMPUTE)
        beyond = exists & (later < parts)
        term = tl.load(means + later.to(tl.int64) * channels + channel, mask=beyond, other=0.0)
        a += tl.where(beyond, term * (of_later / total), 0.0)
    centre = tl.sum(a, 0, keep_dims=True)
    v -= centre
    b = tl.where(live, b + count * v * v, 0.0)
    for step in range(1, tl.cdiv(parts, PARTS)):
        later = step * PARTS + part
        of_later = count_of(later, full, pixels, held, width, across, parts, more, COMPUTE)
        beyond = exists & (later < parts)
        at = later.to(tl.int64) * channels + channel
        apart = tl.load(means + at, mask=beyond, other=0.0) - centre
        square = tl.load(squares + at, mask=beyond, other=0.0)
        b += tl.where(beyond, square + of_later * apart * apart, 0.0)
    square = tl.sum(b, 0, keep_dims=True)
    tl.store(mean + channel, centre, mask=exists)
    tl.store(rstd + channel, tl.rsqrt(square / total + eps), mask=exists)
    if next_mean is not None:
        next_of(running_mean, next_mean, channel, exists, centre, momentum)
        next_of(running_var, next_var, channel, exists, square / (total - 1.0), momentum)


@jit
def batch_norm_fold_kernel(
    totals,
    projections,
    dweight,
    dbias,
    total,
    projection,
    rows,
    channels,
    pixels,
    parts,
    COMPUTE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """dweight = sum(projections), dbias = sum(totals), in the order of parts, and both divided by a channel's elements.

    totals, projections: [parts, channels]; dweight, dbias: [channels] of a parameter's element, or absent; total,
    projection: [channels] of COMPUTE, or absent.
    """
    begin(OVERLAPS)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    exists = channel < channels
    a = tl.zeros((PARTS, BLOCK), COMPUTE)
    b = tl.zeros((PARTS, BLOCK), COMPUTE)
    for step in range(tl.cdiv(parts, PARTS)):
        part = step * PARTS + tl.arange(0, PARTS)[:, None]
        live = exists & (part < parts)
        at = part.to(tl.int64) * channels + channel
        a += tl.load(totals + at, mask=live, other=0.0)
        b += tl.load(projections + at, mask=live, other=0.0)
    a = tl.sum(a, 0, keep_dims=True)
    b = tl.sum(b, 0, keep_dims=True)
    if dbias is not None:
        tl.store(dbias + channel, a.to(dbias.dtype.element_ty), mask=exists)
    if dweight is not None:
        tl.store(dweight + channel, b.to(dweight.dtype.element_ty), mask=exists)
    if total is not None:
        count = tl.full((), rows, COMPUTE) * tl.full((), pixels, COMPUTE)
        tl.store(total + channel, a / count, mask=exists)
        tl.store(projection + channel, b / count, mask=exists)
