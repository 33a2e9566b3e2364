"""Kernels of ``groups``: a program walks whole groups of channels twice, for their sums and for the results.

Those of ``split`` walk parts of a group, first for the sums, which the second launch reads.

    forward     out = (x - mean) * rstd * weight + bias      rstd = 1 / sqrt(var + eps)
    backward    dx = (g - mean(g) - hat * mean(g * hat)) * rstd      g = dout * weight, hat = (x - mean) * rstd

Images are packed (batch, channels, pixels) of f16, bf16, f32 or f64: a group of one image is a row of ``n`` contiguous
elements, ``per`` channels of it. mean, rstd: [rows] of COMPUTE, which is f32, or f64 for f64; weight, bias: [channels]
of a parameter's element, or absent. ``pixels``: as ``quotient`` has it.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.batch_norm.channels_kernels import step_of
from triplan.backends.triton.common.offsets_kernels import quotient
from triplan.backends.triton.common.overlap import begin


@jit
def of_elements(pointer, row, col, mask, groups, per, pixels, COMPUTE: tl.constexpr):
    """The weight or bias of the elements ``col`` [1, BLOCK] of each row [ROWS, 1]. ``per``: None for 1."""
    if per is None:
        v = tl.load(pointer + row % groups, eviction_policy="evict_last")
    else:
        channel = row % groups * per + quotient(col, pixels)
        v = tl.load(pointer + channel, mask=mask, other=0.0, eviction_policy="evict_last")
    return v.to(COMPUTE)


@jit
def walked(x, inside, n, COMPUTE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(mean, sum of squared deviations) [ROWS, 1] of the ``n`` elements at each of ``x`` [ROWS, 1].

    Each place of a tile has a mean and squared deviations of its own, merged at the end.
    """
    place = tl.arange(0, BLOCK)[None, :]
    a = tl.zeros((ROWS, BLOCK), COMPUTE)
    b = tl.zeros((ROWS, BLOCK), COMPUTE)
    whole = n // BLOCK
    for step in range(whole):
        v = tl.load(x + (step * BLOCK + place), mask=inside, other=0.0).to(COMPUTE)
        a, b = step_of(a, b, v, 1.0 / tl.full((), step + 1, COMPUTE))
    live = place < n - whole * BLOCK
    if whole * BLOCK < n:
        v = tl.load(x + (whole * BLOCK + place), mask=inside & live, other=0.0).to(COMPUTE)
        c, d = step_of(a, b, v, 1.0 / tl.full((), whole + 1, COMPUTE))
        a, b = tl.where(live, c, a), tl.where(live, d, b)
    count = (whole + live.to(tl.int32)).to(COMPUTE)
    m = tl.sum(a * (count / tl.full((), n, COMPUTE)), 1, keep_dims=True)
    apart = a - m
    return m, tl.sum(b + count * apart * apart, 1, keep_dims=True)


@jit
def scaled(v, m, r, weight, bias, row, col, mask, groups, per, pixels, COMPUTE: tl.constexpr):
    """(v - m) * r * weight + bias of the elements ``col`` of each row."""
    v = (v - m) * r
    if weight is not None:
        v = v * of_elements(weight, row, col, mask, groups, per, pixels, COMPUTE)
    if bias is not None:
        v = v + of_elements(bias, row, col, mask, groups, per, pixels, COMPUTE)
    return v


