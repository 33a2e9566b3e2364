"""rms_norm, layer_norm, l2_norm and their backward, entry ``split``: each row divided among programs.

CENTRED, LENGTH, formulas and operands: see ``shared_kernels``; strides: see ``common/rows_kernels``.

Two launches: the first reduces each block of a row, the ``finish`` kernel merges the partial results of the row and
writes a block of the output. Every program merges them in the same order, so all get the same bits. The first launch of
the backward is ``norm_parameters_kernel``, which reads both operands anyway. The forward's first launch loads with
``evict_last``, to keep the rows in the cache for the second, which loads with ``evict_first``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.common.rows_kernels import element_pointers, outer_and_lane, row_pointers
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
def block_length(block, n, BLOCK: tl.constexpr):
    """How many of a row's ``n`` elements block number ``block`` has: BLOCK, except at the row's end."""
    return tl.minimum(tl.maximum(n - block * BLOCK, 0), BLOCK)


@jit
def norm_partial_kernel(
    x,
    residual,
    centres,
    rests,
    squares,
    x_strides,
    residual_strides,
    sizes,
    lanes,
    n,
    blocks,
    CENTRED: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """squares = sum(x^2) of one block of one row; with CENTRED, of x - mean(x), and mean(x) = centres + rests.

    x, residual: [outer, lanes, n]; centres, rests, squares: [rows, blocks] of COMPUTE.

    ``rests`` are corrections of the means ``centres``, as ``shared_kernels`` describes.
    """
    begin(OVERLAPS)
    outer, lane = outer_and_lane((tl.program_id(0) // blocks).to(tl.int64), sizes, lanes)
    block = tl.program_id(0) % blocks
    col = block * BLOCK + tl.arange(0, BLOCK)
    live = col < n
    at = row_pointers(x, x_strides, outer, sizes, lane)
    residual_at = optional_row_pointers(residual, residual_strides, outer, sizes, lane)
    v = load_input(at, x_strides, residual_at, residual_strides, col, live, COMPUTE, "evict_last").to(COMPUTE)
    if CENTRED:
        count = block_length(block, n, BLOCK).to(COMPUTE)
        centre = tl.sum(v, 0) / count
        v = tl.where(live, v - centre, 0.0)
        correction, total = two_sums(v, v * v, 0, False)
        correction = correction / count
        total -= correction * correction * count
        total = tl.where(total < 0, 0.0, total)
        tl.store(centres + tl.program_id(0), centre)
        tl.store(rests + tl.program_id(0), correction)
    else:
        total = tl.sum(v * v, 0)
    tl.store(squares + tl.program_id(0), total)


@jit
def norm_finish_kernel(
    x,
    out,
    mean,
    rstd,
    weight,
    bias,
    residual,
    summed,
    centres,
    rests,
    squares,
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
    BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out = (x - mean) * scale * (weight + OFFSET) + bias for one block of one row.

    x, out, residual, summed: [outer, lanes, n]; mean, rstd: [rows]; weight, bias: [n]; centres, rests, squares:
    [rows, blocks] of COMPUTE; BLOCKS >= blocks.

    Squares about the means of blocks are moved to the row's mean by Chan, Golub and LeVeque, equation 2.1. The first
    program of a row also stores its statistics.
    """
    begin(OVERLAPS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    outer, lane = outer_and_lane(row, sizes, lanes)
    block = tl.program_id(0) % blocks
    part = tl.arange(0, BLOCKS)
    known = part < blocks
    first = row * blocks
    part_squares = tl.load(squares + first + part, mask=known, other=0.0)
    count = n.to(COMPUTE)
    centre = tl.zeros((), COMPUTE)
    correction = tl.zeros((), COMPUTE)
    if CENTRED:
        part_counts = tl.where(known, block_length(part, n, BLOCK), 0).to(COMPUTE)
        part_centres = tl.load(centres + first + part, mask=known, other=0.0)
        # Do not write sum(part_centres * part_counts): ptxas would contract a different product into an FMA in each
        # thread, so that their means would differ by a rounding of the mean's size.
        last = tl.sum(tl.where(part == blocks - 1, part_centres, 0.0), 0)
        others = tl.sum(tl.where(part < blocks - 1, part_centres, 0.0), 0)
        centre = (others * BLOCK + last * block_length(blocks - 1, n, BLOCK).to(COMPUTE)) / count
        off = tl.where(known, (part_centres - centre) + tl.load(rests + first + part, mask=known, other=0.0), 0.0)
        rest, total = two_sums(part_counts * off, part_squares + part_counts * off * off, 0, False)
        correction = rest / count
        total -= rest * correction
        total = tl.where(total < 0, 0.0, total)
    else:
        total = tl.sum(part_squares, 0)
    statistic, scale = statistic_and_scale(total, 1.0 / count, eps, LENGTH)
    if block == 0:
        tl.store(rstd + row, statistic)
        if CENTRED:
            tl.store(mean + row, centre + correction)
    col = block * BLOCK + tl.arange(0, BLOCK)
    live = col < n
    at = row_pointers(x, x_strides, outer, sizes, lane)
    residual_at = optional_row_pointers(residual, residual_strides, outer, sizes, lane)
    v = load_input(at, x_strides, residual_at, residual_strides, col, live, COMPUTE, "evict_first").to(COMPUTE)
    to = row_pointers(out, out_strides, outer, sizes, lane)
    store_output(
        v, to, out, summed, weight, bias, out_strides, summed_strides, sizes, outer, lane, col, live, centre,
        correction, scale, CENTRED, OFFSET,
    )  # fmt: skip


@jit
def norm_backward_finish_kernel(
    dout,
    x,
    mean,
    rstd,
    dx,
    weight,
    dsummed,
    dbranch,
    totals,
    projections,
    dout_strides,
    x_strides,
    dx_strides,
    dsummed_strides,
    dbranch_strides,
    sizes,
    lanes,
    n,
    pieces,
    blocks,
    eps,
    CENTRED: tl.constexpr,
    LENGTH: tl.constexpr,
    OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """dx = (g - hat * mean(g * hat) - mean(g)) * scale + dsummed for one of ``pieces`` blocks of a row.

    dout, x, dx, dsummed: [outer, lanes, n]; mean, rstd: [rows]; weight: [n]; totals, projections: sums of g and of
    g * hat, [rows, blocks] of COMPUTE; BLOCKS >= blocks. See ``shared_kernels`` for the formula.
    """
    begin(OVERLAPS)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    outer, lane = outer_and_lane(row, sizes, lanes)
    part = tl.arange(0, BLOCKS)
    known = part < blocks
    statistic = tl.load(rstd + row)
    scale = scale_of_statistic(statistic, eps, LENGTH)
    count = n.to(COMPUTE)
    total = tl.sum(tl.load(projections + row * blocks + part, mask=known, other=0.0), 0)
    projection = projection_of(total, count, statistic, eps, LENGTH)
    col = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)
    live = col < n
    dout_at = element_pointers(dout, dout_strides, outer, sizes, lane, col)
    x_at = element_pointers(x, x_strides, outer, sizes, lane, col)
    g = tl.load(dout_at, mask=live, other=0.0, eviction_policy="evict_first").to(COMPUTE)
    g = load_affine(g, weight, None, col, live, OFFSET)
    v = tl.load(x_at, mask=live, other=0.0, eviction_policy="evict_first").to(COMPUTE)
    centre = tl.zeros((), COMPUTE)
    g_mean = tl.zeros((), COMPUTE)
    if CENTRED:
        centre = tl.load(mean + row)
        g_mean = tl.sum(tl.load(totals + row * blocks + part, mask=known, other=0.0), 0) / count
    to = row_pointers(dx, dx_strides, outer, sizes, lane)
    store_gradient(
        g, (v - centre) * scale, to, dx, dbranch, dsummed, dx_strides, dbranch_strides, dsummed_strides, sizes, outer,
        lane, col, live, g_mean, scale, projection, CENTRED, COMPUTE,
    )  # fmt: skip
