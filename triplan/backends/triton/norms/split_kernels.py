"""rms_norm, layer_norm, l2_norm and their backward, entry ``split``: each row divided among programs.

CENTRED, LENGTH, formulas and operands: see ``shared_kernels``; strides: see ``common/rows_kernels``.

Two launches: the first reduces each block of a row, the ``finish`` kernel merges the partial results of the row and
writes a block of the output. Every program merges them in the same order, so all get the same bits. Where neighbouring
rows are adjacent in an operand, a program has a block of ROWS neighbours: it moves whole sectors, and turns the tile
between its threads. ``groups``: groups of ROWS lanes at one outer point. The first launch of the backward is
``norm_parameters_kernel``, which reads both operands anyway. The forward's first launch loads with ``evict_last``, to
keep the rows in the cache for the second, which loads with ``evict_first``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.common.rows_kernels import element_pointers, group_lanes, row_pointers
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
def lone(v, ROWS: tl.constexpr):
    """``v`` [ROWS, 1]; a scalar if there is one row. The compiler would pass it to the row's threads through shared
    memory, once for each element."""
    if ROWS == 1:
        v = tl.sum(tl.sum(v, 1), 0)
    return v


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
    groups,
    CENTRED: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """squares = sum(x^2) of one block of ROWS rows; with CENTRED, of x - mean(x), and mean(x) = centres + rests.

    x, residual: [outer, lanes, n]; centres, rests, squares: [rows, blocks] of COMPUTE.

    ``rests`` are corrections of the means ``centres``, as ``shared_kernels`` describes.
    """
    begin(OVERLAPS)
    block = tl.program_id(0) % blocks
    outer, lane = group_lanes((tl.program_id(0) // blocks).to(tl.int64), groups, lanes, sizes, ROWS)
    inside = lane < lanes
    col = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = inside & (col < n)
    at = row_pointers(x, x_strides, outer, sizes, lane)
    residual_at = optional_row_pointers(residual, residual_strides, outer, sizes, lane)
    v = load_input(at, x_strides, residual_at, residual_strides, col, live, COMPUTE, "evict_last").to(COMPUTE)
    part = (outer * lanes + lane) * blocks + block
    if CENTRED:
        count = block_length(block, n, BLOCK).to(COMPUTE)
        centre = tl.sum(v, 1, keep_dims=True) / count
        v = tl.where(live, v - centre, 0.0)
        correction, total = two_sums(v, v * v, 1, True)
        correction = correction / count
        total -= correction * correction * count
        total = tl.where(total < 0, 0.0, total)
        tl.store(centres + part, centre, mask=inside)
        tl.store(rests + part, correction, mask=inside)
    else:
        total = tl.sum(v * v, 1, keep_dims=True)
    tl.store(squares + part, total, mask=inside)


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
    pieces,
    groups,
    eps,
    CENTRED: tl.constexpr,
    LENGTH: tl.constexpr,
    OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out = (x - mean) * scale * (weight + OFFSET) + bias for one of ``pieces`` blocks of ROWS rows.

    x, out, residual, summed: [outer, lanes, n]; mean, rstd: [rows]; weight, bias: [n]; centres, rests, squares:
    [rows, blocks] of COMPUTE, of blocks of PART elements; BLOCKS >= blocks.

    Squares about the means of blocks are moved to the row's mean by Chan, Golub and LeVeque, equation 2.1. The first
    program of a row also stores its statistics.
    """
    begin(OVERLAPS)
    outer, lane = group_lanes((tl.program_id(0) // pieces).to(tl.int64), groups, lanes, sizes, ROWS)
    inside = lane < lanes
    row = outer * lanes + lane
    piece = tl.program_id(0) % pieces
    part = tl.arange(0, BLOCKS)[None, :]
    known = inside & (part < blocks)
    first = row * blocks
    part_squares = tl.load(squares + first + part, mask=known, other=0.0)
    count = n.to(COMPUTE)
    centre = tl.zeros((ROWS, 1), COMPUTE)
    correction = tl.zeros((ROWS, 1), COMPUTE)
    if CENTRED:
        part_counts = tl.where(known, block_length(part, n, PART), 0).to(COMPUTE)
        part_centres = tl.load(centres + first + part, mask=known, other=0.0)
        # Do not write sum(part_centres * part_counts): ptxas would contract a different product into an FMA in each
        # thread, so that their means would differ by a rounding of the mean's size.
        last = tl.sum(tl.where(part == blocks - 1, part_centres, 0.0), 1, keep_dims=True)
        others = tl.sum(tl.where(part < blocks - 1, part_centres, 0.0), 1, keep_dims=True)
        centre = (others * PART + last * block_length(blocks - 1, n, PART).to(COMPUTE)) / count
        off = tl.where(known, (part_centres - centre) + tl.load(rests + first + part, mask=known, other=0.0), 0.0)
        rest, total = two_sums(part_counts * off, part_squares + part_counts * off * off, 1, True)
        correction = rest / count
        total -= rest * correction
        total = tl.where(total < 0, 0.0, total)
    else:
        total = tl.sum(part_squares, 1, keep_dims=True)
    statistic, scale = statistic_and_scale(total, 1.0 / count, eps, LENGTH)
    if piece == 0:
        tl.store(rstd + row, statistic, mask=inside)
        if CENTRED:
            tl.store(mean + row, centre + correction, mask=inside)
    col = piece * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = inside & (col < n)
    at = row_pointers(x, x_strides, outer, sizes, lane)
    residual_at = optional_row_pointers(residual, residual_strides, outer, sizes, lane)
    v = load_input(at, x_strides, residual_at, residual_strides, col, live, COMPUTE, "evict_first").to(COMPUTE)
    to = row_pointers(out, out_strides, outer, sizes, lane)
    store_output(
        v, to, out, summed, weight, bias, out_strides, summed_strides, sizes, outer, lane, col, live, col < n,
        lone(centre, ROWS), lone(correction, ROWS), lone(scale, ROWS), CENTRED, OFFSET,
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
    blocks,
    pieces,
    groups,
    eps,
    CENTRED: tl.constexpr,
    LENGTH: tl.constexpr,
    OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """dx = (g - hat * mean(g * hat) - mean(g)) * scale + dsummed for one of ``pieces`` blocks of ROWS rows.

    dout, x, dx, dsummed: [outer, lanes, n]; mean, rstd: [rows]; weight: [n]; totals, projections: sums of g and of
    g * hat, [rows, blocks] of COMPUTE; BLOCKS >= blocks. See ``shared_kernels`` for the formula.
    """
    begin(OVERLAPS)
    outer, lane = group_lanes((tl.program_id(0) // pieces).to(tl.int64), groups, lanes, sizes, ROWS)
    inside = lane < lanes
    row = outer * lanes + lane
    part = tl.arange(0, BLOCKS)[None, :]
    known = inside & (part < blocks)
    statistic = tl.load(rstd + row, mask=inside, other=1.0)
    scale = scale_of_statistic(statistic, eps, LENGTH)
    count = n.to(COMPUTE)
    total = tl.sum(tl.load(projections + row * blocks + part, mask=known, other=0.0), 1, keep_dims=True)
    projection = projection_of(total, count, statistic, eps, LENGTH)
    col = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = inside & (col < n)
    dout_at = element_pointers(dout, dout_strides, outer, sizes, lane, col)
    x_at = element_pointers(x, x_strides, outer, sizes, lane, col)
    g = tl.load(dout_at, mask=live, other=0.0, eviction_policy="evict_first").to(COMPUTE)
    g = load_affine(g, weight, None, col, col < n, OFFSET)
    v = tl.load(x_at, mask=live, other=0.0, eviction_policy="evict_first").to(COMPUTE)
    centre = tl.zeros((ROWS, 1), COMPUTE)
    g_mean = tl.zeros((ROWS, 1), COMPUTE)
    if CENTRED:
        centre = tl.load(mean + row, mask=inside, other=0.0)
        g_mean = tl.sum(tl.load(totals + row * blocks + part, mask=known, other=0.0), 1, keep_dims=True) / count
    to = row_pointers(dx, dx_strides, outer, sizes, lane)
    scale = lone(scale, ROWS)
    g_mean = lone(g_mean, ROWS)
    projection = lone(projection, ROWS)
    hat = (v - lone(centre, ROWS)) * scale
    store_gradient(
        g, hat, to, dx, dbranch, dsummed, dx_strides, dbranch_strides, dsummed_strides, sizes, outer, lane, col, live,
        g_mean, scale, projection, CENTRED, COMPUTE,
    )  # fmt: skip
