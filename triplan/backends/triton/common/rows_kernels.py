"""What the row kernels of softmax, norms and losses share: addresses of rows, exponentials and their sums.

A row has ``n`` elements along one axis. The other dimensions of an operand are its *outer* dimensions and, innermost,
``lanes``: the dimension along which the rows of one program are neighbours (not the lanes of a warp). An *outer point*
is one index into all outer dimensions. Every kernel takes

- ``x`` and ``x_strides``, the same for each operand of whole rows: the address, and (strides of the outer dimensions,
  stride between lanes, stride between elements of a row), in elements. A stride of None is known to be 1: the compiler
  then sees contiguous addresses. A fourth element: see ``load_rows``;
- ``sizes``: extents of the outer dimensions, innermost first, like their strides. None if there are none: the
  divisions of 64-bit integers would cost more than a short row's own work;
- ``lanes`` and ``n``: extents;
- ``blocks``: groups of ROWS lanes at one outer point, None where rows are numbered through all of these; in ``split``
  kernels, blocks of a row.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import load_tile_with, store_tile_with

#: log2(e)
LOG2_E = tl.constexpr(1.4426950408889634)
#: Whether a kernel with reductions stays one basic block, in which ptxas keeps a value rather than compute it twice.
#: Triton 3.6 puts predicates on the reductions' accesses to shared memory, which divides the block.
ONE_BASIC_BLOCK = tl.constexpr(not triton.__version__.startswith("3.6."))


# --- addresses ---


@jit
def axis_offset(position, stride):
    """position * stride, where a stride of None is 1.

    ``position``: integers of any shape. The product has 64 bits.
    """
    offset = position
    if stride is not None:
        offset = position.to(tl.int64) * stride
    return offset


@jit
def outer_offset(outer, sizes, strides):
    """Offset of outer point number ``outer``, numbered row-major over ``sizes``; 0 if there are no outer dimensions.

    ``outer``: a scalar or a block of integers. The products have 64 bits even if ``strides`` have 32.
    """
    offset = tl.zeros((), tl.int64)
    if sizes is not None and len(sizes) == 1:
        offset = outer.to(tl.int64) * strides[0]
    elif sizes is not None:
        for d in tl.static_range(len(sizes)):
            offset += (outer % sizes[d]).to(tl.int64) * strides[d]
            outer = outer // sizes[d]
    return offset


@jit
def row_pointers(pointer, strides, outer, sizes, lane):
    """Addresses of the first elements of the rows at ``outer`` and ``lane``, which broadcast against each other."""
    return pointer + outer_offset(outer, sizes, strides[0]) + axis_offset(lane, strides[1])


@jit
def element_pointers(pointer, strides, outer, sizes, lane, col):
    """Addresses of the elements ``col`` of the rows at ``outer`` and ``lane``; all three broadcast."""
    return row_pointers(pointer, strides, outer, sizes, lane) + axis_offset(col, strides[2])


@jit
def load_rows(at, mask, other, strides, POLICY: tl.constexpr):
    """The elements at ``at`` [ROWS, ..., BLOCK], of an operand with ``strides``.

    With a fourth element of these consecutive threads access a row's elements, not rows (see ``load_tile``).
    """
    along = strides[3] is None or at.shape[0] == 1
    return load_tile_with(at, tl.broadcast_to(mask, at.shape), other, along, POLICY)


@jit
def store_rows(at, v, mask, strides, POLICY: tl.constexpr):
    """Store ``v`` to the addresses ``at``, by the threads of ``load_rows``."""
    store_tile_with(at, v, tl.broadcast_to(mask, at.shape), strides[3] is None or at.shape[0] == 1, POLICY)


@jit
def live_pieces(inside, n, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """Which elements of each of PIECES pieces [ROWS, BLOCK] of some rows exist. All pieces but the last are whole.

    ``inside``: which rows [ROWS, 1] there are.
    """
    lives = ()
    for i in tl.static_range(PIECES):
        live = inside
        if i == PIECES - 1:
            live = live & (tl.arange(0, BLOCK)[None, :] < n - i * BLOCK)
        lives = lives + (live,)
    return lives


@jit
def load_pieces(at, lives, other, strides, BLOCK: tl.constexpr):
    """The pieces of the rows whose first pieces are ``at``; where there are several, each row is contiguous."""
    values = ()
    for i in tl.static_range(len(lives)):
        values = values + (load_rows(at + i * BLOCK, lives[i], other, strides, ""),)
    return values


@jit
def converted_pieces(values, COMPUTE: tl.constexpr):
    """``values``, pieces [ROWS, BLOCK], in COMPUTE."""
    found = ()
    for i in tl.static_range(len(values)):
        found = found + (values[i].to(COMPUTE),)
    return found


@jit
def outer_and_lane(row, sizes, lanes):
    """(outer point, lane) of row number ``row``, numbered row-major; without outer dimensions the first is not used."""
    outer = row
    lane = row
    if sizes is not None:
        outer = row // lanes
        lane = row % lanes
    return outer, lane


@jit
def outer_and_lane_of(row, sizes, lanes, rows):
    """``outer_and_lane`` of several of ``rows`` rows, in the integers of ``rows``: of 64 bits, each thread would take a
    hundred instructions for each division. Rows behind the last one may have any outer point and lane."""
    if sizes is not None:
        row = row.to(rows.dtype)
    return outer_and_lane(row, sizes, lanes)


@jit
def group_start(group, blocks, lanes, sizes, ROWS: tl.constexpr):
    """(outer point, first lane) of group number ``group`` of ROWS rows; each outer point has ``blocks`` groups.

    Without outer dimensions nothing is divided: the addresses of a short row would wait for the quotient.
    """
    outer = group * 0
    if sizes is not None:
        outer = group // blocks
        group = group % blocks
    return outer, group.to(lanes.dtype) * ROWS


@jit
def group_lanes(group, blocks, lanes, sizes, ROWS: tl.constexpr):
    """(outer point, lanes [ROWS, 1]) of group number ``group``, as in ``group_start``.

    With ``blocks`` of None there is one outer dimension, the group's rows follow each other row-major, and outer points
    are [ROWS, 1] too. The lane of a row past the last one is ``lanes``.
    """
    if blocks is None:
        first = group.to(lanes.dtype) * ROWS
        outer = first // lanes
        lane = first - outer * lanes + tl.arange(0, ROWS)[:, None]
        # A row's own quotient is of small numbers, or 0 or 1: a division of integers would cost more than its elements.
        if lanes >= ROWS:
            more = (lane >= lanes).to(lanes.dtype)
        else:
            more = ((lane.to(tl.float32) + 0.5) * (1.0 / lanes)).to(lanes.dtype)
        outer += more
        lane = tl.where(outer < sizes[0], lane - more * lanes, lanes)
    else:
        outer, first = group_start(group, blocks, lanes, sizes, ROWS)
        lane = first + tl.arange(0, ROWS)[:, None]
    return outer, lane


# --- maths ---


@jit
def exponential(v):
    """exp(v) of floats of any shape.

    In f32 it is ex2.approx.ftz: Triton's ``exp`` takes three times the instructions, to get subnormal results.
    """
    if v.dtype == tl.float64:
        return tl.exp(v)
    return tl.exp2(v * LOG2_E)


@jit
def finite_shift(top):
    """What to subtract before an exponential: the maximum ``top``, or 0 where it is -inf, as -inf - -inf is NaN."""
    return tl.where(top == -float("inf"), 0.0, top)


@jit
def accumulate_softmax(v, top, total, keep_dims: tl.constexpr):
    """(top, total) of VEC neighbouring columns each, with a block ``v`` [ROWS, COLS, VEC] accumulated.

    The running maximum and sum of exp(v - top) (Milakov and Gimelshein, arXiv 1805.02867): [ROWS, COLS], or
    [ROWS, COLS, 1] with ``keep_dims``. One thread loads the neighbours at once. ``merge_softmax`` merges the columns
    after the loop: a reduction between threads within it would make them wait for each other, with no loads in flight.
    """
    new = tl.maximum(top, tl.max(v, 2, keep_dims=keep_dims))
    shift = finite_shift(new)
    scaled = total * exponential(top - shift)
    if not keep_dims:
        shift = tl.expand_dims(shift, 2)
    return new, scaled + tl.sum(exponential(v - shift), 2, keep_dims=keep_dims)


@jit
def merge_softmax(tops, totals, axis: tl.constexpr, keep_dims: tl.constexpr):
    """top = max(tops), total = sum(totals * exp(tops - top)) along ``axis``."""
    top = tl.max(tops, axis, keep_dims=keep_dims)
    shift = finite_shift(top)
    if not keep_dims:
        shift = tl.expand_dims(shift, axis)
    return top, tl.sum(totals * exponential(tops - shift), axis, keep_dims=keep_dims)


@jit
def store_softmax_part(v, tops, totals, part, inside):
    """top = max(v), total = sum(exp(v - top)) along the last axis of a block ``v``, for ``merge_softmax_parts``.

    ``part``: the number of each partial result; ``inside``: which are stored.
    """
    top = tl.max(v, len(v.shape) - 1, keep_dims=True)
    total = tl.sum(exponential(v - finite_shift(top)), len(v.shape) - 1, keep_dims=True)
    tl.store(tops + part, top, mask=inside)
    tl.store(totals + part, total, mask=inside)


@jit
def merge_softmax_parts(tops, totals, row, inside, blocks, BLOCKS: tl.constexpr):
    """(top, total) of each ``row``: top = max(tops), total = sum(totals * exp(tops - top)).

    tops, totals: [rows, blocks], maximum and sum of exp(x - maximum) of each block of a row; BLOCKS >= blocks. ``row``:
    row numbers, their last axis of 1; ``inside``: which of them there are.
    """
    part = tl.arange(0, BLOCKS)
    known = (part < blocks) & inside
    part = row.to(tl.int64) * blocks + part
    part_tops = tl.load(tops + part, mask=known, other=-float("inf"))
    part_totals = tl.load(totals + part, mask=known, other=0.0)
    return merge_softmax(part_tops, part_totals, len(known.shape) - 1, True)


@jit
def rematerialize(v, OPAQUE: tl.constexpr = False):
    """A copy of ``v``, of 16-bit elements, that the compiler takes for a new value.

    What follows from the copy is computed again. Without it the compiler keeps the f32 values of the first conversion,
    which take twice the registers of ``v``. ptxas sees through the move; with OPAQUE the copy is a byte permutation,
    which it does not see through: needed for a second copy in one basic block.
    Not for the interpreter, which has no inline assembly.
    """
    COPY: tl.constexpr = "prmt.b32 $0, $1, $1, 0x3210;" if OPAQUE else "mov.b32 $0, $1;"
    return tl.inline_asm_elementwise(COPY, "=r,r", [v], dtype=v.dtype, is_pure=False, pack=2)
