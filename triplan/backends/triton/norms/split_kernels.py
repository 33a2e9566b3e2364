"""rms_norm, layer_norm, l2_norm and their backward: each row split between programs, in two launches.

CENTRED, LENGTH and the operands: see ``shared_kernels``. The backward begins with ``norm_parameters_kernel``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.common.rows_kernels import axis_offset, outer_and_lane, row_pointers
from triplan.backends.triton.norms.shared_kernels import (
    affine,
    read,
    scale_again,
    scale_of,
    start_of,
    two_sums,
    write,
    write_gradient,
)


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
    outer, lane = outer_and_lane((tl.program_id(0) // blocks).to(tl.int64), sizes, lanes)
    block = tl.program_id(0) % blocks
    col = block * BLOCK + tl.arange(0, BLOCK)
    live = col < n
    at = row_pointers(x, x_strides, outer, sizes, lane)
    residual_at = start_of(residual, residual_strides, outer, sizes, lane)
    v = read(at, x_strides, residual_at, residual_strides, col, live, COMPUTE, "evict_last").to(COMPUTE)
    if CENTRED:
        count = elements_of(block, n, BLOCK).to(COMPUTE)
        centre = tl.sum(v, 0) / count
        v = tl.where(live, v - centre, 0.0)
        rest, found = two_sums(v, v * v, 0, False)
        rest = rest / count
        found -= rest * rest * count
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
    outer, lane = outer_and_lane(row, sizes, lanes)
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
        # No products are added up: with the first addition, between threads, each would fuse its own product and no
        # other, and each have another sum, off by a rounding of the mean's size.
        last = tl.sum(tl.where(part == blocks - 1, own, 0.0), 0)
        others = tl.sum(tl.where(part < blocks - 1, own, 0.0), 0)
        centre = (others * BLOCK + last * elements_of(blocks - 1, n, BLOCK).to(COMPUTE)) / count
        off = tl.where(known, (own - centre) + tl.load(rests + first + part, mask=known, other=0.0), 0.0)
        rest, total = two_sums(held * off, found + held * off * off, 0, False)
        middle = rest / count
        total -= rest * middle
        total = tl.where(total < 0, 0.0, total)
    else:
        total = tl.sum(found, 0)
    saved, scale = scale_of(total, 1.0 / count, eps, LENGTH)
    if block == 0:
        tl.store(rstd + row, saved)
        if CENTRED:
            tl.store(mean + row, centre + middle)
    col = block * BLOCK + tl.arange(0, BLOCK)
    live = col < n
    at = row_pointers(x, x_strides, outer, sizes, lane)
    residual_at = start_of(residual, residual_strides, outer, sizes, lane)
    v = read(at, x_strides, residual_at, residual_strides, col, live, COMPUTE, "evict_first").to(COMPUTE)
    to = row_pointers(out, out_strides, outer, sizes, lane)
    write(
        v, to, out, summed, weight, bias, out_strides, summed_strides, sizes, outer, lane, col, live, centre, middle,
        scale, CENTRED, OFFSET,
    )  # fmt: skip


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
    outer, lane = outer_and_lane(row, sizes, lanes)
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
    dout_at = row_pointers(dout, dout_strides, outer, sizes, lane) + axis_offset(col, dout_strides[2])
    x_at = row_pointers(x, x_strides, outer, sizes, lane) + axis_offset(col, x_strides[2])
    g = tl.load(dout_at, mask=live, other=0.0, eviction_policy="evict_first").to(COMPUTE)
    g = affine(g, weight, None, col, live, OFFSET)
    v = tl.load(x_at, mask=live, other=0.0, eviction_policy="evict_first").to(COMPUTE)
    centre = tl.zeros((), COMPUTE)
    middle = tl.zeros((), COMPUTE)
    if CENTRED:
        centre = tl.load(mean + row)
        middle = tl.sum(tl.load(totals + row * parts + part, mask=known, other=0.0), 0) / terms
    to = row_pointers(dx, dx_strides, outer, sizes, lane)
    write_gradient(
        g, v, to, dx, dsummed, dx_strides, dsummed_strides, sizes, outer, lane, col, live, centre, middle, scale,
        projected, CENTRED, COMPUTE,
    )  # fmt: skip
