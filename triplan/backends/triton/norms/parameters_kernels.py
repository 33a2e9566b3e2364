"""Gradients of weight and bias of the norms: partial sums over groups of rows, then the sum of those.

CENTRED, LENGTH, formulas and operands: see ``shared_kernels``; strides: see ``common/rows_kernels``. The partial
sums lie in the workspace, [lines, n]: one row for each part of the rows. ``norm_fold_kernel`` reduces them in a fixed
order; there are no atomics, so the gradients are deterministic.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.common.rows_kernels import element_pointers, outer_and_lane_of
from triplan.backends.triton.norms.shared_kernels import load_affine, scale_of_statistic, two_sums


@jit
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
    """dweights = sum(dout * hat), dbiases = sum(dout) over ``each`` groups of ROWS rows, hat = (x - mean) * scale.

    dout, x: [outer, lanes, n]; mean, rstd: [rows]; weight: [n]; dweights, dbiases: [lines, n]; totals, projections:
    [rows, blocks]; the last four of COMPUTE. A program has one of ``blocks`` blocks of BLOCK columns.

    ``totals`` and ``projections``, which ``split`` needs, receive the block's share of each row's sums of g and of
    g * hat, g = dout * (weight + OFFSET): the operands are then not read a third time.
    """
    begin(OVERLAPS)
    part = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    col = block.to(n.dtype) * BLOCK + tl.arange(0, BLOCK)[None, :]  # n has 64 bits where columns need them
    live_col = col < n
    # If all threads lie along the columns, each sums the rows of a tile without a reduction between threads.
    dw = tl.zeros((1, BLOCK), COMPUTE)
    db = tl.zeros((1, BLOCK), COMPUTE)
    for group in range(each):
        row = (part.to(tl.int64) * each + group) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = row < rows
        live = inside & live_col
        outer, lane = outer_and_lane_of(row, sizes, lanes, rows)
        dy = tl.load(element_pointers(dout, dout_strides, outer, sizes, lane, col), live, other=0.0)
        dy = dy.to(COMPUTE)
        if dweights is not None or projections is not None:
            v = tl.load(element_pointers(x, x_strides, outer, sizes, lane, col), live, other=0.0)
            v = v.to(COMPUTE)
            if CENTRED:
                v = v - tl.load(mean + row, mask=inside, other=0.0)
            # The same order of products as in the other kernels: scaled deviation times gradient.
            hat = v * scale_of_statistic(tl.load(rstd + row, mask=inside, other=0.0), eps, LENGTH)
            if dweights is not None:
                dw += tl.sum(dy * hat, 0, keep_dims=True)
            if projections is not None:
                g = load_affine(dy, weight, None, col, live_col, OFFSET)
                if CENTRED:
                    g_total, total = two_sums(g, g * hat, 1, True)
                    tl.store(totals + row * blocks + block, g_total, mask=inside)
                else:
                    total = tl.sum(g * hat, 1, keep_dims=True)
                tl.store(projections + row * blocks + block, total, mask=inside)
        if dbiases is not None:
            db += tl.sum(dy, 0, keep_dims=True)
    line = part.to(tl.int64) * n + col
    if dweights is not None:
        tl.store(dweights + line, dw, mask=live_col)
    if dbiases is not None:
        tl.store(dbiases + line, db, mask=live_col)


@jit
def fold_block(block, parts, out, n, lines, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out = sum(parts) over the first axis, for columns of block number ``block``; parts: [lines, n], out: [n]."""
    col = block.to(n.dtype) * BLOCK + tl.arange(0, BLOCK)[None, :]  # n has 64 bits where columns need them
    line = tl.arange(0, ROWS)[:, None]
    part = tl.load(parts + line.to(tl.int64) * n + col, mask=(line < lines) & (col < n), other=0.0)
    tl.store(out + col, tl.sum(part, 0, keep_dims=True).to(out.dtype.element_ty), mask=col < n)


@jit
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
    """dweight = sum(dweights), dbias = sum(dbiases) over the first axis, always in the same order.

    dweights, dbiases: [lines, n] of f32 or f64; dweight, dbias: [n] of f16, bf16, f32 or f64; ROWS >= lines. Each
    parameter that is present has ``blocks`` programs.
    """
    begin(OVERLAPS)
    block = tl.program_id(0)
    if dweights is not None:
        if block < blocks:
            fold_block(block, dweights, dweight, n, lines, ROWS, BLOCK)
        block -= blocks
    if dbiases is not None:
        if block >= 0:
            fold_block(block, dbiases, dbias, n, lines, ROWS, BLOCK)
