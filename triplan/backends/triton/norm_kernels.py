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

from triplan.backends.triton.rows_kernels import along, lanes_of, placed, rows_of


@triton.jit
def inverse_root(mean_square, eps):
    return 1.0 / tl.sqrt(mean_square + eps)


@triton.jit
def affine(v, weight, bias, col, live_col):
    """``v * weight + bias``, of which either may be absent."""
    if weight is not None:
        v = v * tl.load(weight + col, mask=live_col, other=0.0, eviction_policy="evict_last").to(v.dtype)
    if bias is not None:
        v = v + tl.load(bias + col, mask=live_col, other=0.0, eviction_policy="evict_last").to(v.dtype)
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
def deviations(at, step, n, centre, CENTRED: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of ``x - centre`` and of its squares over one row: in each column of its blocks, which meet at the end.

    While threads wait for each other nothing is on its way from memory.
    """
    total = tl.zeros((BLOCK,), COMPUTE)
    squares = tl.zeros((BLOCK,), COMPUTE)
    for start in range(0, n, BLOCK):
        col = start + tl.arange(0, BLOCK)
        live = col < n
        v = tl.load(at + along(col, step), mask=live, other=0.0, eviction_policy="evict_last").to(COMPUTE)
        if CENTRED:
            v = tl.where(live, v - centre, 0.0)
            total += v
        squares += v * v
    found = tl.zeros((), COMPUTE)
    if CENTRED:
        found = tl.sum(total, 0)
    return found, tl.sum(squares, 0)


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

    Deviations are taken from the first block's mean, and the variance is their mean square less the square of their
    mean, ``middle``. That cancels only where ``middle`` is large beside the standard deviation: where the first block
    is unlike the rest. The row is then read once more, with deviations from its own mean.
    """
    outer = tl.program_id(0) // blocks
    lane = (tl.program_id(0) % blocks).to(tl.int64)
    at = rows_of(x, x_strides, outer, sizes, lane)
    to = rows_of(out, out_strides, outer, sizes, lane)
    row = outer.to(tl.int64) * lanes + lane
    count = n.to(COMPUTE)
    centre = tl.zeros((), COMPUTE)
    middle = tl.zeros((), COMPUTE)
    if CENTRED:
        col = tl.arange(0, BLOCK)
        first = tl.load(at + along(col, x_strides[2]), mask=col < n, other=0.0, eviction_policy="evict_last")
        centre = tl.sum(first.to(COMPUTE), 0) / tl.minimum(n, BLOCK).to(COMPUTE)
    total, squares = deviations(at, x_strides[2], n, centre, CENTRED, COMPUTE, BLOCK)
    if CENTRED:
        middle = total / count
        if 2.0 * total * middle > squares:  # more than a standard deviation
            centre += middle
            total, squares = deviations(at, x_strides[2], n, centre, CENTRED, COMPUTE, BLOCK)
            middle = total / count
        squares -= total * middle
        squares = tl.where(squares < 0, 0.0, squares)
        tl.store(mean + row, centre + middle)
    scale = inverse_root(squares / count, eps)
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
        outer, lane = placed(row, sizes, lanes)
        dy = tl.load(rows_of(dout, dout_strides, outer, sizes, lane) + along(col, dout_strides[2]), live, other=0.0)
        v = tl.load(rows_of(x, x_strides, outer, sizes, lane) + along(col, x_strides[2]), live, other=0.0).to(COMPUTE)
        dy = dy.to(COMPUTE)
        scale = tl.load(rstd + row, mask=inside, other=0.0)
        if CENTRED:
            v = v - tl.load(mean + row, mask=inside, other=0.0)  # beyond the row ``dy`` is 0
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
    outer, lane = placed(row, sizes, lanes)
    dout_at = rows_of(dout, dout_strides, outer, sizes, lane)
    x_at = rows_of(x, x_strides, outer, sizes, lane)
    to = rows_of(dx, dx_strides, outer, sizes, lane)
    scale = tl.load(rstd + row)
    centre = tl.zeros((), COMPUTE)
    if CENTRED:
        centre = tl.load(mean + row)
    total = tl.zeros((BLOCK,), COMPUTE)
    projected = tl.zeros((BLOCK,), COMPUTE)
    for start in range(0, n, BLOCK):
        col = start + tl.arange(0, BLOCK)
        live = col < n
        g = tl.load(dout_at + along(col, dout_strides[2]), mask=live, other=0.0, eviction_policy="evict_last")
        g = affine(g.to(COMPUTE), weight, None, col, live)
        v = tl.load(x_at + along(col, x_strides[2]), mask=live, other=0.0, eviction_policy="evict_last").to(COMPUTE)
        if CENTRED:
            total += g
        projected += g * ((v - centre) * scale)
    count = n.to(COMPUTE)
    projected = tl.sum(projected, 0) / count
    middle = tl.zeros((), COMPUTE)
    if CENTRED:
        middle = tl.sum(total, 0) / count
    steps = tl.cdiv(n, BLOCK)
    for step in range(steps):
        col = (steps - 1 - step) * BLOCK + tl.arange(0, BLOCK)
        live = col < n
        g = tl.load(dout_at + along(col, dout_strides[2]), mask=live, other=0.0, eviction_policy="evict_first")
        g = affine(g.to(COMPUTE), weight, None, col, live)
        v = tl.load(x_at + along(col, x_strides[2]), mask=live, other=0.0, eviction_policy="evict_first").to(COMPUTE)
        d = g - ((v - centre) * scale) * projected
        if CENTRED:
            d = d - middle
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
    # Where threads lie along the columns alone, each adds up the rows of a tile by itself.
    dw = tl.zeros((1, BLOCK), COMPUTE)
    db = tl.zeros((1, BLOCK), COMPUTE)
    for group in range(each):
        row = (part.to(tl.int64) * each + group) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = row < rows
        live = inside & live_col
        outer, lane = placed(row, sizes, lanes)
        dy = tl.load(rows_of(dout, dout_strides, outer, sizes, lane) + along(col, dout_strides[2]), live, other=0.0)
        dy = dy.to(COMPUTE)
        if dweights is not None:
            v = tl.load(rows_of(x, x_strides, outer, sizes, lane) + along(col, x_strides[2]), live, other=0.0)
            v = v.to(COMPUTE)
            if CENTRED:
                v = v - tl.load(mean + row, mask=inside, other=0.0)
            # As the other kernels have it: the deviation scaled, then times the gradient.
            dw += tl.sum(dy * (v * tl.load(rstd + row, mask=inside, other=0.0)), 0, keep_dims=True)
        if dbiases is not None:
            db += tl.sum(dy, 0, keep_dims=True)
    line = part.to(tl.int64) * n + col
    if dweights is not None:
        tl.store(dweights + line, dw, mask=live_col)
    if dbiases is not None:
        tl.store(dbiases + line, db, mask=live_col)


@triton.jit
def folded(block, parts, out, n, lines, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    col = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    line = tl.arange(0, ROWS)[:, None]
    part = tl.load(parts + line.to(tl.int64) * n + col, mask=(line < lines) & (col < n), other=0.0)
    tl.store(out + col, tl.sum(part, 0, keep_dims=True).to(out.dtype.element_ty), mask=col < n)


@triton.jit
def norm_fold_kernel(
    dweights,
    dweight,
    dbiases,
    dbias,
    n,
    lines,
    blocks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds up ``lines`` lines of partial sums, always in the same order; ``blocks`` programs for each parameter."""
    block = tl.program_id(0)
    if dweights is not None:
        if block < blocks:
            folded(block, dweights, dweight, n, lines, ROWS, BLOCK)
        block -= blocks
    if dbiases is not None:
        if block >= 0:
            folded(block, dbiases, dbias, n, lines, ROWS, BLOCK)
