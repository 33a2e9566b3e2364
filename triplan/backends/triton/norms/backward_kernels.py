"""Adjoints of rms_norm, layer_norm and l2_norm: rows held whole, and rows in a loop; then the parameters' gradients.

CENTRED and LENGTH as in ``norm_kernels``; ``rstd`` is the statistic that the forward has saved, l2_norm's length too.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.common.rows_kernels import along, placed, rows_of
from triplan.backends.triton.norms.rows_kernels import affine, two_sums


@triton.jit
def scale_again(saved, eps, LENGTH: tl.constexpr):
    """What a row was multiplied by."""
    scale = saved
    if LENGTH:
        scale = 1.0 / tl.where(saved < eps, eps, saved)
    return scale


@triton.jit
def write_gradient(
    g,
    v,
    at,
    dx,
    dsummed,
    dx_strides,
    dsummed_strides,
    sizes,
    outer,
    lane,
    col,
    live,
    centre,
    middle,
    scale,
    projected,
    CENTRED: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Elements ``col`` of a row's gradient, which begins at ``at``: from weighted gradients ``g`` of results and values
    ``v``, with the row's mean, the mean of all its ``g``, and that of ``g`` times results before weights."""
    d = g - ((v - centre) * scale) * projected
    if CENTRED:
        d = d - middle
    d = d * scale
    if dsummed is not None:
        more = rows_of(dsummed, dsummed_strides, outer, sizes, lane) + along(col, dsummed_strides[2])
        d += tl.load(more, mask=live, other=0.0).to(COMPUTE)
    tl.store(at + along(col, dx_strides[2]), d.to(dx.dtype.element_ty), mask=live)


