"""rms_norm, layer_norm, l2_norm and their backward, entry ``looped``, where neighbouring rows are adjacent in memory.

A program walks along ROWS rows at once, so that each sector of memory is moved once a pass; an operand whose rows are
contiguous is exchanged between threads. CENTRED, LENGTH, formulas and operands: see ``shared_kernels``; strides and
``blocks``: see ``common/rows_kernels``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import axis_offset, group_lanes, row_pointers
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
def _statistics(
    at,
    strides,
    residual_at,
    residual_strides,
    inside,
    n,
    centre,
    CENTRED: tl.constexpr,
    FIND_CENTRE: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(centre, mean - centre, sum of squares about the mean, sum of squares about ``centre``): [ROWS, 1] each, as
    ``looped_kernels.statistics`` has them of one row."""
    total = tl.zeros((ROWS, BLOCK), COMPUTE)
    squares = tl.zeros((ROWS, BLOCK), COMPUTE)
    for first in range(0, n, BLOCK):
        col = first + tl.arange(0, BLOCK)[None, :]
        live = inside & (col < n)
        v = load_input(at, strides, residual_at, residual_strides, col, live, COMPUTE, "evict_last").to(COMPUTE)
        if FIND_CENTRE:
            if first == 0:
                centre = tl.sum(v, 1, keep_dims=True) / tl.minimum(n, BLOCK).to(COMPUTE)
        if CENTRED:
            v = tl.where(live, v - centre, 0.0)
            total += v
        squares += v * v
    correction = centre
    if CENTRED:
        total, about_centre = two_sums(total, squares, 1, True)
        correction = total / n.to(COMPUTE)
        about_mean = about_centre - total * correction
    else:
        about_centre = tl.sum(squares, 1, keep_dims=True)
        about_mean = about_centre
    return centre, correction, about_mean, about_centre


@jit
def norm_crossed_kernel(
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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = (x - mean) * scale * (weight + OFFSET) + bias along each row; the mean is 0 without CENTRED.

    x, out, residual, summed: [outer, lanes, n]; mean, rstd: [rows]; weight, bias: [n]. Each row is read twice, and once
    more if it begins unlike the rest of it, or a neighbour does (see ``norm_looped_kernel``).
    """
    outer, lane = group_lanes(tl.program_id(0), blocks, lanes, sizes, ROWS)
    inside = lane < lanes
    at = row_pointers(x, x_strides, outer, sizes, lane)
    to = row_pointers(out, out_strides, outer, sizes, lane)
    residual_at = optional_row_pointers(residual, residual_strides, outer, sizes, lane)
    row = outer.to(tl.int64) * lanes + lane
    centre = tl.zeros((ROWS, 1), COMPUTE)
    centre, correction, squares, about_centre = _statistics(
        at, x_strides, residual_at, residual_strides, inside, n, centre, CENTRED, CENTRED, COMPUTE, ROWS, BLOCK
    )
    if CENTRED:
        if tl.max((about_centre > 4.0 * squares).to(tl.int32)) > 0:
            centre, correction, squares, about_centre = _statistics(
                at, x_strides, residual_at, residual_strides, inside, n, centre + correction, CENTRED, False, COMPUTE,
                ROWS, BLOCK,
            )  # fmt: skip
        squares = tl.where(squares < 0, 0.0, squares)
        tl.store(mean + row, centre + correction, mask=inside)
    statistic, scale = statistic_and_scale(squares, 1.0 / n.to(COMPUTE), eps, LENGTH)
    tl.store(rstd + row, statistic, mask=inside)
    steps = tl.cdiv(n, BLOCK)
    for step in range(steps):
        col = (steps - 1 - step) * BLOCK + tl.arange(0, BLOCK)[None, :]
        live = inside & (col < n)
        v = load_input(at, x_strides, residual_at, residual_strides, col, live, COMPUTE, "evict_first")
        store_output(
            v.to(COMPUTE), to, out, summed, weight, bias, out_strides, summed_strides, sizes, outer, lane, col, live,
            col < n, centre, correction, scale, CENTRED, OFFSET,
        )  # fmt: skip


@jit
def norm_backward_crossed_kernel(
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
    blocks,
    eps,
    CENTRED: tl.constexpr,
    LENGTH: tl.constexpr,
    OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx = (g - hat * mean(g * hat) - mean(g)) * scale + dsummed along each row, as in ``shared_kernels``.

    dout, x, dx, dsummed: [outer, lanes, n]; mean, rstd: [rows]; weight: [n].
    """
    outer, lane = group_lanes(tl.program_id(0), blocks, lanes, sizes, ROWS)
    inside = lane < lanes
    dout_at = row_pointers(dout, dout_strides, outer, sizes, lane)
    x_at = row_pointers(x, x_strides, outer, sizes, lane)
    to = row_pointers(dx, dx_strides, outer, sizes, lane)
    row = outer.to(tl.int64) * lanes + lane
    statistic = tl.load(rstd + row, mask=inside, other=1.0)
    scale = scale_of_statistic(statistic, eps, LENGTH)
    centre = tl.zeros((ROWS, 1), COMPUTE)
    if CENTRED:
        centre = tl.load(mean + row, mask=inside, other=0.0)
    g_total = tl.zeros((ROWS, BLOCK), COMPUTE)
    total = tl.zeros((ROWS, BLOCK), COMPUTE)
    for first in range(0, n, BLOCK):
        col = first + tl.arange(0, BLOCK)[None, :]
        live = inside & (col < n)
        g = tl.load(dout_at + axis_offset(col, dout_strides[2]), mask=live, other=0.0, eviction_policy="evict_last")
        g = load_affine(g.to(COMPUTE), weight, None, col, live, OFFSET)
        v = tl.load(x_at + axis_offset(col, x_strides[2]), mask=live, other=0.0, eviction_policy="evict_last")
        if CENTRED:
            g_total += g
        total += g * ((v.to(COMPUTE) - centre) * scale)
    count = n.to(COMPUTE)
    g_mean = tl.zeros((ROWS, 1), COMPUTE)
    if CENTRED:
        g_sum, sums = two_sums(g_total, total, 1, True)
        g_mean = g_sum / count
    else:
        sums = tl.sum(total, 1, keep_dims=True)
    projection = projection_of(sums, count, statistic, eps, LENGTH)
    steps = tl.cdiv(n, BLOCK)
    for step in range(steps):
        col = (steps - 1 - step) * BLOCK + tl.arange(0, BLOCK)[None, :]
        live = inside & (col < n)
        g = tl.load(dout_at + axis_offset(col, dout_strides[2]), mask=live, other=0.0, eviction_policy="evict_first")
        g = load_affine(g.to(COMPUTE), weight, None, col, live, OFFSET)
        v = tl.load(x_at + axis_offset(col, x_strides[2]), mask=live, other=0.0, eviction_policy="evict_first")
        store_gradient(
            g, (v.to(COMPUTE) - centre) * scale, to, dx, dbranch, dsummed, dx_strides, dbranch_strides, dsummed_strides,
            sizes, outer, lane, col, live, g_mean, scale, projection, CENTRED, COMPUTE,
        )  # fmt: skip
