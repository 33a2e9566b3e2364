"""Gradients of weight and bias: partial sums over groups of rows, then their fold.

CENTRED, LENGTH and the operands: see ``shared_kernels``.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.common.rows_kernels import axis_offset, outer_and_lane, row_pointers
from triplan.backends.triton.norms.shared_kernels import affine, scale_again, two_sums


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
        outer, lane = outer_and_lane(row, sizes, lanes)
        dy = tl.load(
            row_pointers(dout, dout_strides, outer, sizes, lane) + axis_offset(col, dout_strides[2]), live, other=0.0
        )
        dy = dy.to(COMPUTE)
        if dweights is not None or projections is not None:
            v = tl.load(
                row_pointers(x, x_strides, outer, sizes, lane) + axis_offset(col, x_strides[2]), live, other=0.0
            )
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
