"""rms_norm, layer_norm, l2_norm and their backward: whole rows in registers.

CENTRED, LENGTH and the operands: see ``shared_kernels``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.rows_kernels import (
    axis_offset,
    group_start,
    outer_and_lane,
    row_pointers,
)
from triplan.backends.triton.norms.shared_kernels import (
    parameter,
    read,
    scale_again,
    scale_of,
    start_of,
    transformed,
    two_sums,
)


@triton.jit
def shortened(v):
    """``v`` of f32 with the 14 leading bits of its significand: times a count of up to 1,024 it is exact."""
    return (v.to(tl.int32, bitcast=True) & -1024).to(tl.float32, bitcast=True)


@triton.jit
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
    """Whole rows in registers: each element is read once and written once. FULL: they are of BLOCK elements.

    All threads together hold ABREAST rows at a time, a vector each: each reads weight and bias for itself, once for all
    of its rows. (Read by fewer threads, as for one row, they would come through shared memory.) With ADDS_UP the sum of
    a row is exact, unless some elements are far smaller than others; what the mean is off by then follows from it,
    without another sum. Threads wait for each other before they write statistics, so the results go first.
    """
    outer, first = group_start(tl.program_id(0), blocks, lanes, sizes, ROWS)
    lane = first + tl.arange(0, ABREAST)[:, None, None] + tl.arange(0, ROWS // ABREAST)[None, :, None] * ABREAST
    col = tl.arange(0, BLOCK)[None, None, :]
    inside = lane < lanes
    live = inside & (col < n)
    if FULL:
        live = inside
    residual_at = start_of(residual, residual_strides, outer, sizes, lane)
    at = row_pointers(x, x_strides, outer, sizes, lane)
    v = read(at, x_strides, residual_at, residual_strides, col, live, COMPUTE, "").to(COMPUTE)
    place = tl.broadcast_to(col, (ABREAST, 1, BLOCK))
    if not CENTRED:  # two sums leave no registers for what comes early
        w = parameter(weight, place, place < n)
        b = parameter(bias, place, place < n)
    if summed is not None:
        sums_to = row_pointers(summed, summed_strides, outer, sizes, lane) + axis_offset(col, summed_strides[2])
        tl.store(sums_to, v.to(summed.dtype.element_ty), mask=live)
    count = n.to(COMPUTE)
    share = 1.0 / count  # once: divisions are many instructions
    row = outer.to(tl.int64) * lanes + lane
    if CENTRED:
        total = tl.sum(v, 2, keep_dims=True)
        centre = total * share
        if ADDS_UP:
            centre = shortened(centre)
        v = v - centre
        if not FULL:
            v = tl.where(live, v, 0.0)
        if ADDS_UP:
            rest = total - centre * count
            squares = tl.sum(v * v, 2, keep_dims=True)
        else:
            rest, squares = two_sums(v, v * v, 2, True)
        rest = rest * share
        # What ``rest`` takes off is a rounding's worth, and never all.
        squares -= rest * rest * count
        squares = tl.where(squares < 0, 0.0, squares)
    else:
        squares = tl.sum(v * v, 2, keep_dims=True)
    saved, scale = scale_of(squares, share, eps, LENGTH)
    v = v * scale
    if CENTRED:
        v = v - rest * scale  # one fused multiplication and addition
        w = parameter(weight, place, place < n)
        b = parameter(bias, place, place < n)
    y = transformed(v, w, b, OFFSET)
    to = row_pointers(out, out_strides, outer, sizes, lane) + axis_offset(col, out_strides[2])
    tl.store(to, y.to(out.dtype.element_ty), mask=live)
    tl.store(rstd + row, saved, mask=inside)
    if CENTRED:
        tl.store(mean + row, centre + rest, mask=inside)


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
        outer, lane = outer_and_lane(row, sizes, lanes)
        dy = tl.load(
            row_pointers(dout, dout_strides, outer, sizes, lane) + axis_offset(col, dout_strides[2]), live, other=0.0
        )
        v = tl.load(
            row_pointers(x, x_strides, outer, sizes, lane) + axis_offset(col, x_strides[2]), live, other=0.0
        ).to(COMPUTE)
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
            more = row_pointers(dsummed, dsummed_strides, outer, sizes, lane) + axis_offset(col, dsummed_strides[2])
            d += tl.load(more, mask=live, other=0.0).to(COMPUTE)
        to = row_pointers(dx, dx_strides, outer, sizes, lane) + axis_offset(col, dx_strides[2])
        tl.store(to, d.to(dx.dtype.element_ty), mask=live)
    line = program.to(tl.int64) * n + col
    if dweights is not None:
        tl.store(dweights + line, tl.sum(dw, 0, keep_dims=True), mask=live_col)
    if dbiases is not None:
        tl.store(dbiases + line, tl.sum(db, 0, keep_dims=True), mask=live_col)
