"""Positions in sorted rows: a bisection for each element."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import axis_offset


@jit
def comparable(v):
    """``v`` in a type that is compared alike everywhere: f16 and bf16 in f32, narrow integers in i32."""
    if v.dtype.is_floating():
        found = v if v.dtype.primitive_bitwidth >= 32 else v.to(tl.float32)
    else:
        found = v if v.dtype.primitive_bitwidth >= 32 else v.to(tl.int32)
    return found


@jit
def _value(sequence, sorter, sequence_step, sorter_step, place, n, known=None):
    """The element at ``place`` of a sequence of n, in the order of ``sorter`` if there is one; anything if not
    ``known``."""
    if sorter is not None:
        place = tl.load(sorter + axis_offset(place, sorter_step), mask=known)
        place = tl.minimum(tl.maximum(place, 0), n - 1)
    return comparable(tl.load(sequence + axis_offset(place, sequence_step), mask=known))


@jit
def _is_above(s, v, RIGHT):
    """Written as torch has it: a comparison with NaN is false."""
    return s > v if RIGHT else s >= v


@jit
def _first(sequence, sorter, sequence_step, sorter_step, v, n, RIGHT, LEVELS):
    """(low, count) after LEVELS steps of the bisections for ``v``.

    What these compare with is the same for all of a row: it is loaded at once, and chosen from in registers.
    """
    # Step after step; of what follows an element, the first is for those below it.
    tree, lows, counts = (), (n * 0,), (n,)
    for level in tl.static_range(LEVELS):
        next_lows, next_counts = (), ()
        for i in tl.static_range(1 << level):
            half = counts[i] >> 1
            middle = lows[i] + half
            tree = tree + (_value(sequence, sorter, sequence_step, sorter_step, middle, n),)
            next_lows = next_lows + (lows[i], middle + 1)
            next_counts = next_counts + (half, counts[i] - half - 1)
        lows, counts = next_lows, next_counts
    low = tl.zeros(v.shape, n.dtype)
    count = low + n
    for level in tl.static_range(LEVELS):
        is_above = _is_above(tree[0], v, RIGHT)
        low = tl.where(is_above, low, low + (count >> 1) + 1)
        count = tl.where(is_above, count >> 1, count - (count >> 1) - 1)
        below = ()
        for depth in tl.static_range(LEVELS - level - 1):
            for i in tl.static_range(1 << depth):
                below = below + (tl.where(is_above, tree[(2 << depth) - 1 + i], tree[(3 << depth) - 1 + i]),)
        tree = below
    return low, count


@jit
def _offset(row, col, strides):
    """The offset of element ``col`` of ``row``, where a row of None is 0."""
    offset = axis_offset(col, strides[1])
    if row is not None:
        offset += axis_offset(row, strides[0])
    return offset


@jit
def searchsorted_kernel(
    sequence,
    sorter,
    x,
    out,
    sequence_strides,
    sorter_strides,
    x_strides,
    out_strides,
    rows,
    n,
    m,
    blocks,
    taken,
    steps,
    RIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """out[r, j] = how many elements of sequence[r] are less than x[r, j]; with RIGHT, less or equal.

    sequence: [rows, n]; sorter: None, or [rows, n] of i64; x: [rows, m] of the same type; out: [rows, m] of i32 or i64.
    A program takes COLS elements of ROWS rows; if several, a stride of None between rows of x or out is 1. Or ``taken``
    is not None: it takes all of so many rows, whose elements lie one after another in its ROWS * COLS lanes.

    A bisection compares with the middle of ``count`` elements from ``low`` on. Every element of x has some left in
    each of the first LEVELS + ``steps`` steps, for which n is at least 2**(LEVELS + steps) - 1; one may be left then.
    """
    # A tile is searched for as one dimension, so that a warp reads the sequence of one row.
    place = tl.arange(0, ROWS * COLS)
    if taken is not None:
        first_row = tl.program_id(0).to(tl.int64) * taken
        row = (place.to(tl.uint32) // m.to(tl.uint32)).to(tl.int32)  # (a signed one takes more instructions)
        col = place - row * m
        known = row < tl.minimum(rows - first_row, taken).to(tl.int32)
    else:
        first_row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS
        first_col = (tl.program_id(0) % blocks).to(m.dtype) * COLS
        row, col = None, first_col + place
        known = col < m
        tile_row, tile_col = tl.arange(0, ROWS)[:, None], first_col + tl.arange(0, COLS)[None, :]
        tile_known = (tile_row < rows - first_row) & (tile_col < m)
        if ROWS > 1:
            row, col = place // COLS, first_col + place % COLS
            known = (row < rows - first_row) & (col < m)
    x += axis_offset(first_row, x_strides[0])
    out += axis_offset(first_row, out_strides[0])
    if ROWS > 1 and x_strides[0] is None:
        v = tl.load(x + (tile_row + axis_offset(tile_col, x_strides[1])), mask=tile_known, other=0).reshape(ROWS * COLS)
    else:
        v = tl.load(x + _offset(row, col, x_strides), mask=known, other=0)
    v = comparable(v)
    sequence += axis_offset(first_row, sequence_strides[0])
    sequence_step, sorter_step = sequence_strides[1], None
    if sorter is not None:
        sorter += axis_offset(first_row, sorter_strides[0])
        sorter_step = sorter_strides[1]
    if row is not None:
        source = tl.where(known, row, 0)
        sequence += axis_offset(source, sequence_strides[0])
        if sorter is not None:
            sorter += axis_offset(source, sorter_strides[0])

    low, count = _first(sequence, sorter, sequence_step, sorter_step, v, n, RIGHT, LEVELS)
    for _ in range(steps):
        half = count >> 1
        middle = low + half
        is_above = _is_above(_value(sequence, sorter, sequence_step, sorter_step, middle, n), v, RIGHT)
        low = tl.where(is_above, low, middle + 1)
        count = tl.where(is_above, half, count - half - 1)
    is_left = known & (count > 0)
    last = _value(sequence, sorter, sequence_step, sorter_step, low, n, is_left)
    low += (is_left & (_is_above(last, v, RIGHT) == 0)).to(low.dtype)
    found = low.to(out.dtype.element_ty)
    if ROWS > 1 and out_strides[0] is None:
        tl.store(out + (tile_row + axis_offset(tile_col, out_strides[1])), found.reshape(ROWS, COLS), mask=tile_known)
    else:
        tl.store(out + _offset(row, col, out_strides), found, mask=known)
