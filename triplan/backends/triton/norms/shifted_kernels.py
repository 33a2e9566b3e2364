"""rms_norm, layer_norm, l2_norm and their backward, entry ``looped``, of rows that begin between two vectors.

CENTRED, LENGTH, formulas and operands: see ``shared_kernels``; how such rows are read: see ``common/shifted_kernels``;
the two passes: see ``looped_kernels``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.shifted_kernels import (
    moved_back,
    other_elements,
    read_end,
    rest_elements,
    shifted_row,
    whole_vectors,
)
from triplan.backends.triton.norms.shared_kernels import (
    gradient_of,
    load_affine,
    normalised,
    projection_of,
    scale_of_statistic,
    statistic_and_scale,
    two_sums,
)


@jit
def shifted_statistics(
    at,
    skipped,
    end,
    n,
    centre,
    CENTRED: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """(mean - centre, sum of squares about the mean, sum of squares about ``centre``) of a row; all scalars. Without
    CENTRED centre and mean are 0."""
    known = read_end(tl.program_id(0), end, VECTOR)
    total = tl.zeros((BLOCK,), COMPUTE)
    squares = tl.zeros((BLOCK,), COMPUTE)
    for step in range(tl.cdiv(end, BLOCK * UNROLL)):
        loaded = ()
        for u in tl.static_range(UNROLL):
            place = (step * UNROLL + u) * BLOCK + tl.arange(0, BLOCK)
            vectors = place // VECTOR * VECTOR < known
            loaded = loaded + (tl.load(at + place, mask=vectors, other=0.0, eviction_policy="evict_last"),)
        for u in tl.static_range(UNROLL):
            place = (step * UNROLL + u) * BLOCK + tl.arange(0, BLOCK)
            v = tl.where((place >= skipped) & (place < known), loaded[u].to(COMPUTE) - centre, 0.0)
            if CENTRED:
                total += v
            squares += v * v
    if known < end:
        place, live = rest_elements(known, end, BLOCK)
        v = tl.where(live, tl.load(at + place, mask=live, other=0.0).to(COMPUTE) - centre, 0.0)
        if CENTRED:
            total += v
        squares += v * v
    squares = moved_back(squares, skipped, BLOCK)
    correction = centre
    if CENTRED:
        row_total, about_centre = two_sums(moved_back(total, skipped, BLOCK), squares, 0, False)
        correction = row_total / n.to(COMPUTE)
        about_mean = about_centre - row_total * correction
    else:
        about_centre = tl.sum(squares, 0)
        about_mean = about_centre
    return correction, about_mean, about_centre


@jit
def norm_shifted_kernel(
    x,
    out,
    mean,
    rstd,
    weight,
    bias,
    n,
    eps,
    CENTRED: tl.constexpr,
    LENGTH: tl.constexpr,
    OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """out = (x - mean) * scale * (weight + OFFSET) + bias along each row; the mean is 0 without CENTRED.

    x, out: [rows, n] of f16 or bf16, packed, aligned; mean, rstd: [rows]; weight, bias: [n]. A program walks along a
    row by blocks of BLOCK elements, of which the row has more than one, as ``norm_looped_kernel``. Deviations are taken
    from the mean of the row's first BLOCK elements, which are loaded by themselves: those of the first block that is
    read depend on where the row begins.
    """
    row = tl.program_id(0)
    skipped, start, end = shifted_row(row, n, VECTOR)
    at = x + start
    to = out + start
    centre = tl.zeros((), COMPUTE)
    if CENTRED:
        centre = tl.sum(tl.load(at + skipped + tl.arange(0, BLOCK)).to(COMPUTE), 0) / BLOCK
    correction, squares, about_centre = shifted_statistics(
        at, skipped, end, n, centre, CENTRED, COMPUTE, BLOCK, VECTOR, UNROLL
    )
    if CENTRED:
        if about_centre > 4.0 * squares:
            centre += correction
            correction, squares, about_centre = shifted_statistics(
                at, skipped, end, n, centre, CENTRED, COMPUTE, BLOCK, VECTOR, UNROLL
            )
        squares = tl.where(squares < 0, 0.0, squares)
        tl.store(mean + row, centre + correction)
    statistic, scale = statistic_and_scale(squares, 1.0 / n.to(COMPUTE), eps, LENGTH)
    tl.store(rstd + row, statistic)
    steps = tl.cdiv(end, BLOCK * UNROLL)
    for step in range(steps):
        loaded = ()
        for u in tl.static_range(UNROLL):
            place = ((steps - 1 - step) * UNROLL + u) * BLOCK + tl.arange(0, BLOCK)
            whole = whole_vectors(place, skipped, end, VECTOR)
            loaded = loaded + (tl.load(at + place, mask=whole, other=0.0, eviction_policy="evict_first"),)
        for u in tl.static_range(UNROLL):
            place = ((steps - 1 - step) * UNROLL + u) * BLOCK + tl.arange(0, BLOCK)
            whole = whole_vectors(place, skipped, end, VECTOR)
            y = normalised(loaded[u].to(COMPUTE), centre, correction, scale, CENTRED)
            y = load_affine(y, weight, bias, place - skipped, whole, OFFSET)
            tl.store(to + place, y.to(out.dtype.element_ty), mask=whole)
    place, live = other_elements(skipped, end, VECTOR)
    y = normalised(tl.load(at + place, mask=live, other=0.0).to(COMPUTE), centre, correction, scale, CENTRED)
    y = load_affine(y, weight, bias, place - skipped, live, OFFSET)
    tl.store(to + place, y.to(out.dtype.element_ty), mask=live)


@jit
def norm_backward_shifted_kernel(
    dout,
    x,
    mean,
    rstd,
    dx,
    weight,
    n,
    eps,
    CENTRED: tl.constexpr,
    LENGTH: tl.constexpr,
    OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """dx = (g - hat * mean(g * hat) - mean(g)) * scale along each row, as in ``shared_kernels``.

    dout, x, dx: [rows, n] of f16 or bf16, packed, aligned; mean, rstd: [rows]; weight: [n]. A program walks along a row
    by blocks of BLOCK elements, first for the sums, then for dx.
    """
    row = tl.program_id(0)
    skipped, start, end = shifted_row(row, n, VECTOR)
    dout_at = dout + start
    x_at = x + start
    to = dx + start
    statistic = tl.load(rstd + row)
    scale = scale_of_statistic(statistic, eps, LENGTH)
    centre = tl.zeros((), COMPUTE)
    if CENTRED:
        centre = tl.load(mean + row)
    g_total = tl.zeros((BLOCK,), COMPUTE)
    total = tl.zeros((BLOCK,), COMPUTE)
    known = read_end(row, end, VECTOR)
    steps = tl.cdiv(end, BLOCK)
    for step in range(steps):
        place = step * BLOCK + tl.arange(0, BLOCK)
        vectors = place // VECTOR * VECTOR < known
        live = (place >= skipped) & (place < known)
        g = tl.load(dout_at + place, mask=vectors, other=0.0, eviction_policy="evict_last").to(COMPUTE)
        v = tl.load(x_at + place, mask=vectors, other=0.0, eviction_policy="evict_last").to(COMPUTE)
        g = load_affine(g, weight, None, place - skipped, live, OFFSET)
        if CENTRED:
            g_total += tl.where(live, g, 0.0)
        total += tl.where(live, g * ((v - centre) * scale), 0.0)
    if known < end:
        place, live = rest_elements(known, end, BLOCK)
        g = tl.load(dout_at + place, mask=live, other=0.0).to(COMPUTE)
        v = tl.load(x_at + place, mask=live, other=0.0).to(COMPUTE)
        g = load_affine(g, weight, None, place - skipped, live, OFFSET)
        if CENTRED:
            g_total += tl.where(live, g, 0.0)
        total += tl.where(live, g * ((v - centre) * scale), 0.0)
    count = n.to(COMPUTE)
    projection = projection_of(tl.sum(moved_back(total, skipped, BLOCK), 0), count, statistic, eps, LENGTH)
    g_mean = tl.zeros((), COMPUTE)
    if CENTRED:
        g_mean = tl.sum(moved_back(g_total, skipped, BLOCK), 0) / count
    for step in range(steps):
        place = (steps - 1 - step) * BLOCK + tl.arange(0, BLOCK)
        whole = whole_vectors(place, skipped, end, VECTOR)
        g = tl.load(dout_at + place, mask=whole, other=0.0, eviction_policy="evict_first").to(COMPUTE)
        v = tl.load(x_at + place, mask=whole, other=0.0, eviction_policy="evict_first").to(COMPUTE)
        g = load_affine(g, weight, None, place - skipped, whole, OFFSET)
        d = gradient_of(g, (v - centre) * scale, g_mean, scale, projection, CENTRED)
        tl.store(to + place, d.to(dx.dtype.element_ty), mask=whole)
    place, live = other_elements(skipped, end, VECTOR)
    g = tl.load(dout_at + place, mask=live, other=0.0).to(COMPUTE)
    v = tl.load(x_at + place, mask=live, other=0.0).to(COMPUTE)
    g = load_affine(g, weight, None, place - skipped, live, OFFSET)
    d = gradient_of(g, (v - centre) * scale, g_mean, scale, projection, CENTRED)
    tl.store(to + place, d.to(dx.dtype.element_ty), mask=live)
