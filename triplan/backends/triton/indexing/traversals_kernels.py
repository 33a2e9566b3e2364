"""Kernels that visit every point once and call POINT there (see ``points_kernels``).

Tuples of sizes and strides run from the innermost dimension outwards.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.indices_kernels import report, resolve
from triplan.backends.triton.common.offsets_kernels import quotient, unravel
from triplan.backends.triton.common.rows_kernels import axis_offset


@jit
def rows_kernel(
    dense,
    table,
    index,
    status,
    alpha,
    padding,
    n_rows,
    count,
    inner,
    extent,
    run,
    POINT: tl.constexpr,
    PAIRS: tl.constexpr,
    FULL: tl.constexpr,
    STRIPED: tl.constexpr,
    REPORT: tl.constexpr,
    WRAP: tl.constexpr,
    CLAMP: tl.constexpr,
    OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """POINT at every point of packed operands: dense[o, c, i] with table[o, index[c], i].

    ``dense`` (outer, count, inner), n_rows = outer * count; ``table`` (outer, extent, inner); ``index`` (count,), or
    with FULL (outer, count, inner), i32 or i64. A program takes BLOCK_ROWS rows times BLOCK_COLS columns of ``inner``.
    PAIRS: POINT gets (table, place in a run of adjacent elements, ``run``), of which ``run`` None means no end near.
    """
    pid = tl.program_id(0)
    col_blocks = tl.cdiv(inner, BLOCK_COLS)
    if STRIPED:
        # All rows of one stripe of columns, then the next stripe: the table's part of a stripe stays in the L2 cache.
        row_blocks = tl.num_programs(0) // col_blocks
        row_block, col_block = pid % row_blocks, pid // row_blocks
    else:
        row_block, col_block = pid // col_blocks, pid % col_blocks
    row = row_block.to(OFFSET) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = col_block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    live_row = row < n_rows
    live = live_row[:, None] & (col < inner)[None, :]
    outer = row // count
    offset = row[:, None] * inner + col[None, :]
    if FULL:
        position = offset
        given = tl.load(index + position, mask=live, other=0)
        at, hit = resolve(given, extent, live, WRAP, CLAMP)
        if REPORT:
            report(status, live & (hit == 0), position)
        if padding is not None:
            hit = hit & (at != padding)
        base = (outer * extent)[:, None] + at.to(OFFSET)
    else:
        position = row - outer * count
        given = tl.load(index + position, mask=live_row, other=0)
        at, hit = resolve(given, extent, live_row, WRAP, CLAMP)
        if REPORT:
            report(status, live_row & (hit == 0), position)
        if padding is not None:
            hit = hit & (at != padding)
        base = (outer * extent + at.to(OFFSET))[:, None]
        hit = live & hit[:, None]
    at = base * inner + col[None, :]
    if PAIRS:
        table = (table, at, run)
    POINT(table, at, dense + offset, hit, live, alpha, COMPUTE)


@jit
def elements_kernel(
    dense,
    table,
    indices,
    status,
    alpha,
    padding,
    numel,
    each,
    sizes,
    dense_strides,
    table_strides,
    index_strides,
    position_strides,
    extents,
    axis_strides,
    run,
    place_strides,
    beside,
    span,
    POINT: tl.constexpr,
    PAIRS: tl.constexpr,
    REPORT: tl.constexpr,
    WRAP: tl.constexpr,
    CLAMP: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
    DENSE_FLAT: tl.constexpr,
    INDEX_FLAT: tl.constexpr,
    SINGLE: tl.constexpr,
    JOINED: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """POINT at every point of operands of any strides: dense[c] with table[c, indices[0][c], indices[1][c], ...].

    ``numel`` points c over ``sizes``; the k-th index, i32 or i64, selects along an axis of ``extents[k]`` and
    ``axis_strides[k]``. DENSE_FLAT and INDEX_FLAT: that operand's elements are numbered as the points are, so that its
    loads stay vectors. PAIRS: POINT gets (table, place, ``run``, position among the indices); the place is the offset,
    or, if ``place_strides`` are given, the sum of its coordinates times those along the dimensions, and of what indices
    select times those along the indexed axes. SINGLE: neighbouring points are in different threads, as POINT wants
    them where it adds to the table (see ``apart``): of adjacent ones all would be exchanged through shared memory
    before. JOINED > 1: a thread has so many
    points that follow each other, and POINT gets (table, what ``_located`` says of each, ``run``, alpha, COMPUTE,
    PAIRS). With ``beside``, (b, c) as ``sizes`` are, there are b points between two of a thread: b threads that follow
    each other have JOINED * b points, and c times as many cover the ``span`` points of a row of the outer dimensions.
    Of each SPREAD * ``each`` programs, SPREAD that follow each other are spread: ``each`` blocks lie between two of
    them.
    """
    program = tl.program_id(0)
    if SPREAD > 1:
        window = SPREAD * each
        program = program // window * window + program % SPREAD * each + program % window // SPREAD
    first = program.to(POINT_TYPE) * BLOCK
    found = ()
    if beside is not None:
        lane = program.to(POINT_TYPE) * (BLOCK // JOINED) + tl.arange(0, BLOCK // JOINED)
        chunk = quotient(lane, beside[0])
        outer = quotient(chunk, beside[1])
        # The first point of a thread, from that of its span.
        begin = lane + (chunk * (JOINED - 1) - outer * beside[1][0] * JOINED) * beside[0][0]
    for k in tl.static_range(JOINED):
        if beside is not None:
            place = begin + k * beside[0][0]
            point = tl.where(place < span, outer * span + place, numel)
        elif JOINED > 1:
            point = first + tl.arange(0, BLOCK // JOINED) * JOINED + k
        else:
            point = first + tl.arange(0, BLOCK)
            if SINGLE:
                point = tl.multiple_of(point, [1])
        one = _located(
            point,
            dense,
            indices,
            status,
            padding,
            numel,
            sizes,
            dense_strides,
            table_strides,
            index_strides,
            position_strides,
            extents,
            axis_strides,
            place_strides,
            REPORT,
            WRAP,
            CLAMP,
            DENSE_FLAT,
            INDEX_FLAT,
        )
        found = found + (one,)
    if JOINED > 1:
        POINT(table, found, run, alpha, COMPUTE, PAIRS)
    else:
        at, place, address, hit, live, point = found[0]
        if PAIRS:
            table = (table, place, run, unravel(point, sizes, position_strides))
        POINT(table, at, address, hit, live, alpha, COMPUTE)


@jit
def _located(
    point,
    dense,
    indices,
    status,
    padding,
    numel,
    sizes,
    dense_strides,
    table_strides,
    index_strides,
    position_strides,
    extents,
    axis_strides,
    place_strides,
    REPORT: tl.constexpr,
    WRAP: tl.constexpr,
    CLAMP: tl.constexpr,
    DENSE_FLAT: tl.constexpr,
    INDEX_FLAT: tl.constexpr,
):
    """(offset into the table, place, address of the dense element, hit, live, point): see ``elements_kernel``."""
    live = point < numel
    inside = live
    hit = live
    offset = unravel(point, sizes, table_strides)
    if place_strides is not None:
        place = unravel(point, sizes, place_strides[0])
    for k in tl.static_range(len(indices)):
        if INDEX_FLAT:
            given = tl.load(indices[k] + point, mask=live, other=0)
        else:
            given = tl.load(indices[k] + unravel(point, sizes, index_strides[k]), mask=live, other=0)
        at, inside, hit = chosen(given, extents[k], live, inside, hit, padding, WRAP, CLAMP)
        offset += at.to(axis_strides[k].dtype) * axis_strides[k]
        if place_strides is not None:
            place += at.to(place_strides[1][k].dtype) * place_strides[1][k]
    if REPORT:
        report(status, live & (inside == 0), unravel(point, sizes, position_strides))
    if place_strides is None:
        place = offset
    if DENSE_FLAT:
        address = dense + point
    else:
        address = dense + unravel(point, sizes, dense_strides)
    return offset, place, address, hit, live, point


@jit
def chosen(given, extent, live, inside, hit, padding, WRAP: tl.constexpr, CLAMP: tl.constexpr):
    """(position that index ``given`` selects, ``inside`` and it exists, ``hit`` and it is not ``padding`` either)."""
    at, valid = resolve(given, extent, live, WRAP, CLAMP)
    inside = inside & valid
    if padding is not None:
        valid = valid & (at != padding)
    return at, inside, hit & valid


@jit
def tiles_kernel(
    dense,
    table,
    indices,
    status,
    alpha,
    padding,
    rows,
    cols,
    sizes,
    dense_strides,
    table_strides,
    index_strides,
    position_strides,
    extents,
    axis_strides,
    run,
    place_strides,
    POINT: tl.constexpr,
    PAIRS: tl.constexpr,
    REPORT: tl.constexpr,
    WRAP: tl.constexpr,
    CLAMP: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX_MOVES: tl.constexpr,
    STRIPED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """POINT at every point of operands of any strides, as ``elements_kernel`` has them, by tiles of two dimensions.

    ``rows`` and ``cols`` are the extents of these dimensions, ``sizes`` those of the others. Strides of an operand are
    (those of the others, along rows, along columns), of which None is 1. INDEX_MOVES: indices differ between columns.

    Tiles are [columns, rows]: where the compiler knows no stride, it lets consecutive threads access the first axis.
    """
    pid = tl.program_id(0)
    col_blocks = tl.cdiv(cols, BLOCK_COLS)
    row_blocks = tl.cdiv(rows, BLOCK_ROWS)
    if STRIPED:
        # All rows of one stripe of columns, then the next stripe: the table's part of a stripe, or its indices, stay in
        # the L2 cache.
        row_block = pid % row_blocks
        col_block = pid // row_blocks % col_blocks
    else:
        row_block = pid // col_blocks % row_blocks
        col_block = pid % col_blocks
    rest = pid // (col_blocks * row_blocks)
    col = (col_block * BLOCK_COLS + tl.arange(0, BLOCK_COLS))[:, None]
    row = (row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[None, :]
    live_row = row < rows
    live = (col < cols) & live_row
    known = live if INDEX_MOVES else live_row
    inside = live
    hit = live
    offset = walked(rest, row, col, sizes, table_strides)
    if place_strides is not None:
        place = walked(rest, row, col, sizes, place_strides[0])
    for k in tl.static_range(len(indices)):
        if INDEX_MOVES:
            given = tl.load(indices[k] + walked(rest, row, col, sizes, index_strides[k]), mask=known, other=0)
        else:
            given = tl.load(indices[k] + walked(rest, row, None, sizes, index_strides[k]), mask=known, other=0)
        at, inside, hit = chosen(given, extents[k], known, inside, hit, padding, WRAP, CLAMP)
        offset += at.to(axis_strides[k].dtype) * axis_strides[k]
        if place_strides is not None:
            place += at.to(place_strides[1][k].dtype) * place_strides[1][k]
    if REPORT:
        report(status, live & (inside == 0), walked(rest, row, col, sizes, position_strides))
    if PAIRS:
        position = walked(rest, row, col, sizes, position_strides)
        table = (table, offset if place_strides is None else place, run, position)
    POINT(table, offset, dense + walked(rest, row, col, sizes, dense_strides), hit, live, alpha, COMPUTE)


@jit
def walked(rest, row, col, sizes, strides):
    """The offset of (``row``, ``col``) of the ``rest``-th combination of the other coordinates; ``col`` None: 0."""
    offset = unravel(rest, sizes, strides[0]) + axis_offset(row, strides[1])
    if col is not None:
        offset += axis_offset(col, strides[2])
    return offset
