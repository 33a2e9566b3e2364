"""rms_norm, layer_norm, l2_norm and their adjoints with each row divided among programs: its parts, then the rest.

CENTRED, LENGTH and the operands as in ``norm_kernels``. The adjoints' parts come from ``norm_parameters_kernel``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.norm_adjoint_kernels import scale_again
from triplan.backends.triton.norm_kernels import affine, read, scale_of, start_of
from triplan.backends.triton.overlap import begin
from triplan.backends.triton.rows_kernels import along, placed, rows_of


@triton.jit
def elements_of(block, n, BLOCK: tl.constexpr):
    """How many elements of a row of ``n`` block number ``block`` has."""
    return tl.minimum(tl.maximum(n - block * BLOCK, 0), BLOCK)


@triton.jit
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
    """Of one block of one row, of which there are ``blocks`` a row: the sum of squares; of what is CENTRED the mean, as
    a number and what that is off by, and the sum of squared deviations from it."""
    begin(OVERLAPS)
    outer, lane = placed((tl.program_id(0) // blocks).to(tl.int64), sizes, lanes)
    block = tl.program_id(0) % blocks
    col = block * BLOCK + tl.arange(0, BLOCK)
    live = col < n
    at = rows_of(x, x_strides, outer, sizes, lane)
    residual_at = start_of(residual, residual_strides, outer, sizes, lane)
    v = read(at, x_strides, residual_at, residual_strides, col, live, COMPUTE, "evict_last")
    if CENTRED:
        count = elements_of(block, n, BLOCK).to(COMPUTE)
        centre = tl.sum(v, 0) / count
        v = tl.where(live, v - centre, 0.0)
        rest = tl.sum(v, 0) / count
        found = tl.sum(v * v, 0) - rest * rest * count
        found = tl.where(found < 0, 0.0, found)
        tl.store(centres + tl.program_id(0), centre)
        tl.store(rests + tl.program_id(0), rest)
    else:
        found = tl.sum(v * v, 0)
    tl.store(squares + tl.program_id(0), found)


@triton.jit
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
    """The rest for one block, from all parts of its row, which every program adds up in the same order.

    Sums of squared deviations from the blocks' means meet at the row's mean (Chan, Golub and LeVeque, equation 2.1).
    """
    begin(OVERLAPS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    outer, lane = placed(row, sizes, lanes)
    block = tl.program_id(0) % blocks
    part = tl.arange(0, BLOCKS)
    known = part < blocks
    first = row * blocks
    found = tl.load(squares + first + part, mask=known, other=0.0)
    count = n.to(COMPUTE)
    centre = tl.zeros((), COMPUTE)
    middle = tl.zeros((), COMPUTE)
    if CENTRED:
        held = tl.where(known, elements_of(part, n, BLOCK), 0).to(COMPUTE)
        own = tl.load(centres + first + part, mask=known, other=0.0)
        centre = tl.sum(held * own, 0) / count
        off = tl.where(known, (own - centre) + tl.load(rests + first + part, mask=known, other=0.0), 0.0)
        rest = tl.sum(held * off, 0)
        middle = rest / count
        total = tl.sum(found + held * off * off, 0) - rest * middle
        total = tl.where(total < 0, 0.0, total)
    else:
        total = tl.sum(found, 0)
    saved, scale = scale_of(total, count, eps, LENGTH)
    if block == 0:
        tl.store(rstd + row, saved)
        if CENTRED:
            tl.store(mean + row, centre + middle)
    col = block * BLOCK + tl.arange(0, BLOCK)
    live = col < n
    at = rows_of(x, x_strides, outer, sizes, lane)
    residual_at = start_of(residual, residual_strides, outer, sizes, lane)
    v = read(at, x_strides, residual_at, residual_strides, col, live, COMPUTE, "evict_first")
    if summed is not None:
        sums_to = rows_of(summed, summed_strides, outer, sizes, lane) + along(col, summed_strides[2])
        tl.store(sums_to, v.to(summed.dtype.element_ty), mask=live)
    if CENTRED:
        v = (v - centre) - middle
    y = affine(v * scale, weight, bias, col, live, OFFSET)
    to = rows_of(out, out_strides, outer, sizes, lane) + along(col, out_strides[2])
    tl.store(to, y.to(out.dtype.element_ty), mask=live)


@triton.jit
def norm_backward_finish_kernel(
    dout,
    x,
    mean,
    rstd,
    dx,
    weight,
    dsummed,
    totals,
    projections,
    dout_strides,
    x_strides,
    dx_strides,
    dsummed_strides,
    sizes,
    lanes,
    n,
    blocks,
    parts,
    eps,
    CENTRED: tl.constexpr,
    LENGTH: tl.constexpr,
    OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The gradients of one block of x, of which there are ``blocks`` a row, from the ``parts`` of its row's sums."""
    begin(OVERLAPS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    outer, lane = placed(row, sizes, lanes)
    part = tl.arange(0, PARTS)
    known = part < parts
    saved = tl.load(rstd + row)
    scale = scale_again(saved, eps, LENGTH)
    terms = 1.0 if LENGTH else n.to(COMPUTE)
    projected = tl.sum(tl.load(projections + row * parts + part, mask=known, other=0.0), 0) / terms
    if LENGTH:
        projected = tl.where(saved < eps, 0.0, projected)
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    live = col < n
    dout_at = rows_of(dout, dout_strides, outer, sizes, lane) + along(col, dout_strides[2])
    x_at = rows_of(x, x_strides, outer, sizes, lane) + along(col, x_strides[2])
    g = tl.load(dout_at, mask=live, other=0.0, eviction_policy="evict_first").to(COMPUTE)
    g = affine(g, weight, None, col, live, OFFSET)
    v = tl.load(x_at, mask=live, other=0.0, eviction_policy="evict_first").to(COMPUTE)
    if CENTRED:
        v = v - tl.load(mean + row)
    d = g - (v * scale) * projected
    if CENTRED:
        d = d - tl.sum(tl.load(totals + row * parts + part, mask=known, other=0.0), 0) / terms
    d = d * scale
    if dsummed is not None:
        more = rows_of(dsummed, dsummed_strides, outer, sizes, lane) + along(col, dsummed_strides[2])
        d += tl.load(more, mask=live, other=0.0).to(COMPUTE)
    to = rows_of(dx, dx_strides, outer, sizes, lane) + along(col, dx_strides[2])
    tl.store(to, d.to(dx.dtype.element_ty), mask=live)
