"""Kernels of ``pixels``: a pixel of a result reads those around it; a pixel of a gradient, the results that read it."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import load_tile, store_tile
from triplan.backends.triton.pooling.windows_kernels import coordinates, offset, place, read, write


@jit
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
    # The minimum comes first: s may be beyond 32 bits. It is not negative, so that the integer is its floor.
    s = tl.minimum(s, (extent - 1).to(POSITION))
    i = s.to(tl.int32)
    return i, s - i.to(POSITION)


@jit
def share(at, i, w, LINEAR: tl.constexpr):
    """(whether pixel ``at`` is i or, if LINEAR, the next one; its weight: 1 - w or w)."""
    hit, weight = i == at, 1.0 - w
    if LINEAR:
        hit, weight = hit | (i + 1 == at), tl.where(hit, weight, w)
    else:
        weight = w * 0.0 + 1.0
    return hit, weight


@jit
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


@jit
def share_along(at, reader, step, extent, results, LINEAR: tl.constexpr, CENTERS: tl.constexpr, POSITION: tl.constexpr):
    """Along an axis: (whether the result ``reader`` exists and reads pixel ``at``; its weight there)."""
    i, w = source(reader, step, extent[0], LINEAR, CENTERS, POSITION)
    hit, weight = share(at, i, w, LINEAR)
    return hit & (reader < results[0]), weight


@jit
def shares_along(
    at, reader, step, extent, results,
    COUNT: tl.constexpr, LINEAR: tl.constexpr, CENTERS: tl.constexpr, POSITION: tl.constexpr,
):  # fmt: skip
    """``share_along`` of COUNT results from ``reader`` on, in a tuple."""
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (share_along(at, reader + i, step, extent, results, LINEAR, CENTERS, POSITION),)
    return found


@jit
def add_readers(
    acc, at, strides, mask, down, right, in_rows, in_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """acc + the results of ROWS and COLUMNS, by their weights in these, row by row.

    ``in_rows`` and ``in_columns`` as of ``shares_along``; ``at``: the address of a pixel's first reader, which ``down``
    rows and ``right`` columns are ahead of these.
    """
    loaded = ()
    for i in tl.static_range(ROWS):
        for j in tl.static_range(COLUMNS):
            below, beside = tl.full((), down + i, tl.int32), tl.full((), right + j, tl.int32)
            own = at + (offset(below, strides[2]) + offset(beside, strides[3]))
            live = mask & in_rows[i][0] & in_columns[j][0]
            loaded = loaded + (load_tile(own, live, 0.0, strides[1] is None or strides[3] is None),)
    for i in tl.static_range(ROWS):
        for j in tl.static_range(COLUMNS):
            acc += loaded[i * COLUMNS + j].to(ACC) * (in_rows[i][1] * in_columns[j][1]).to(ACC)
    return acc


@jit
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
    BETWEEN_ROWS: tl.constexpr,
    BETWEEN_COLUMNS: tl.constexpr,
    CENTERS: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    POSITION: tl.constexpr,
    ACC: tl.constexpr,
):
    """out[pixel, channel] = x[i, j, channel] at its source (i, j), or the sum of that and the next ones by weights.

    ``x`` and ``out``: (image, channel, row, column) of f16, bf16, f32, f64 or, if nothing is computed, u8; strides in
    this order, None for 1. A program computes the results at its ``coordinates``. BETWEEN_ROWS and BETWEEN_COLUMNS:
    whether it interpolates along this axis, in ACC.
    """
    image, row, column, channel, mask = coordinates(
        out_strides, batch, channels, rows, columns, tiles_channels, LAST, BLOCK_P, BLOCK_C
    )
    top, down = source(row, step_rows, height[0], BETWEEN_ROWS, CENTERS, POSITION)
    left, right = source(column, step_columns, width[0], BETWEEN_COLUMNS, CENTERS, POSITION)
    v = read(x, x_strides, image, top, left, channel, mask)
    in_rows, in_columns = mask & (top + 1 < height[0]), mask & (left + 1 < width[0])
    if BETWEEN_COLUMNS:
        right = right.to(ACC)
        after = load_tile(
            place(x, x_strides, image, top, left + 1, channel),
            in_columns,
            0.0,
            x_strides[1] is None or x_strides[3] is None,
        ).to(ACC)
        v = (1.0 - right) * v.to(ACC) + right * after
    if BETWEEN_ROWS:
        down = down.to(ACC)
        under = read(x, x_strides, image, top + 1, left, channel, in_rows).to(ACC)
        if BETWEEN_COLUMNS:
            corner = in_rows & in_columns
            after = load_tile(
                place(x, x_strides, image, top + 1, left + 1, channel),
                corner,
                0.0,
                x_strides[1] is None or x_strides[3] is None,
            ).to(ACC)
            under = (1.0 - right) * under + right * after
        v = (1.0 - down) * v.to(ACC) + down * under
    write(out, out_strides, image, row, column, channel, v, mask)


@jit
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
    BETWEEN_ROWS: tl.constexpr,
    BETWEEN_COLUMNS: tl.constexpr,
    CENTERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    POSITION: tl.constexpr,
    ACC: tl.constexpr,
):
    """dx[pixel, channel] = sum of dout over the pixels of the result that read this one, by its weight in each.

    Operands as in ``resize_kernel``; a program computes the pixels of dx at its ``coordinates``. Sums are accumulated
    in ACC, row by row. At most ``reach_rows`` by ``reach_columns`` pixels read one: loops go through ROWS by COLUMNS of
    them at a time, as in ``windows_kernels``; ``reach_columns`` of None: all COLUMNS, whose weights are computed once.
    No pixel is written twice.
    """
    image, row, column, channel, mask = coordinates(
        dx_strides, batch, channels, height, width, tiles_channels, LAST, BLOCK_P, BLOCK_C
    )
    top = first_reader(
        row, step_rows, inverse_rows, height[0], rows[0], lead_rows, corrections_rows,
        BETWEEN_ROWS, CENTERS, POSITION,
    )  # fmt: skip
    left = first_reader(
        column, step_columns, inverse_columns, width[0], columns[0], lead_columns, corrections_columns,
        BETWEEN_COLUMNS, CENTERS, POSITION,
    )  # fmt: skip
    at = place(dout, dout_strides, image, top, left, channel)
    acc = tl.zeros((BLOCK_P, BLOCK_C), ACC)
    if reach_columns is None:
        across = shares_along(column, left, step_columns, width, columns, COLUMNS, BETWEEN_COLUMNS, CENTERS, POSITION)
    for down in range(0, reach_rows, ROWS):
        along = shares_along(row, top + down, step_rows, height, rows, ROWS, BETWEEN_ROWS, CENTERS, POSITION)
        if reach_columns is None:
            acc = add_readers(acc, at, dout_strides, mask, down, 0, along, across, ROWS, COLUMNS, ACC)
        else:
            for right in range(0, reach_columns, COLUMNS):
                across = shares_along(
                    column, left + right, step_columns, width, columns, COLUMNS, BETWEEN_COLUMNS, CENTERS, POSITION
                )
                acc = add_readers(acc, at, dout_strides, mask, down, right, along, across, ROWS, COLUMNS, ACC)
    write(dx, dx_strides, image, row, column, channel, acc, mask)


@jit
def resize_swept_kernel(
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
    lead_rows,
    lead_columns,
    corrections_rows,
    corrections_columns,
    BETWEEN_ROWS: tl.constexpr,
    BETWEEN_COLUMNS: tl.constexpr,
    CENTERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    POSITION: tl.constexpr,
    ACC: tl.constexpr,
):
    """dx as of ``resize_backward_kernel``, by the same sums.

    A program finds the ROWS by COLUMNS results that may read each of BLOCK_P pixels once, for all channels: they take
    far more instructions than an element.
    """
    image, row, column, channel, inside = coordinates(
        dx_strides, batch, channels, height, width, None, True, BLOCK_P, BLOCK_C
    )
    top = first_reader(
        row, step_rows, inverse_rows, height[0], rows[0], lead_rows, corrections_rows,
        BETWEEN_ROWS, CENTERS, POSITION,
    )  # fmt: skip
    left = first_reader(
        column, step_columns, inverse_columns, width[0], columns[0], lead_columns, corrections_columns,
        BETWEEN_COLUMNS, CENTERS, POSITION,
    )  # fmt: skip
    readers = ()
    for reader in tl.static_range(ROWS * COLUMNS):
        p, q = top + reader // COLUMNS, left + reader % COLUMNS
        live, weight = share_along(row, p, step_rows, height, rows, BETWEEN_ROWS, CENTERS, POSITION)
        hit, beside = share_along(column, q, step_columns, width, columns, BETWEEN_COLUMNS, CENTERS, POSITION)
        live, weight = (image < batch) & live & hit, (weight * beside).to(ACC)
        readers = readers + ((place(dout, dout_strides, image, p, q, p * 0), live, weight),)
    to = place(dx, dx_strides, image, row, column, row * 0)
    for below in range(0, channels[0], BLOCK_C):
        lane = below + channel
        inside = (image < batch) & (lane < channels[0])
        loaded = ()
        for reader in tl.static_range(ROWS * COLUMNS):
            own = readers[reader][0] + offset(lane, dout_strides[1])
            loaded = loaded + (load_tile(own, readers[reader][1] & inside, 0.0, dout_strides[1] is None),)
        acc = tl.zeros((BLOCK_P, BLOCK_C), ACC)
        for reader in tl.static_range(ROWS * COLUMNS):
            acc += loaded[reader].to(ACC) * readers[reader][2]
        store_tile(to + offset(lane, dx_strides[1]), acc.to(dx.dtype.element_ty), inside, dx_strides[1] is None)