@jit
def group_norm_kernel(
    x,
    out,
    mean,
    rstd,
    weight,
    bias,
    rows,
    n,
    groups,
    per,
    pixels,
    eps,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out = (x - mean) * rstd * weight + bias, of ROWS rows; mean and rstd are written.

    With ONE a row is one block, which stays in registers.
    """
    begin(OVERLAPS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = row < rows
    start = row.to(tl.int64) * n
    place = tl.arange(0, BLOCK)[None, :]
    total = tl.full((), n, COMPUTE)
    if ONE:
        live = inside & (place < n)
        v = tl.load(x + start + place, mask=live, other=0.0).to(COMPUTE)
        m = tl.sum(v, 1, keep_dims=True) / total
        apart = tl.where(live, v - m, 0.0)
        square = tl.sum(apart * apart, 1, keep_dims=True)
    else:
        m, square = walked(x + start, inside, n, COMPUTE, ROWS, BLOCK)
    r = tl.rsqrt(square / total + eps)
    tl.store(mean + row, m, mask=inside)
    tl.store(rstd + row, r, mask=inside)
    for step in range(1 if ONE else tl.cdiv(n, BLOCK)):
        col = step * BLOCK + place
        mask = inside & (col < n)
        if not ONE:
            v = tl.load(x + start + col, mask=mask, other=0.0).to(COMPUTE)
        v = scaled(v, m, r, weight, bias, row, col, mask, groups, per, pixels, COMPUTE)
        tl.store(out + start + col, v.to(out.dtype.element_ty), mask=mask)


@jit
def group_norm_statistics_kernel(
    x,
    means,
    squares,
    n,
    each,
    splits,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """means[row, part] = mean, squares[row, part] = sum of (x - mean)^2, over ``each`` blocks of one row."""
    begin(OVERLAPS)
    row, part = tl.program_id(0) // splits, tl.program_id(0) % splits
    first = part * each * BLOCK
    start = row.to(tl.int64) * n + first + tl.zeros((1, 1), tl.int64)
    m, square = walked(
        x + start, tl.full((1, 1), True, tl.int1), tl.minimum(n - first, each * BLOCK), COMPUTE, 1, BLOCK
    )
    to = row.to(tl.int64) * splits + part + tl.zeros((1, 1), tl.int64)
    tl.store(means + to, m)
    tl.store(squares + to, square)


@jit
def group_norm_of_statistics_kernel(
    x,
    out,
    mean,
    rstd,
    weight,
    bias,
    means,
    squares,
    n,
    groups,
    per,
    pixels,
    each,
    splits,
    eps,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out of ``each`` blocks of one row, from the statistics of its parts, of which there are at most SPLITS.

    Each program merges them (Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance").
    """
    begin(OVERLAPS)
    row, part = tl.program_id(0) // splits, tl.program_id(0) % splits
    other, total = tl.arange(0, SPLITS), tl.full((), n, COMPUTE)
    exists, at = other < splits, row.to(tl.int64) * splits + other
    count = tl.where(exists, tl.minimum(n - other * (each * BLOCK), each * BLOCK), 0).to(COMPUTE)
    a = tl.load(means + at, mask=exists, other=0.0)
    b = tl.load(squares + at, mask=exists, other=0.0)
    m = tl.sum(a * (count / total), 0)
    apart = a - m
    r = tl.rsqrt(tl.sum(b + count * apart * apart, 0) / total + eps)
    if part == 0:
        tl.store(mean + row, m)
        tl.store(rstd + row, r)
    start = row.to(tl.int64) * n
    for step in range(part * each, tl.minimum((part + 1) * each, tl.cdiv(n, BLOCK))):
        col = step * BLOCK + tl.arange(0, BLOCK)
        mask = col < n
        v = tl.load(x + start + col, mask=mask, other=0.0).to(COMPUTE)
        v = scaled(v, m, r, weight, bias, row, col, mask, groups, per, pixels, COMPUTE)
        tl.store(out + start + col, v.to(out.dtype.element_ty), mask=mask)


@jit
def terms(dout, x, weight, m, r, row, start, col, mask, groups, per, pixels, COMPUTE: tl.constexpr):
    """(g, hat) of the elements ``col`` of each row, which begins at ``start``; 0 and any without ``mask``."""
    g = tl.load(dout + start + col, mask=mask, other=0.0).to(COMPUTE)
    if weight is not None:
        g = g * of_elements(weight, row, col, mask, groups, per, pixels, COMPUTE)
    return g, (tl.load(x + start + col, mask=mask, other=0.0).to(COMPUTE) - m) * r


@jit
def group_norm_partials_kernel(
    dout,
    x,
    mean,
    rstd,
    weight,
    shifts,
    shares,
    rows,
    n,
    groups,
    per,
    pixels,
    each,
    splits,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """shifts[row, part] = sum(g), shares[row, part] = sum(g * hat), over ``each`` blocks of one row."""
    begin(OVERLAPS)
    row, part = tl.program_id(0) // splits, tl.program_id(0) % splits
    start = row.to(tl.int64) * n
    m, r = tl.load(mean + row), tl.load(rstd + row)
    a = tl.zeros((BLOCK,), COMPUTE)
    b = tl.zeros((BLOCK,), COMPUTE)
    for step in range(part * each, tl.minimum((part + 1) * each, tl.cdiv(n, BLOCK))):
        col = step * BLOCK + tl.arange(0, BLOCK)
        g, hat = terms(dout, x, weight, m, r, row, start, col, col < n, groups, per, pixels, COMPUTE)
        a += g
        b += g * hat
    to = row.to(tl.int64) * splits + part
    tl.store(shifts + to, tl.sum(a, 0))
    tl.store(shares + to, tl.sum(b, 0))


@jit
def group_norm_parts_kernel(
    dout,
    x,
    mean,
    rstd,
    weight,
    dx,
    shifts,
    shares,
    rows,
    n,
    groups,
    per,
    pixels,
    each,
    splits,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """dx of ``each`` blocks of one row, from the partial sums of the whole row, of which there are at most SPLITS."""
    begin(OVERLAPS)
    row, part = tl.program_id(0) // splits, tl.program_id(0) % splits
    start = row.to(tl.int64) * n
    m, r = tl.load(mean + row), tl.load(rstd + row)
    other = tl.arange(0, SPLITS)
    at, total = row.to(tl.int64) * splits + other, tl.full((), n, COMPUTE)
    shift = tl.sum(tl.load(shifts + at, mask=other < splits, other=0.0), 0) / total
    share = tl.sum(tl.load(shares + at, mask=other < splits, other=0.0), 0) / total
    for step in range(part * each, tl.minimum((part + 1) * each, tl.cdiv(n, BLOCK))):
        col = step * BLOCK + tl.arange(0, BLOCK)
        mask = col < n
        g, hat = terms(dout, x, weight, m, r, row, start, col, mask, groups, per, pixels, COMPUTE)
        tl.store(dx + start + col, ((g - shift - hat * share) * r).to(dx.dtype.element_ty), mask=mask)


@jit
def group_norm_gradient_kernel(
    dout,
    x,
    mean,
    rstd,
    weight,
    dx,
    rows,
    n,
    groups,
    per,
    pixels,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """dx = (g - mean(g) - hat * mean(g * hat)) * rstd, g = dout * weight, of ROWS rows. ONE: see above."""
    begin(OVERLAPS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = row < rows
    start = row.to(tl.int64) * n
    place = tl.arange(0, BLOCK)[None, :]
    m = tl.load(mean + row, mask=inside, other=0.0)
    r = tl.load(rstd + row, mask=inside, other=0.0)
    if ONE:
        mask = inside & (place < n)
        g, hat = terms(dout, x, weight, m, r, row, start, place, mask, groups, per, pixels, COMPUTE)
        a, b = g, g * hat
    else:
        a = tl.zeros((ROWS, BLOCK), COMPUTE)
        b = tl.zeros((ROWS, BLOCK), COMPUTE)
        for step in range(tl.cdiv(n, BLOCK)):
            col = step * BLOCK + place
            mask = inside & (col < n)
            g, hat = terms(dout, x, weight, m, r, row, start, col, mask, groups, per, pixels, COMPUTE)
            a += g
            b += g * hat
    total = tl.full((), n, COMPUTE)
    shift = tl.sum(a, 1, keep_dims=True) / total
    projection = tl.sum(b, 1, keep_dims=True) / total
    for step in range(1 if ONE else tl.cdiv(n, BLOCK)):
        col = step * BLOCK + place
        mask = inside & (col < n)
        if not ONE:
            g, hat = terms(dout, x, weight, m, r, row, start, col, mask, groups, per, pixels, COMPUTE)
        tl.store(dx + start + col, ((g - shift - hat * projection) * r).to(dx.dtype.element_ty), mask=mask)


@jit
def group_norm_planes_kernel(
    dout,
    x,
    mean,
    rstd,
    totals,
    projections,
    planes,
    size,
    per,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """totals[p] = sum(dout), projections[p] = sum(dout * hat), of ROWS of the ``planes``: channels of all images.

    A plane has ``size`` contiguous elements.
    """
    begin(OVERLAPS)
    plane = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = plane < planes
    start = plane.to(tl.int64) * size
    row = plane // per
    m = tl.load(mean + row, mask=inside, other=0.0)
    r = tl.load(rstd + row, mask=inside, other=0.0)
    a = tl.zeros((ROWS, BLOCK), COMPUTE)
    b = tl.zeros((ROWS, BLOCK), COMPUTE)
    for step in range(tl.cdiv(size, BLOCK)):
        col = step * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask = inside & (col < size)
        g = tl.load(dout + start + col, mask=mask, other=0.0).to(COMPUTE)
        v = tl.load(x + start + col, mask=mask, other=0.0).to(COMPUTE)
        a += g
        b += g * ((v - m) * r)
    tl.store(totals + plane, tl.sum(a, 1, keep_dims=True), mask=inside)
    tl.store(projections + plane, tl.sum(b, 1, keep_dims=True), mask=inside)


@jit
def group_norm_of_planes_kernel(
    dout,
    x,
    mean,
    rstd,
    weight,
    dx,
    totals,
    projections,
    size,
    n,
    groups,
    per,
    shares,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PER: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """dx of ROWS planes of one group, from the sums of all its planes, of which there are at most PER.

    ``shares`` programs have one group.
    """
    begin(OVERLAPS)
    row, share = tl.program_id(0) // shares, tl.program_id(0) % shares
    other = tl.arange(0, PER)
    exists, at = other < per, row.to(tl.int64) * per + other
    a = tl.load(totals + at, mask=exists, other=0.0)
    b = tl.load(projections + at, mask=exists, other=0.0)
    own = share * ROWS + tl.arange(0, ROWS)[:, None]
    inside, scale = own < per, tl.full((ROWS, 1), 1.0, COMPUTE)
    if weight is not None:
        first = weight + row % groups * per
        w = tl.load(first + other, mask=exists, other=0.0, eviction_policy="evict_last").to(COMPUTE)
        a, b = a * w, b * w
        scale = tl.load(first + own, mask=inside, other=0.0, eviction_policy="evict_last").to(COMPUTE)
    total = tl.full((), n, COMPUTE)
    shift, projection = tl.sum(a, 0) / total, tl.sum(b, 0) / total
    m, r = tl.load(mean + row), tl.load(rstd + row)
    start = (row.to(tl.int64) * per + own) * size
    for step in range(tl.cdiv(size, BLOCK)):
        col = step * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask = inside & (col < size)
        g = tl.load(dout + start + col, mask=mask, other=0.0).to(COMPUTE) * scale
        hat = (tl.load(x + start + col, mask=mask, other=0.0).to(COMPUTE) - m) * r
        tl.store(dx + start + col, ((g - shift - hat * projection) * r).to(dx.dtype.element_ty), mask=mask)
