"""rms_norm, layer_norm and their adjoints: rows held whole, and rows in a loop.

Both come from the same kernels: CENTRED takes the mean off. Deviations are centred twice: the mean that a sum gives is
off by a rounding of its own size, which the mean of the deviations from it corrects; without that, rows far from 0
would lose as many digits as their mean has over their spread (Chan, Golub and LeVeque 1983, "Algorithms for computing
the sample variance", equation 1.7, corrected two-pass). Each operand of whole rows comes with (outer strides, lane
stride, step along the row); see ``rows_kernels``. Statistics, weight and bias are packed.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.rows_kernels import along, lanes_of, rows_of


@triton.jit
def inverse_root(mean_square, eps):
    return 1.0 / tl.sqrt(mean_square + eps)


@triton.jit
def affine(v, weight, bias, col, live_col):
    """``v * weight + bias``, of which either may be absent."""
    if weight is not None:
        v = v * tl.load(weight + col, mask=live_col, other=0.0).to(v.dtype)
    if bias is not None:
        v = v + tl.load(bias + col, mask=live_col, other=0.0).to(v.dtype)
    return v


# --- forward ---


@triton.jit
def norm_group(
    group,
    x,
    out,
    mean,
    rstd,
    weight,
    bias,
    x_strides,
    out_strides,
    sizes,
    lanes,
    n,
    blocks,
    eps,
    CENTRED: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    outer = group // blocks
    lane = lanes_of(group, blocks, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    inside = lane < lanes
    live = inside & (col < n)
    v = tl.load(rows_of(x, x_strides, outer, sizes, lane) + along(col, x_strides[2]), mask=live, other=0.0).to(COMPUTE)
    count = n.to(COMPUTE)
    row = outer.to(tl.int64) * lanes + lane
    if CENTRED:
        centre = tl.sum(v, 1, keep_dims=True) / count
        v = tl.where(live, v - centre, 0.0)
        rest = tl.sum(v, 1, keep_dims=True) / count
        v = tl.where(live, v - rest, 0.0)
        tl.store(mean + row, centre + rest, mask=inside)
    scale = inverse_root(tl.sum(v * v, 1, keep_dims=True) / count, eps)
    tl.store(rstd + row, scale, mask=inside)
    y = affine(v * scale, weight, bias, col, col < n)
    to = rows_of(out, out_strides, outer, sizes, lane) + along(col, out_strides[2])
    tl.store(to, y.to(out.dtype.element_ty), mask=live)


@triton.jit
def norm_rows_kernel(
    x,
    out,
    mean,
    rstd,
    weight,
    bias,
    x_strides,
    out_strides,
    sizes,
    lanes,
    n,
    blocks,
    groups,
    eps,
    CENTRED: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Whole rows in registers: each element is read once and written once.

    With STAGES programs stay for several groups of rows, and the next ones are on their way meanwhile.
    """
    first = tl.program_id(0)
    if STAGES == 0:
        norm_group(
            first, x, out, mean, rstd, weight, bias, x_strides, out_strides, sizes, lanes, n, blocks, eps,
            CENTRED, COMPUTE, ROWS, BLOCK,
        )  # fmt: skip
    else:
        for group in tl.range(first, groups, tl.num_programs(0), num_stages=STAGES):
            norm_group(
                group, x, out, mean, rstd, weight, bias, x_strides, out_strides, sizes, lanes, n, blocks, eps,
                CENTRED, COMPUTE, ROWS, BLOCK,
            )  # fmt: skip


