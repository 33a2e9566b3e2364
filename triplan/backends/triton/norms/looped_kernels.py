"""rms_norm, layer_norm, l2_norm and their backward, entry ``looped``: rows of any length, read block by block, twice.

CENTRED, LENGTH, formulas and operands: see ``shared_kernels``; strides and ``blocks``: see ``common/rows_kernels``.

Both passes have the loads of UNROLL blocks in flight at a time. The second pass runs from a row's end to its start:
what the first one read last is still in the cache. The first pass loads with ``evict_last``, to keep the rows there,
the second one with ``evict_first``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import axis_offset, outer_and_lane, row_pointers
from triplan.backends.triton.norms.shared_kernels import (
    load_affine,
    load_input,
    optional_row_pointers,
    projection_of,
    scale_of_statistic,
    statistic_and_scale,
    store_gradient,
    store_output,
    two_sums,
)


@jit
def column_mask(col, n, FULL: tl.constexpr):
    """col < n; with FULL, a constant: the compiler then knows that all columns exist."""
    live = col < n
    if FULL:
        live = tl.full(col.shape, True, tl.int1)
    return live


@jit
def sum_neighbours(v, VECTOR: tl.constexpr):
    """Sums of VECTOR neighbours of ``v`` [BLOCK] each, which one thread holds: [BLOCK / VECTOR]."""
    if VECTOR > 1:
        v = tl.sum(tl.reshape(v, (v.shape[0] // VECTOR, VECTOR)), 1)
    return v


@jit
def load_blocks(
    at,
    strides,
    residual_at,
    residual_strides,
    first,
    n,
    COMPUTE: tl.constexpr,
    POLICY: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    FULL: tl.constexpr,
):
    """UNROLL blocks [BLOCK] of a row of x + residual, from element ``first`` on; their loads are in flight together."""
    blocks = ()
    for u in tl.static_range(UNROLL):
        col = first + u * BLOCK + tl.arange(0, BLOCK)
        live = column_mask(col, n, FULL)
        blocks = blocks + (load_input(at, strides, residual_at, residual_strides, col, live, COMPUTE, POLICY),)
    return blocks


@jit
def statistics(
    at,
    strides,
    residual_at,
    residual_strides,
    n,
    centre,
    CENTRED: tl.constexpr,
    FIND_CENTRE: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    VECTOR: tl.constexpr,
    FULL: tl.constexpr,
):
    """(centre, mean - centre, sum of squares about the mean, sum of squares about ``centre``) of a row; all scalars.

    FIND_CENTRE takes the mean of the first block for ``centre``. Without CENTRED centre and mean are 0.

    Within the loop a thread reduces only the VECTOR neighbours that it holds, with UNROLL blocks in flight. A reduction
    between threads would make them wait for each other, with no new loads in flight: there is one, after the loop.
    """
    total = tl.zeros((BLOCK // VECTOR,), COMPUTE)
    squares = tl.zeros((BLOCK // VECTOR,), COMPUTE)
    for first in range(0, n, BLOCK * UNROLL):
        loaded = load_blocks(
            at, strides, residual_at, residual_strides, first, n, COMPUTE, "evict_last", BLOCK, UNROLL, FULL
        )
        if FIND_CENTRE:
            if first == 0:
                centre = tl.sum(sum_neighbours(loaded[0].to(COMPUTE), VECTOR), 0) / tl.minimum(n, BLOCK).to(COMPUTE)
        for u in tl.static_range(UNROLL):
            v = loaded[u].to(COMPUTE)
            if CENTRED:
                v = v - centre
                if not FULL:
                    v = tl.where(first + u * BLOCK + tl.arange(0, BLOCK) < n, v, 0.0)
                total += sum_neighbours(v, VECTOR)
            squares += sum_neighbours(v * v, VECTOR)
    correction = centre
    if CENTRED:
        total, about_centre = two_sums(total, squares, 0, False)
        correction = total / n.to(COMPUTE)
        about_mean = about_centre - total * correction
    else:
        about_centre = tl.sum(squares, 0)
        about_mean = about_centre
    return centre, correction, about_mean, about_centre


@jit
def norm_looped_kernel(
    x,
    out,
    mean,
    rstd,
    weight,
    bias,
    residual,
    summed,
    x_strides,
    out_strides,
    residual_strides,
    summed_strides,
    sizes,
    lanes,
    n,
    blocks,
    eps,
    CENTRED: tl.constexpr,
    LENGTH: tl.constexpr,
    OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    VECTOR: tl.constexpr,
    FULL: tl.constexpr,
):
    """out = (x - mean) * scale * (weight + OFFSET) + bias along each row; the mean is 0 without CENTRED.

    x, out, residual, summed: [outer, lanes, n]; mean, rstd: [rows]; weight, bias: [n]. A program walks along one row by
    blocks of BLOCK elements; FULL: BLOCK * UNROLL divides n.

    Deviations are taken from the mean of the row's first block, so that threads synchronize only twice. It is close to
    the row's mean unless the row begins unlike its rest (Chan, Golub and LeVeque, section 3, shifted data). If the
    squares about it are more than four times those about the row's mean, the row is read again, with that mean.
    """
    outer = tl.program_id(0) // blocks
    lane = (tl.program_id(0) % blocks).to(tl.int64)
    at = row_pointers(x, x_strides, outer, sizes, lane)
    to = row_pointers(out, out_strides, outer, sizes, lane)
    residual_at = optional_row_pointers(residual, residual_strides, outer, sizes, lane)
    row = outer.to(tl.int64) * lanes + lane
    centre = tl.zeros((), COMPUTE)
    centre, correction, squares, about_centre = statistics(
        at, x_strides, residual_at, residual_strides, n, centre, CENTRED, CENTRED, COMPUTE, BLOCK, UNROLL, VECTOR, FULL
    )
    if CENTRED:
        if about_centre > 4.0 * squares:
            centre, correction, squares, about_centre = statistics(
                at, x_strides, residual_at, residual_strides, n, centre + correction, CENTRED, False, COMPUTE, BLOCK,
                UNROLL, VECTOR, FULL,
            )  # fmt: skip
        squares = tl.where(squares < 0, 0.0, squares)
        tl.store(mean + row, centre + correction)
    statistic, scale = statistic_and_scale(squares, 1.0 / n.to(COMPUTE), eps, LENGTH)
    tl.store(rstd + row, statistic)
    steps = tl.cdiv(n, BLOCK * UNROLL)
    for step in range(steps):
        first = (steps - 1 - step) * UNROLL * BLOCK
        loaded = load_blocks(
            at, x_strides, residual_at, residual_strides, first, n, COMPUTE, "evict_first", BLOCK, UNROLL, FULL
        )
        for u in tl.static_range(UNROLL):
            col = first + u * BLOCK + tl.arange(0, BLOCK)
            live = column_mask(col, n, FULL)
            store_output(
                loaded[u].to(COMPUTE), to, out, summed, weight, bias, out_strides, summed_strides, sizes, outer, lane,
                col, live, live, centre, correction, scale, CENTRED, OFFSET,
            )  # fmt: skip


@jit
def norm_backward_looped_kernel(
    dout,
    x,
    mean,
    rstd,
    dx,
    weight,
    dsummed,
    dbranch,
    dout_strides,
    x_strides,
    dx_strides,
    dsummed_strides,
    dbranch_strides,
    sizes,
    lanes,
    n,
    eps,
    CENTRED: tl.constexpr,
    LENGTH: tl.constexpr,
    OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """dx = (g - hat * mean(g * hat) - mean(g)) * scale + dsummed along each row, as in ``shared_kernels``.

    dout, x, dx, dsummed: [outer, lanes, n]; mean, rstd: [rows]; weight: [n]. A program walks along one row by blocks of
    BLOCK elements, first for the sums, then for dx.
    """
    row = tl.program_id(0).to(tl.int64)
    outer, lane = outer_and_lane(row, sizes, lanes)
    dout_at = row_pointers(dout, dout_strides, outer, sizes, lane)
    x_at = row_pointers(x, x_strides, outer, sizes, lane)
    to = row_pointers(dx, dx_strides, outer, sizes, lane)
    statistic = tl.load(rstd + row)
    scale = scale_of_statistic(statistic, eps, LENGTH)
    centre = tl.zeros((), COMPUTE)
    if CENTRED:
        centre = tl.load(mean + row)
    g_total = tl.zeros((BLOCK,), COMPUTE)
    total = tl.zeros((BLOCK,), COMPUTE)
    for start in range(0, n, BLOCK * UNROLL):
        for u in tl.static_range(UNROLL):
            col = start + u * BLOCK + tl.arange(0, BLOCK)
            live = col < n
            g = tl.load(dout_at + axis_offset(col, dout_strides[2]), mask=live, other=0.0, eviction_policy="evict_last")
            g = load_affine(g.to(COMPUTE), weight, None, col, live, OFFSET)
            v = tl.load(x_at + axis_offset(col, x_strides[2]), mask=live, other=0.0, eviction_policy="evict_last")
            v = v.to(COMPUTE)
            if CENTRED:
                g_total += g
            total += g * ((v - centre) * scale)
    count = n.to(COMPUTE)
    projection = projection_of(tl.sum(total, 0), count, statistic, eps, LENGTH)
    g_mean = tl.zeros((), COMPUTE)
    if CENTRED:
        g_mean = tl.sum(g_total, 0) / count
    steps = tl.cdiv(n, BLOCK * UNROLL)
    for step in range(steps):
        loaded = ()
        for u in tl.static_range(UNROLL):
            col = ((steps - 1 - step) * UNROLL + u) * BLOCK + tl.arange(0, BLOCK)
            live = col < n
            g = tl.load(
                dout_at + axis_offset(col, dout_strides[2]), mask=live, other=0.0, eviction_policy="evict_first"
            )
            v = tl.load(x_at + axis_offset(col, x_strides[2]), mask=live, other=0.0, eviction_policy="evict_first")
            loaded = loaded + (g, v)
        for u in tl.static_range(UNROLL):
            col = ((steps - 1 - step) * UNROLL + u) * BLOCK + tl.arange(0, BLOCK)
            live = col < n
            g = load_affine(loaded[2 * u].to(COMPUTE), weight, None, col, live, OFFSET)
            v = loaded[2 * u + 1].to(COMPUTE)
            store_gradient(
                g, (v - centre) * scale, to, dx, dbranch, dsummed, dx_strides, dbranch_strides, dsummed_strides, sizes,
                outer, lane, col, live, g_mean, scale, projection, CENTRED, COMPUTE,
            )  # fmt: skip
