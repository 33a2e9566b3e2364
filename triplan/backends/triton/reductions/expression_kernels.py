"""Kernel of ``tiles`` and of the first launch of ``split`` for the values of an expression, which are not in memory."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.reductions.shared_kernels import (
    PLAIN,
    accumulator_at,
    beside_lines,
    chunk_of,
    element_of,
    finished,
    flat_lines,
    folded,
    merged,
    neighbours,
    offset_of,
    side_by_side,
)

#: How an operand's offset changes along the rows or the columns of a tile: not at all, by 1, or by strides.
CONSTANT, UNIT, STRIDED = (tl.constexpr(i) for i in range(3))


@jit
def _at_lines(
    pointer,
    point,
    lane,
    kept,
    along,
    WHICH: tl.constexpr,
    STEP: tl.constexpr,
    ACROSS: tl.constexpr,
    FLAT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Where the lines begin in an operand: pointers [ROWS, 1], or one pointer if they share it."""
    if FLAT > 0:
        at = offset_of(point, kept, WHICH)
        if STEP == UNIT:
            at = side_by_side(at, lane, ROWS, FLAT)
        elif STEP == STRIDED:
            at += lane * along[WHICH]
        pointer += at[:, None]
    elif ACROSS:
        pointer += offset_of(point, kept, WHICH)
        if STEP == UNIT:
            pointer += lane.to(tl.int64)[:, None]
        elif STEP == STRIDED:
            pointer += (lane * along[WHICH])[:, None]
    elif STEP != CONSTANT:
        pointer += offset_of(point, kept, WHICH)[:, None]
    return pointer


@jit
def _values(
    lines,
    scalars,
    start,
    col,
    reduced,
    live,
    FUNCTION: tl.constexpr,
    COMPUTE: tl.constexpr,
    COLUMN_STEPS: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """The expression at positions ``start + col`` of each line. ``live``: which of them exist, or None for all.

    For sums of offsets see ``tiles_kernels.taken``.
    """
    k = start + col
    loaded = ()
    for i in tl.static_range(len(lines)):
        pointer = lines[i]
        if COLUMN_STEPS[i] == UNIT:
            pointer += k.to(tl.int64)[None, :]
        elif COLUMN_STEPS[i] == STRIDED and len(reduced) == 1:
            pointer = pointer + offset_of(start, reduced, i + 1) + offset_of(col, reduced, i + 1)[None, :]
        elif COLUMN_STEPS[i] == STRIDED:
            pointer += offset_of(k, reduced, i + 1, VECTORS[i])[None, :]
        if COLUMN_STEPS[i] == CONSTANT or live is None:
            value = tl.load(pointer)
        else:
            value = tl.load(pointer, mask=live[None, :], other=0)
        loaded = loaded + (value,)
    return element_of(FUNCTION(loaded, scalars)[0], 0, PLAIN, COMPUTE)


@jit
def reduce_expression_kernel(
    inputs,
    scalars,
    out,
    firsts,
    kept,
    along,
    reduced,
    lanes,
    outer,
    n,
    chunk,
    chunks,
    KIND: tl.constexpr,
    FINISH: tl.constexpr,
    IDENTITY: tl.constexpr,
    FUNCTION: tl.constexpr,
    COMPUTE: tl.constexpr,
    RESULT: tl.constexpr,
    ACROSS: tl.constexpr,
    BESIDE: tl.constexpr,
    FLAT: tl.constexpr,
    ROW_STEPS: tl.constexpr,
    COLUMN_STEPS: tl.constexpr,
    VECTORS: tl.constexpr,
    LANES_BESIDE: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out[r] = finish(accumulate over k of FUNCTION(inputs[r, k], scalars)), if ``chunks`` > 1 accumulators of chunks.

    inputs: any elements; input i is at offset kept[r] + reduced[k] by the strides i + 1 of the dimensions, and varies
    along r and k as ROW_STEPS[i] and COLUMN_STEPS[i] say: what does not is loaded as a vector or a number. out: [lanes]
    of RESULT; firsts: [lanes, chunks] of COMPUTE, or None. The tiles are those of ``reduce_kernel``.
    Offsets of lines beyond the last, BESIDE and FLAT: see ``lines_of``; LANES_BESIDE: ``accumulator_at``.
    """
    begin(OVERLAPS)
    group, part, first, chunk = chunk_of(n, chunk, chunks)
    if FLAT > 0:
        number, point, lane, inside = flat_lines(group, lanes, along[0], ROWS, POINT_TYPE, FLAT)
    elif ACROSS:
        point, lane = beside_lines(group, kept, along[0], ROWS, POINT_TYPE)
        number, inside = point * along[0] + lane, lane < along[0]
        lane = neighbours(lane, along[0], BESIDE)
    else:
        number = group.to(POINT_TYPE) * ROWS + tl.arange(0, ROWS)
        point, inside = tl.minimum(number, lanes - 1), number < lanes
        lane = point
    lines = ()
    for i in tl.static_range(len(inputs)):
        at = _at_lines(inputs[i], point, lane, kept, along, i + 1, ROW_STEPS[i], ACROSS, FLAT, ROWS)
        lines = lines + (at,)
    length = tl.minimum(n - first, chunk)
    col = tl.arange(0, BLOCK)
    a = tl.full((ROWS, BLOCK), IDENTITY, COMPUTE)
    # Only the last block is masked: a mask whose length is not a multiple of 16 bytes narrows loads.
    whole = length // BLOCK
    for step in range(whole):
        start = first + step * BLOCK
        v = _values(lines, scalars, start, col, reduced, None, FUNCTION, COMPUTE, COLUMN_STEPS, VECTORS)
        a, _ = merged(a, a, v, v, None, KIND, IDENTITY)
    if whole * BLOCK < length:
        start = first + whole * BLOCK
        live = start + col < n
        v = _values(lines, scalars, start, col, reduced, live, FUNCTION, COMPUTE, COLUMN_STEPS, VECTORS)
        a, _ = merged(a, a, v, v, live[None, :], KIND, IDENTITY)
    a, _ = folded(a, a, n, n, KIND)
    if firsts is None:
        if FLAT > 0 and along[len(inputs) + 1] is None:
            out_at = number
        else:
            out_at = offset_of(point, kept, len(inputs) + 1)
            if ACROSS:
                out_at += lane if along[len(inputs) + 1] is None else lane * along[len(inputs) + 1]
        tl.store(out + out_at, finished(a, a, n.to(COMPUTE), 0, 0, FINISH).to(RESULT), mask=inside)
    else:
        at = accumulator_at(number, part, lanes, chunks, LANES_BESIDE)
        tl.store(firsts + at, a, mask=inside)
