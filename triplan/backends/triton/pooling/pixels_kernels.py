"""Kernels of ``pixels``: a pixel of a result reads those around it; a pixel of a gradient, the results that read it."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.pooling.windows_kernels import coordinates, place


@triton.jit
def source(at, step, extent, LINEAR: tl.constexpr, CENTERS: tl.constexpr, POSITION: tl.constexpr):
    """i = min(floor(s), extent - 1), w = s - i or, of the last pixel, 0; of s = at * step or, if CENTERS,
    (at + 0.5) * step, less 0.5 if LINEAR.

    ``at``: integers of any shape; i: i32, w: POSITION. Every operation is rounded (the launch forbids fused ones), so
    that a position is the same in every kernel, and as its definition has it.
    """
    s = at.to(POSITION)
    if CENTERS:
        s = s + 0.5
    s = s * step
    if LINEAR and CENTERS:
        s = tl.maximum(s - 0.5, 0.0)
    last = (extent - 1).to(POSITION)
    i = tl.minimum(tl.floor(s), last)
    return i.to(tl.int32), tl.where(i < last, s - i, 0.0)


@triton.jit
def share(at, i, w, LINEAR: tl.constexpr):
    """(whether pixel ``at`` is i or, if LINEAR, the next one; its weight: 1 - w or w)."""
    hit, weight = i == at, 1.0 - w
    if LINEAR:
        hit, weight = hit | (i + 1 == at), tl.where(hit, weight, w)
    else:
        weight = w * 0.0 + 1.0
    return hit, weight


@triton.jit
def first_reader(
    at, step, inverse, extent, results, lead, corrections,
    LINEAR: tl.constexpr, CENTERS: tl.constexpr, POSITION: tl.constexpr,
):  # fmt: skip
    """The first of ``results`` positions that reads pixel ``at`` or a later one; ``results`` if none does.

    ``inverse`` is 1 / step, rounded: the estimate, less ``lead``, is at most ``corrections`` too small.
    """
    low = at
    if LINEAR:
        low = at - 1
    guess = low.to(POSITION)
    if LINEAR and CENTERS:
        guess = guess + 0.5
    guess = guess * inverse
    if CENTERS:
        guess = guess - 0.5
    guess = tl.minimum(tl.maximum(tl.floor(guess), 0.0), results.to(POSITION))
    found = tl.maximum(guess.to(tl.int32) - lead, 0)
    for _ in range(corrections):
        i, _ = source(found, step, extent, LINEAR, CENTERS, POSITION)
        found += (i < low).to(tl.int32)
    return found


@triton.jit
def resize_kernel(
    x,
    out,
    x_strides,
    out_strides,
    batch,
    channels,
    height,
    width,
    rows,
    columns,
    step_rows,
    step_columns,
    tiles_channels,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CENTERS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    POSITION: tl.constexpr,
    ACC: tl.constexpr,
):
    """out[pixel, channel] = x[i, j, channel] at its source (i, j), or the sum of that and the next ones by weights.

    ``x`` and ``out``: (image, channel, row, column) of f16, bf16, f32, f64 or, if nothing is computed, u8; strides in
    this order, None for 1. A program computes BLOCK_P pixels of any images by BLOCK_C channels; a pixel's place is
    computed once for all channels. ROWS and COLUMNS: whether it interpolates along this axis, in ACC.
    """
    image, row, column, channel = coordinates(rows, columns, tiles_channels, BLOCK_P, BLOCK_C)
    mask = (image < batch)[:, None] & (channel < channels)[None, :]
    top, down = source(row, step_rows, height, ROWS, CENTERS, POSITION)
    left, right = source(column, step_columns, width, COLUMNS, CENTERS, POSITION)
    v = tl.load(place(x, x_strides, image, top, left, channel), mask=mask, other=0)
    below, in_rows = top + 1, mask & (top + 1 < height)[:, None]
    beside, in_columns = left + 1, mask & (left + 1 < width)[:, None]
    if COLUMNS:
        right = right.to(ACC)[:, None]
        after = tl.load(place(x, x_strides, image, top, beside, channel), mask=in_columns, other=0).to(ACC)
        v = (1.0 - right) * v.to(ACC) + right * after
    if ROWS:
        down = down.to(ACC)[:, None]
        under = tl.load(place(x, x_strides, image, below, left, channel), mask=in_rows, other=0).to(ACC)
        if COLUMNS:
            corner = in_rows & in_columns
            after = tl.load(place(x, x_strides, image, below, beside, channel), mask=corner, other=0).to(ACC)
            under = (1.0 - right) * under + right * after
        v = (1.0 - down) * v.to(ACC) + down * under
    tl.store(place(out, out_strides, image, row, column, channel), v.to(out.dtype.element_ty), mask=mask)


@triton.jit
def resize_backward_kernel(
    dout,
    dx,
    dout_strides,
    dx_strides,
    batch,
    channels,
    height,
    width,
    rows,
    columns,
    step_rows,
    step_columns,
    inverse_rows,
    inverse_columns,
    reach_rows,
    reach_columns,
    lead_rows,
    lead_columns,
    corrections_rows,
    corrections_columns,
    tiles_channels,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CENTERS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    POSITION: tl.constexpr,
    ACC: tl.constexpr,
):
    """dx[pixel, channel] = sum of dout over the pixels of the result that read this one, by its weight in each.

    Operands as in ``resize_kernel``; a program computes BLOCK_P pixels of dx by BLOCK_C channels. Sums are accumulated
    in ACC, row by row. At most ``reach_rows`` by ``reach_columns`` pixels read one. No pixel is written twice.
    """
    image, row, column, channel = coordinates(height, width, tiles_channels, BLOCK_P, BLOCK_C)
    mask = (image < batch)[:, None] & (channel < channels)[None, :]
    top = first_reader(row, step_rows, inverse_rows, height, rows, lead_rows, corrections_rows, ROWS, CENTERS, POSITION)
    left = first_reader(
        column, step_columns, inverse_columns, width, columns, lead_columns, corrections_columns,
        COLUMNS, CENTERS, POSITION,
    )  # fmt: skip
    acc = tl.zeros((BLOCK_P, BLOCK_C), ACC)
    for down in range(reach_rows):
        p = top + down
        i, w = source(p, step_rows, height, ROWS, CENTERS, POSITION)
        in_rows, weight_rows = share(row, i, w, ROWS)
        in_rows = in_rows & (p < rows)
        for right in range(reach_columns):
            q = left + right
            i, w = source(q, step_columns, width, COLUMNS, CENTERS, POSITION)
            hit, weight = share(column, i, w, COLUMNS)
            live = (hit & in_rows & (q < columns))[:, None] & mask
            g = tl.load(place(dout, dout_strides, image, p, q, channel), mask=live, other=0.0).to(ACC)
            acc += g * (weight_rows * weight).to(ACC)[:, None]
    tl.store(place(dx, dx_strides, image, row, column, channel), acc.to(dx.dtype.element_ty), mask=mask)