@triton.jit
def norm_backward_rows_kernel(
    dout,
    x,
    mean,
    rstd,
    dx,
    weight,
    dsummed,
    dweights,
    dbiases,
    dout_strides,
    x_strides,
    dx_strides,
    dsummed_strides,
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
    terms = 1.0 if LENGTH else n.to(COMPUTE)
    w = tl.full((1, BLOCK), 1.0, COMPUTE)
    if weight is not None:
        w = tl.load(weight + col, mask=live_col, other=0.0).to(COMPUTE)
        if OFFSET:
            w += OFFSET
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
        saved = tl.load(rstd + row, mask=inside, other=0.0)
        scale = scale_again(saved, eps, LENGTH)
        if CENTRED:
            v = v - tl.load(mean + row, mask=inside, other=0.0)  # beyond the row ``dy`` is 0
        hat = v * scale
        g = dy * w
        if dweights is not None:
            dw += dy * hat
        if dbiases is not None:
            db += dy
        if CENTRED:
            middle, projected = two_sums(g, g * hat, 1, True)
        else:
            projected = tl.sum(g * hat, 1, keep_dims=True)
        projected = projected / terms
        if LENGTH:
            projected = tl.where(saved < eps, 0.0, projected)
        d = g - hat * projected
        if CENTRED:
            d = d - middle / terms
        d = d * scale
        if dsummed is not None:
            more = rows_of(dsummed, dsummed_strides, outer, sizes, lane) + along(col, dsummed_strides[2])
            d += tl.load(more, mask=live, other=0.0).to(COMPUTE)
        to = rows_of(dx, dx_strides, outer, sizes, lane) + along(col, dx_strides[2])
        tl.store(to, d.to(dx.dtype.element_ty), mask=live)
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
    dsummed,
    dout_strides,
    x_strides,
    dx_strides,
    dsummed_strides,
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
    """One row, block by block: the sums, then, backwards, the gradients of x."""
    row = tl.program_id(0).to(tl.int64)
    outer, lane = placed(row, sizes, lanes)
    dout_at = rows_of(dout, dout_strides, outer, sizes, lane)
    x_at = rows_of(x, x_strides, outer, sizes, lane)
    to = rows_of(dx, dx_strides, outer, sizes, lane)
    saved = tl.load(rstd + row)
    scale = scale_again(saved, eps, LENGTH)
    centre = tl.zeros((), COMPUTE)
    if CENTRED:
        centre = tl.load(mean + row)
    total = tl.zeros((BLOCK,), COMPUTE)
    projected = tl.zeros((BLOCK,), COMPUTE)
    for start in range(0, n, BLOCK * UNROLL):
        for u in tl.static_range(UNROLL):
            col = start + u * BLOCK + tl.arange(0, BLOCK)
            live = col < n
            g = tl.load(dout_at + along(col, dout_strides[2]), mask=live, other=0.0, eviction_policy="evict_last")
            g = affine(g.to(COMPUTE), weight, None, col, live, OFFSET)
            v = tl.load(x_at + along(col, x_strides[2]), mask=live, other=0.0, eviction_policy="evict_last").to(COMPUTE)
            if CENTRED:
                total += g
            projected += g * ((v - centre) * scale)
    terms = 1.0 if LENGTH else n.to(COMPUTE)
    projected = tl.sum(projected, 0) / terms
    if LENGTH:
        projected = tl.where(saved < eps, 0.0, projected)
    middle = tl.zeros((), COMPUTE)
    if CENTRED:
        middle = tl.sum(total, 0) / terms
    steps = tl.cdiv(n, BLOCK * UNROLL)
    for step in range(steps):
        kept = ()
        for u in tl.static_range(UNROLL):
            col = ((steps - 1 - step) * UNROLL + u) * BLOCK + tl.arange(0, BLOCK)
            live = col < n
            dy = tl.load(dout_at + along(col, dout_strides[2]), mask=live, other=0.0, eviction_policy="evict_first")
            v = tl.load(x_at + along(col, x_strides[2]), mask=live, other=0.0, eviction_policy="evict_first")
            kept = kept + (dy, v)
        for u in tl.static_range(UNROLL):
            col = ((steps - 1 - step) * UNROLL + u) * BLOCK + tl.arange(0, BLOCK)
            live = col < n
            g = affine(kept[2 * u].to(COMPUTE), weight, None, col, live, OFFSET)
            v = kept[2 * u + 1].to(COMPUTE)
            write_gradient(
                g, v, to, dx, dsummed, dx_strides, dsummed_strides, sizes, outer, lane, col, live, centre, middle,
                scale, projected, CENTRED, COMPUTE,
            )  # fmt: skip


@triton.jit
def norm_parameters_kernel(
    dout,
    x,
    mean,
    rstd,
    weight,
    dweights,
    dbiases,
    totals,
    projections,
    dout_strides,
    x_strides,
    sizes,
    lanes,
    n,
    rows,
    each,
    blocks,
    eps,
    CENTRED: tl.constexpr,
    LENGTH: tl.constexpr,
    OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One block of columns of ``each`` groups of ROWS rows: their share of the weight's and the bias's gradients.

    ``projections`` and ``totals``, if there are such, receive the block's share of each row's sums.
    """
    begin(OVERLAPS)
    part = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    col = block * BLOCK + tl.arange(0, BLOCK)[None, :]
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
        if dweights is not None or projections is not None:
            v = tl.load(rows_of(x, x_strides, outer, sizes, lane) + along(col, x_strides[2]), live, other=0.0)
            v = v.to(COMPUTE)
            if CENTRED:
                v = v - tl.load(mean + row, mask=inside, other=0.0)
            # As the other kernels have it: the deviation scaled, then times the gradient.
            hat = v * scale_again(tl.load(rstd + row, mask=inside, other=0.0), eps, LENGTH)
            if dweights is not None:
                dw += tl.sum(dy * hat, 0, keep_dims=True)
            if projections is not None:
                g = affine(dy, weight, None, col, live_col, OFFSET)
                if CENTRED:
                    total, projected = two_sums(g, g * hat, 1, True)
                    tl.store(totals + row * blocks + block, total, mask=inside)
                else:
                    projected = tl.sum(g * hat, 1, keep_dims=True)
                tl.store(projections + row * blocks + block, projected, mask=inside)
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
    OVERLAPS: tl.constexpr,
):
    """Adds up ``lines`` lines of partial sums, always in the same order; ``blocks`` programs for each parameter."""
    begin(OVERLAPS)
    block = tl.program_id(0)
    if dweights is not None:
        if block < blocks:
            folded(block, dweights, dweight, n, lines, ROWS, BLOCK)
        block -= blocks
    if dbiases is not None:
        if block >= 0:
            folded(block, dbiases, dbias, n, lines, ROWS, BLOCK)