@triton.jit
def norm_looped_kernel(
    x,
    out,
    mean,
    rstd,
    weight,
    bias,
    x_strides,
    out_strides,
    sizes,
    lanes,
    n,
    blocks,
    eps,
    CENTRED: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row, block by block: statistics, then, backwards, the results.

    Deviations are taken from the row's first element; then sums of them do not grow with the mean, and one pass gives
    mean and variance by Chan's update of (count, mean, sum of squared deviations), block by block.
    """
    outer = tl.program_id(0) // blocks
    lane = (tl.program_id(0) % blocks).to(tl.int64)
    at = rows_of(x, x_strides, outer, sizes, lane)
    to = rows_of(out, out_strides, outer, sizes, lane)
    row = outer.to(tl.int64) * lanes + lane
    count = n.to(COMPUTE)
    centre = tl.zeros((), COMPUTE)
    if CENTRED:
        centre = tl.load(at, mask=n > 0, other=0.0).to(COMPUTE)
    middle = tl.zeros((), COMPUTE)
    squares = tl.zeros((), COMPUTE)
    met = tl.zeros((), COMPUTE)
    for start in range(0, n, BLOCK):
        col = start + tl.arange(0, BLOCK)
        live = col < n
        v = tl.load(at + along(col, x_strides[2]), mask=live, other=0.0, eviction_policy="evict_last").to(COMPUTE)
        if CENTRED:
            here = tl.minimum(n - start, BLOCK).to(COMPUTE)
            v = tl.where(live, v - centre, 0.0)
            own = tl.sum(v, 0) / here
            v = tl.where(live, v - own, 0.0)
            rest = tl.sum(v, 0) / here
            v = tl.where(live, v - rest, 0.0)
            off = (own + rest) - middle
            share = here / (met + here)
            middle += off * share
            squares += tl.sum(v * v, 0) + off * off * (met * share)
            met += here
        else:
            squares += tl.sum(v * v, 0)
    scale = inverse_root(squares / count, eps)
    if CENTRED:
        tl.store(mean + row, tl.where(n > 0, centre + middle, float("nan")))
    tl.store(rstd + row, scale)
    steps = tl.cdiv(n, BLOCK)
    for step in range(steps):
        col = (steps - 1 - step) * BLOCK + tl.arange(0, BLOCK)
        live = col < n
        v = tl.load(at + along(col, x_strides[2]), mask=live, other=0.0, eviction_policy="evict_first").to(COMPUTE)
        if CENTRED:
            v = (v - centre) - middle
        y = affine(v * scale, weight, bias, col, live)
        tl.store(to + along(col, out_strides[2]), y.to(out.dtype.element_ty), mask=live)


# --- backward ---


@triton.jit
def norm_backward_rows_kernel(
    dout,
    x,
    mean,
    rstd,
    dx,
    weight,
    dweights,
    dbiases,
    dout_strides,
    x_strides,
    dx_strides,
    sizes,
    lanes,
    n,
    rows,
    each,
    CENTRED: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Whole rows in registers, ``each`` groups of ROWS rows a program.

    It adds up its rows' share of the weight's and the bias's gradients as it goes, and writes them into line
    ``program`` of ``dweights`` and ``dbiases``.
    """
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK)[None, :]
    live_col = col < n
    count = n.to(COMPUTE)
    w = tl.full((1, BLOCK), 1.0, COMPUTE)
    if weight is not None:
        w = tl.load(weight + col, mask=live_col, other=0.0).to(COMPUTE)
    # Row by row of the tile: the rows meet once, at the end.
    dw = tl.zeros((ROWS, BLOCK), COMPUTE)
    db = tl.zeros((ROWS, BLOCK), COMPUTE)
    for group in tl.range(each, num_stages=STAGES):  # the next rows are on their way meanwhile
        row = (program.to(tl.int64) * each + group) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = row < rows
        live = inside & live_col
        lane, outer = row % lanes, row // lanes
        dy = tl.load(rows_of(dout, dout_strides, outer, sizes, lane) + along(col, dout_strides[2]), live, other=0.0)
        v = tl.load(rows_of(x, x_strides, outer, sizes, lane) + along(col, x_strides[2]), live, other=0.0).to(COMPUTE)
        dy = dy.to(COMPUTE)
        scale = tl.load(rstd + row, mask=inside, other=0.0)
        if CENTRED:
            v = tl.where(live, v - tl.load(mean + row, mask=inside, other=0.0), 0.0)
        hat = v * scale
        g = dy * w
        if dweights is not None:
            dw += dy * hat
        if dbiases is not None:
            db += dy
        projected = tl.sum(g * hat, 1, keep_dims=True) / count
        d = g - hat * projected
        if CENTRED:
            d = d - tl.sum(g, 1, keep_dims=True) / count
        to = rows_of(dx, dx_strides, outer, sizes, lane) + along(col, dx_strides[2])
        tl.store(to, (d * scale).to(dx.dtype.element_ty), mask=live)
    line = program.to(tl.int64) * n + col
    if dweights is not None:
        tl.store(dweights + line, tl.sum(dw, 0, keep_dims=True), mask=live_col)
    if dbiases is not None:
        tl.store(dbiases + line, tl.sum(db, 0, keep_dims=True), mask=live_col)


