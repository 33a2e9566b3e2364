"""rms_norm, layer_norm, l2_norm and their backward, entry ``split``: each row divided among programs.

CENTRED, LENGTH, formulas and operands: see ``shared_kernels``; strides: see ``common/rows_kernels``.

Two launches: the first reduces each block of a row, the ``finish`` kernel merges the partial results of the row and
writes a block of the output. Every program merges them in the same order, so all get the same bits. Where neighbouring
rows are adjacent in an operand, a program has a block of ROWS neighbours: it moves whole sectors, and turns the tile
between its threads. If each of these programs would merge many results, a ``merge`` kernel does so between the two
launches, once for each row. ``groups``: groups of ROWS lanes at one outer point. The first launch of the backward is
``norm_parameters_kernel``, which reads both operands anyway. The forward's first launch loads with ``evict_last``, to
keep the rows in the cache for the second, which loads with ``evict_first``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.common.rows_kernels import element_pointers, group_lanes, outer_and_lane, row_pointers
from triplan.backends.triton.norms.shared_kernels import (
    load_affine,
    load_input,
    optional_row_pointers,
    projection_of,
    scale_of_statistic,
    squares_about_mean,
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
def placed(group, block, groups, lanes, sizes, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(outer point, lanes, columns) of block number ``block`` of group number ``group`` of ROWS lanes: [ROWS, 1] and
    [1, BLOCK]; of one row a scalar and [BLOCK]: the compiler would pass what it holds of a row through shared memory.
    """
    col = block * BLOCK + tl.arange(0, BLOCK)
    if ROWS == 1:
        outer, lane = outer_and_lane(group.to(tl.int64), sizes, lanes)
    else:
        outer, lane = group_lanes(group.to(tl.int64), groups, lanes, sizes, ROWS)
        col = col[None, :]
    return outer, lane, col


@jit
def row_number(outer, lane, lanes, sizes):
    """The number of each row, as ``outer_and_lane`` divides it."""
    row = lane.to(tl.int64)
    if sizes is not None:
        row = outer * lanes + lane
    return row


@jit
def existing(lane, lanes, ROWS: tl.constexpr):
    """Which of the rows there are; None for one row, which is there."""
    inside = None
    if ROWS > 1:
        inside = lane < lanes
    return inside


@jit
def of_existing(inside, live):
    """``live`` where rows there are."""
    if inside is not None:
        live = inside & live
    return live


