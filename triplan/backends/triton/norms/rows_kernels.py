"""rms_norm, layer_norm, l2_norm and their backward, entry ``rows``: whole rows in registers.

CENTRED, LENGTH, formulas and operands: see ``shared_kernels``; strides and ``blocks``: see ``common/rows_kernels``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import (
    axis_offset,
    converted_pieces,
    element_pointers,
    group_start,
    live_pieces,
    load_pieces,
    load_rows,
    outer_and_lane_of,
    row_pointers,
)
from triplan.backends.triton.norms.shared_kernels import (
    affine,
    load_affine,
    load_input,
    load_parameter,
    optional_row_pointers,
    projection_of,
    scale_of_statistic,
    squares_about_mean,
    statistic_and_scale,
    store_gradient,
    sums_of,
    two_sums,
)


@jit
def truncated(v):
    """``v`` of f32, truncated to the 14 leading bits of its significand: products with counts up to 1,024 are exact."""
    return (v.to(tl.int32, bitcast=True) & -1024).to(tl.float32, bitcast=True)


@jit
def norm_rows_kernel(
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
    FULL: tl.constexpr,
    ABREAST: tl.constexpr,
    ADDS_UP: tl.constexpr,
):
    """out = (x - mean) * scale * (weight + OFFSET) + bias along each row; the mean is 0 without CENTRED.

    x, out, residual, summed: [outer, lanes, n]; mean, rstd: [rows]; weight, bias: [n]. A program holds a tile
    [ABREAST, ROWS / ABREAST, BLOCK] in COMPUTE, BLOCK >= n; FULL: BLOCK == n.

    Each element is read once and written once. All threads together hold ABREAST rows at a time, one vector each, and
    each thread loads its own elements of weight and bias, once for all of its rows. (Loaded by fewer threads, as for
    one row, they would pass through shared memory.) With ADDS_UP, which is for 16-bit elements, the sum of a row is
    exact unless some elements are far smaller than others: the correction of the mean then follows from that sum,
    without another reduction. Results are stored before the statistics, because threads synchronize to store these.
    """
    outer, first = group_start(tl.program_id(0), blocks, lanes, sizes, ROWS)
    lane = first + tl.arange(0, ABREAST)[:, None, None] + tl.arange(0, ROWS // ABREAST)[None, :, None] * ABREAST
    col = tl.arange(0, BLOCK)[None, None, :]
    inside = lane < lanes
    live = inside & (col < n)
    if FULL:
        live = inside
    residual_at = optional_row_pointers(residual, residual_strides, outer, sizes, lane)
    at = row_pointers(x, x_strides, outer, sizes, lane)
    v = load_input(at, x_strides, residual_at, residual_strides, col, live, COMPUTE, "").to(COMPUTE)
    parameter_col = tl.broadcast_to(col, (ABREAST, 1, BLOCK))
    if not CENTRED:  # with CENTRED, two sums leave no registers for parameters loaded this early
        w = load_parameter(weight, parameter_col, parameter_col < n)
        b = load_parameter(bias, parameter_col, parameter_col < n)
    if summed is not None:
        sums_to = element_pointers(summed, summed_strides, outer, sizes, lane, col)
        tl.store(sums_to, v.to(summed.dtype.element_ty), mask=live)
    count = n.to(COMPUTE)
    inverse_n = 1.0 / count  # one division, which takes many instructions
    row = outer.to(tl.int64) * lanes + lane
    if CENTRED:
        total = tl.sum(v, 2, keep_dims=True)
        centre = total * inverse_n
        if ADDS_UP:
            centre = truncated(centre)
        v = v - centre
        if not FULL:
            v = tl.where(live, v, 0.0)
        if ADDS_UP:
            correction = total - centre * count
            squares = tl.sum(v * v, 2, keep_dims=True)
        else:
            correction, squares = two_sums(v, v * v, 2, True)
        correction = correction * inverse_n
        squares = squares_about_mean(squares, correction, count)
    else:
        squares = tl.sum(v * v, 2, keep_dims=True)
    statistic, scale = statistic_and_scale(squares, inverse_n, eps, LENGTH)
    v = v * scale
    if CENTRED:
        v = v - correction * scale  # one FMA
        w = load_parameter(weight, parameter_col, parameter_col < n)
        b = load_parameter(bias, parameter_col, parameter_col < n)
    y = affine(v, w, b, OFFSET)
    to = element_pointers(out, out_strides, outer, sizes, lane, col)
    tl.store(to, y.to(out.dtype.element_ty), mask=live)
    tl.store(rstd + row, statistic, mask=inside)
    if CENTRED:
        tl.store(mean + row, centre + correction, mask=inside)


@jit
def norm_parted_kernel(
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
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """out = (x - mean) * scale * (weight + OFFSET) + bias along each row; the mean is 0 without CENTRED.

    x, out, residual, summed: [outer, lanes, n]; mean, rstd: [rows]; weight, bias: [n]. A program holds a row in COMPUTE
    as PIECES tiles [1, BLOCK], side by side, which cover n.

    Rows may begin anywhere. Weight and bias are loaded element by element as well: in vectors, of which the row's end
    divides one, threads would have to exchange them. They are loaded for TOGETHER pieces at a time, to take few
    registers: a load stays behind the stores before it, as the compiler does not know that these do not overlap, and so
    waits for memory.
    """
    outer, lane = group_start(tl.program_id(0), blocks, lanes, sizes, 1)
    col = tl.arange(0, BLOCK)[None, :]
    lives = live_pieces(lane < lanes, n, PIECES, BLOCK)
    residual_at = optional_row_pointers(residual, residual_strides, outer, sizes, lane)
    at = row_pointers(x, x_strides, outer, sizes, lane)
    v = ()
    for i in tl.static_range(PIECES):
        loaded = load_input(at, x_strides, residual_at, residual_strides, i * BLOCK + col, lives[i], COMPUTE, "")
        v = v + (loaded.to(COMPUTE),)
    count = n.to(COMPUTE)
    inverse_n = 1.0 / count
    centre = 0.0
    correction = 0.0
    deviations = v
    if CENTRED:
        total = v[0]
        for i in tl.static_range(1, PIECES):
            total += v[i]
        centre = tl.sum(total, 1, keep_dims=True) * inverse_n
        deviations = ()
        for i in tl.static_range(PIECES):
            d = v[i] - centre
            if i == PIECES - 1:
                d = tl.where(lives[i], d, 0.0)
            deviations = deviations + (d,)
    squares = deviations[0] * deviations[0]
    rests = deviations[0]
    for i in tl.static_range(1, PIECES):
        squares += deviations[i] * deviations[i]
        rests += deviations[i]
    if CENTRED:
        correction, squares = two_sums(rests, squares, 1, True)
        correction = correction * inverse_n
        squares = squares_about_mean(squares, correction, count)
    else:
        squares = tl.sum(squares, 1, keep_dims=True)
    statistic, scale = statistic_and_scale(squares, inverse_n, eps, LENGTH)
    to = row_pointers(out, out_strides, outer, sizes, lane)
    single = tl.max_contiguous(col, (1, 1))
    results = ()
    for i in tl.static_range(PIECES):
        if summed is not None:  # first: registers are few where pieces come one by one
            sums_to = element_pointers(summed, summed_strides, outer, sizes, lane, i * BLOCK + col)
            tl.store(sums_to, v[i].to(summed.dtype.element_ty), mask=lives[i])
        if i % TOGETHER == 0:
            for j in tl.static_range(i, min(i + TOGETHER, PIECES)):
                y = deviations[j] * scale
                if CENTRED:
                    y = y - correction * scale  # one FMA
                place = j * BLOCK + single
                results = results + (load_affine(y, weight, bias, place, place < n, OFFSET),)
        tl.store(to + axis_offset(i * BLOCK + col, out_strides[2]), results[i].to(out.dtype.element_ty), mask=lives[i])
    row = outer.to(tl.int64) * lanes + lane + tl.arange(0, 1)[:, None]
    tl.store(rstd + row, statistic)
    if CENTRED:
        tl.store(mean + row, centre + correction)


@jit
def norm_backward_rows_kernel(
    dout,
    x,
    mean,
    rstd,
    dx,
    weight,
    dsummed,
    dbranch,
    dweights,
    dbiases,
    dout_strides,
    x_strides,
    dx_strides,
    dsummed_strides,
    dbranch_strides,
    sizes,
    lanes,
    n,
    rows,
    each,
    eps,
    CENTRED: tl.constexpr,
    LENGTH: tl.constexpr,
    OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """dx = (g - hat * mean(g * hat) - mean(g)) * scale + dsummed along each row, as in ``shared_kernels``.

    dout, x, dx, dsummed: [outer, lanes, n]; mean, rstd: [rows]; weight: [n]; dweights, dbiases: [programs, n] of
    COMPUTE. A program holds ``each`` groups of ROWS rows, one after another, as PIECES tiles [ROWS, BLOCK], side by
    side, which cover n.

    Program p also accumulates the gradients of weight and bias over its rows and stores them in row p of ``dweights``
    and ``dbiases``: without atomics, the order of additions is fixed. ``norm_fold_kernel`` reduces these rows.

    With AHEAD all pieces of dsummed are loaded with dout and x, otherwise four at a time. A load stays behind the
    stores of dx before it, as the compiler does not know that these do not overlap, and so waits for memory by itself.
    """
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK)[None, :]
    count = n.to(COMPUTE)
    w = ()
    # One accumulator for each row of the tile: they are reduced once, at the end.
    dw = ()
    db = ()
    for i in tl.static_range(PIECES):
        factor = tl.full((1, BLOCK), 1.0, COMPUTE)
        if weight is not None:
            factor = tl.load(weight + i * BLOCK + col, mask=col < n - i * BLOCK, other=0.0).to(COMPUTE)
            if OFFSET:
                factor += OFFSET
        w = w + (factor,)
        dw = dw + (tl.zeros((ROWS, BLOCK), COMPUTE),)
        db = db + (tl.zeros((ROWS, BLOCK), COMPUTE),)
    for group in tl.range(each, num_stages=STAGES):  # pipelined: the next rows are in flight
        row = (program.to(tl.int64) * each + group) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = row < rows
        lives = live_pieces(inside, n, PIECES, BLOCK)
        outer, lane = outer_and_lane_of(row, sizes, lanes, rows)
        dy = load_pieces(element_pointers(dout, dout_strides, outer, sizes, lane, col), lives, 0.0, dout_strides, BLOCK)
        v = load_pieces(element_pointers(x, x_strides, outer, sizes, lane, col), lives, 0.0, x_strides, BLOCK)
        more = ()
        if dsummed is None or PIECES == 1:
            more = (None,) * PIECES
        else:
            more_at = element_pointers(dsummed, dsummed_strides, outer, sizes, lane, col)
            if AHEAD:
                more = load_pieces(more_at, lives, 0.0, dsummed_strides, BLOCK)
        v = converted_pieces(v, COMPUTE)
        dy = converted_pieces(dy, COMPUTE)
        statistic = tl.load(rstd + row, mask=inside, other=0.0)
        scale = scale_of_statistic(statistic, eps, LENGTH)
        centre = None
        if CENTRED:
            centre = tl.load(mean + row, mask=inside, other=0.0)
        hat = ()
        g = ()
        new_dw = ()
        new_db = ()
        for i in tl.static_range(PIECES):
            deviation = v[i]
            if CENTRED:
                deviation = deviation - centre  # not 0 past the row's end, but there ``dy`` is
            hat = hat + (deviation * scale,)
            g = g + (dy[i] * w[i],)
            new_dw = new_dw + (dw[i] + dy[i] * hat[i] if dweights is not None else dw[i],)
            new_db = new_db + (db[i] + dy[i] if dbiases is not None else db[i],)
        dw = new_dw
        db = new_db
        total = g[0] * hat[0]
        for i in tl.static_range(1, PIECES):
            total += g[i] * hat[i]
        if CENTRED:
            g_total = g[0]
            for i in tl.static_range(1, PIECES):
                g_total += g[i]
            g_total, total = two_sums(g_total, total, 1, True)
        else:
            total = tl.sum(total, 1, keep_dims=True)
        projection = projection_of(total, count, statistic, eps, LENGTH)
        g_mean = 0.0
        if CENTRED:
            g_mean = g_total / count
        to = row_pointers(dx, dx_strides, outer, sizes, lane)
        for i in tl.static_range(PIECES):
            if dsummed is not None and PIECES > 1 and not AHEAD:
                if i % 4 == 0:
                    for j in tl.static_range(i, min(i + 4, PIECES)):
                        more = more + (load_rows(more_at + j * BLOCK, lives[j], 0.0, dsummed_strides, ""),)
            store_gradient(
                g[i], hat[i], to, dx, dbranch, dsummed, dx_strides, dbranch_strides, dsummed_strides, sizes, outer,
                lane, i * BLOCK + col, lives[i], g_mean, scale, projection, CENTRED, COMPUTE, more[i],
            )  # fmt: skip
    line = program.to(tl.int64) * n + col
    sums = ()
    if dweights is not None:
        sums = sums + dw
    if dbiases is not None:
        sums = sums + db
    sums = sums_of(sums, 0)
    for i in tl.static_range(PIECES):
        live_col = col < n - i * BLOCK
        if dweights is not None:
            tl.store(dweights + line + i * BLOCK, sums[i], mask=live_col)
        if dbiases is not None:
            tl.store(dbiases + line + i * BLOCK, sums[len(sums) - PIECES + i], mask=live_col)