@triton.jit
def norm_backward_looped_kernel(
    dout,
    x,
    mean,
    rstd,
    dx,
    weight,
    dout_strides,
    x_strides,
    dx_strides,
    sizes,
    lanes,
    n,
    CENTRED: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row, block by block: the sums, then, backwards, the gradients of x."""
    row = tl.program_id(0).to(tl.int64)
    lane, outer = row % lanes, row // lanes
    dout_at = rows_of(dout, dout_strides, outer, sizes, lane)
    x_at = rows_of(x, x_strides, outer, sizes, lane)
    to = rows_of(dx, dx_strides, outer, sizes, lane)
    scale = tl.load(rstd + row)
    centre = tl.zeros((), COMPUTE)
    if CENTRED:
        centre = tl.load(mean + row)
    total = tl.zeros((), COMPUTE)
    projected = tl.zeros((), COMPUTE)
    for start in range(0, n, BLOCK):
        col = start + tl.arange(0, BLOCK)
        live = col < n
        g = tl.load(dout_at + along(col, dout_strides[2]), mask=live, other=0.0, eviction_policy="evict_last")
        g = affine(g.to(COMPUTE), weight, None, col, live)
        v = tl.load(x_at + along(col, x_strides[2]), mask=live, other=0.0, eviction_policy="evict_last").to(COMPUTE)
        total += tl.sum(g, 0)
        projected += tl.sum(g * ((v - centre) * scale), 0)
    total = total / n.to(COMPUTE)
    projected = projected / n.to(COMPUTE)
    steps = tl.cdiv(n, BLOCK)
    for step in range(steps):
        col = (steps - 1 - step) * BLOCK + tl.arange(0, BLOCK)
        live = col < n
        g = tl.load(dout_at + along(col, dout_strides[2]), mask=live, other=0.0).to(COMPUTE)
        g = affine(g, weight, None, col, live)
        v = tl.load(x_at + along(col, x_strides[2]), mask=live, other=0.0).to(COMPUTE)
        d = g - ((v - centre) * scale) * projected
        if CENTRED:
            d = d - total
        tl.store(to + along(col, dx_strides[2]), (d * scale).to(dx.dtype.element_ty), mask=live)


@triton.jit
def norm_parameters_kernel(
    dout,
    x,
    mean,
    rstd,
    dweights,
    dbiases,
    dout_strides,
    x_strides,
    sizes,
    lanes,
    n,
    rows,
    each,
    blocks,
    CENTRED: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of columns of ``each`` groups of ROWS rows: their share of the weight's and the bias's gradients."""
    part = tl.program_id(0) // blocks
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live_col = col < n
    # Row by row of the tile: the rows meet once, at the end.
    dw = tl.zeros((ROWS, BLOCK), COMPUTE)
    db = tl.zeros((ROWS, BLOCK), COMPUTE)
    for group in range(each):
        row = (part.to(tl.int64) * each + group) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = row < rows
        live = inside & live_col
        lane, outer = row % lanes, row // lanes
        dy = tl.load(rows_of(dout, dout_strides, outer, sizes, lane) + along(col, dout_strides[2]), live, other=0.0)
        dy = dy.to(COMPUTE)
        if dweights is not None:
            v = tl.load(rows_of(x, x_strides, outer, sizes, lane) + along(col, x_strides[2]), live, other=0.0)
            v = v.to(COMPUTE)
            if CENTRED:
                v = v - tl.load(mean + row, mask=inside, other=0.0)
            # As the other kernels have it: the deviation scaled, then times the gradient.
            dw += dy * (v * tl.load(rstd + row, mask=inside, other=0.0))
        if dbiases is not None:
            db += dy
    line = part.to(tl.int64) * n + col
    if dweights is not None:
        tl.store(dweights + line, tl.sum(dw, 0, keep_dims=True), mask=live_col)
    if dbiases is not None:
        tl.store(dbiases + line, tl.sum(db, 0, keep_dims=True), mask=live_col)


@triton.jit
def norm_fold_kernel(
    parts,
    out,
    n,
    lines,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds up ``lines`` lines of partial sums, always in the same order."""
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((1, BLOCK), COMPUTE)
    for start in range(0, lines, ROWS):
        line = start + tl.arange(0, ROWS)[:, None]
        live = (line < lines) & (col < n)
        total += tl.sum(tl.load(parts + line.to(tl.int64) * n + col, mask=live, other=0.0), 0, keep_dims=True)
    tl.store(out + col, total.to(out.dtype.element_ty), mask=col < n)