@jit
def parts_of_row(BLOCKS: tl.constexpr, ROWS: tl.constexpr):
    """Numbers of the partial results of each row: [BLOCKS], or of several rows [1, BLOCKS]."""
    part = tl.arange(0, BLOCKS)
    if ROWS > 1:
        part = part[None, :]
    return part


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
    ALONG: tl.constexpr = 1 if ROWS > 1 else 0  # the axis of a row's elements
    begin(OVERLAPS)
    block = tl.program_id(0) % blocks
    outer, lane, col = placed(tl.program_id(0) // blocks, block, groups, lanes, sizes, ROWS, BLOCK)
    inside = existing(lane, lanes, ROWS)
    live = of_existing(inside, col < n)
    at = row_pointers(x, x_strides, outer, sizes, lane)
    residual_at = optional_row_pointers(residual, residual_strides, outer, sizes, lane)
    v = load_input(at, x_strides, residual_at, residual_strides, col, live, COMPUTE, "evict_last").to(COMPUTE)
    part = row_number(outer, lane, lanes, sizes) * blocks + block
    if CENTRED:
        count = block_length(block, n, BLOCK).to(COMPUTE)
        centre = tl.sum(v, ALONG, keep_dims=ROWS > 1) / count
        v = tl.where(live, v - centre, 0.0)
        correction, total = two_sums(v, v * v, ALONG, ROWS > 1)
        correction = correction / count
        total = squares_about_mean(total, correction, count)
        tl.store(centres + part, centre, mask=inside)
        tl.store(rests + part, correction, mask=inside)
    else:
        total = tl.sum(v * v, ALONG, keep_dims=ROWS > 1)
    tl.store(squares + part, total, mask=inside)


@jit
def merged_parts(
    squares, centres, rests, first, part, known, n, blocks, CENTRED, COMPUTE, PART: tl.constexpr, ALONG, KEEPS
):  # fmt: skip
    """(sum of squares, mean, correction of the mean) of rows of ``blocks`` blocks of PART elements.

    squares, centres, rests: of ``norm_partial_kernel``; those of a row are at ``first`` + ``part`` where ``known``,
    along the axis ALONG, which stays if KEEPS. Squares about the means of blocks are moved to the row's mean by Chan,
    Golub and LeVeque, equation 2.1.
    """
    part_squares = tl.load(squares + first + part, mask=known, other=0.0)
    count = n.to(COMPUTE)
    centre = tl.zeros((), COMPUTE)
    correction = tl.zeros((), COMPUTE)
    if CENTRED:
        part_counts = tl.where(known, block_length(part, n, PART), 0).to(COMPUTE)
        part_centres = tl.load(centres + first + part, mask=known, other=0.0)
        # Do not write sum(part_centres * part_counts): ptxas would contract a different product into an FMA in each
        # thread, so that their means would differ by a rounding of the mean's size.
        last = tl.sum(tl.where(part == blocks - 1, part_centres, 0.0), ALONG, keep_dims=KEEPS)
        others = tl.sum(tl.where(part < blocks - 1, part_centres, 0.0), ALONG, keep_dims=KEEPS)
        centre = (others * PART + last * block_length(blocks - 1, n, PART).to(COMPUTE)) / count
        off = tl.where(known, (part_centres - centre) + tl.load(rests + first + part, mask=known, other=0.0), 0.0)
        rest, total = two_sums(part_counts * off, part_squares + part_counts * off * off, ALONG, KEEPS)
        correction = rest / count
        total -= rest * correction
        total = tl.where(total < 0, 0.0, total)
    else:
        total = tl.sum(part_squares, ALONG, keep_dims=KEEPS)
    return total, centre, correction


@jit
def norm_merge_kernel(
    squares,
    centres,
    rests,
    row_squares,
    row_centres,
    row_rests,
    n,
    blocks,
    CENTRED: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """row_squares = sum(x^2) of one row; with CENTRED, of x - mean(x), and mean(x) = row_centres + row_rests.

    squares, centres, rests: of its blocks, [rows, blocks] of COMPUTE (see ``merged_parts``); row_squares, row_centres,
    row_rests: [rows]; BLOCK >= blocks.
    """
    begin(OVERLAPS)
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    total, centre, correction = merged_parts(
        squares, centres, rests, row * blocks, part, part < blocks, n, blocks, CENTRED, COMPUTE, PART, 0, False
    )
    tl.store(row_squares + row, total)
    if CENTRED:
        tl.store(row_centres + row, centre)
        tl.store(row_rests + row, correction)


@jit
def norm_backward_merge_kernel(
    totals,
    projections,
    row_totals,
    row_projections,
    blocks,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """row_projections = sum(projections) and, with CENTRED, row_totals = sum(totals) of one row.

    projections, totals: [rows, blocks] of COMPUTE; row_projections, row_totals: [rows]; BLOCK >= blocks.
    """
    begin(OVERLAPS)
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, known = row * blocks + part, part < blocks
    tl.store(row_projections + row, tl.sum(tl.load(projections + at, mask=known, other=0.0), 0))
    if CENTRED:
        tl.store(row_totals + row, tl.sum(tl.load(totals + at, mask=known, other=0.0), 0))


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

    The first program of a row also stores its statistics.
    """
    ALONG: tl.constexpr = 1 if ROWS > 1 else 0  # the axis of a row's elements
    begin(OVERLAPS)
    piece = tl.program_id(0) % pieces
    outer, lane, col = placed(tl.program_id(0) // pieces, piece, groups, lanes, sizes, ROWS, BLOCK)
    inside = existing(lane, lanes, ROWS)
    live = of_existing(inside, col < n)
    part = parts_of_row(BLOCKS, ROWS)
    known = of_existing(inside, part < blocks)
    row = row_number(outer, lane, lanes, sizes)
    first, count = row * blocks, n.to(COMPUTE)
    total, centre, correction = merged_parts(
        squares, centres, rests, first, part, known, n, blocks, CENTRED, COMPUTE, PART, ALONG, ROWS > 1
    )
    statistic, scale = statistic_and_scale(total, 1.0 / count, eps, LENGTH)
    if ROWS > 1:  # (Triton 3.6 fails to compile the branch for some of f64)
        inside = inside & (piece == 0)
        tl.store(rstd + row, statistic, mask=inside)
        if CENTRED:
            tl.store(mean + row, centre + correction, mask=inside)
    elif piece == 0:
        tl.store(rstd + row, statistic)
        if CENTRED:
            tl.store(mean + row, centre + correction)
    at = row_pointers(x, x_strides, outer, sizes, lane)
    residual_at = optional_row_pointers(residual, residual_strides, outer, sizes, lane)
    v = load_input(at, x_strides, residual_at, residual_strides, col, live, COMPUTE, "evict_first").to(COMPUTE)
    to = row_pointers(out, out_strides, outer, sizes, lane)
    store_output(
        v, to, out, summed, weight, bias, out_strides, summed_strides, sizes, outer, lane, col, live, col < n,
        centre, correction, scale, CENTRED, OFFSET,
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
    ALONG: tl.constexpr = 1 if ROWS > 1 else 0  # the axis of a row's elements
    begin(OVERLAPS)
    outer, lane, col = placed(tl.program_id(0) // pieces, tl.program_id(0) % pieces, groups, lanes, sizes, ROWS, BLOCK)
    inside = existing(lane, lanes, ROWS)
    live = of_existing(inside, col < n)
    part = parts_of_row(BLOCKS, ROWS)
    known = of_existing(inside, part < blocks)
    row = row_number(outer, lane, lanes, sizes)
    statistic = tl.load(rstd + row, mask=inside)
    scale = scale_of_statistic(statistic, eps, LENGTH)
    count = n.to(COMPUTE)
    total = tl.sum(tl.load(projections + row * blocks + part, mask=known, other=0.0), ALONG, keep_dims=ROWS > 1)
    projection = projection_of(total, count, statistic, eps, LENGTH)
    dout_at = element_pointers(dout, dout_strides, outer, sizes, lane, col)
    x_at = element_pointers(x, x_strides, outer, sizes, lane, col)
    g = tl.load(dout_at, mask=live, other=0.0, eviction_policy="evict_first").to(COMPUTE)
    g = load_affine(g, weight, None, col, col < n, OFFSET)
    v = tl.load(x_at, mask=live, other=0.0, eviction_policy="evict_first").to(COMPUTE)
    centre = tl.zeros((), COMPUTE)
    g_mean = tl.zeros((), COMPUTE)
    if CENTRED:
        centre = tl.load(mean + row, mask=inside)
        g_mean = tl.sum(tl.load(totals + row * blocks + part, mask=known, other=0.0), ALONG, keep_dims=ROWS > 1) / count
    to = row_pointers(dx, dx_strides, outer, sizes, lane)
    store_gradient(
        g, (v - centre) * scale, to, dx, dbranch, dsummed, dx_strides, dbranch_strides, dsummed_strides, sizes, outer,
        lane, col, live, g_mean, scale, projection, CENTRED, COMPUTE,
    )  # fmt: skip
