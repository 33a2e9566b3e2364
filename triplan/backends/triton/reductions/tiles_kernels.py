"""Kernel of ``tiles`` and of the first launch of ``split``: tiles [ROWS, BLOCK] of lines; each element is read once.

Where a line begins between two vectors, the elements beside it in its first and last vector are read too, and ignored;
so are those beside the last of lines that lie side by side.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import quotient
from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.reductions.shared_kernels import (
    ARGMAX,
    ARGMIN,
    ENDS,
    EXPONENTIALS,
    MOMENTS,
    ONCE_READ,
    accumulator_at,
    chunk_of,
    element_of,
    finished,
    folded,
    folded_elements,
    larger,
    lines_of,
    merged,
    neighbours,
    offset_of,
    opposite,
    shift_of,
    store_second,
)


@jit
def loaded(x, x_at, start, col, reduced, live, UNIT: tl.constexpr, VECTOR: tl.constexpr, PIECES: tl.constexpr = 0):
    """x at positions ``start + col`` of each line.

    ``col``: [BLOCK] of i32; ``live``: which elements exist, or None. PIECES: 1 if those of a block are contiguous, 2 if
    it has those of two rows of the innermost dimension at most, 0 if neither is known.
    """
    if UNIT:
        # The start is not added to ``col``: distances between a thread's elements then are constants of its loads.
        at = x + start.to(tl.int64) + x_at[:, None] + col[None, :]
    elif PIECES == 1:
        along = tl.max_contiguous(tl.multiple_of(offset_of(start, reduced, 1) + col, VECTOR), VECTOR)
        at = x + x_at[:, None] + along[None, :]
    elif len(reduced) == 1:
        # What differs between elements is computed before the loop: between the loads of many elements, products of 64
        # bits keep ptxas (of Triton 3.6) from more than one load at a time.
        at = x + offset_of(start, reduced, 1) + (x_at[:, None] + offset_of(col, reduced, 1)[None, :])
    elif PIECES == 2:
        # Divisions for each element would take longer than reading it.
        size, stride = reduced[0][0][0], reduced[0][1]
        begin = offset_of(start, reduced, 1)
        left = size - (start - quotient(start, reduced[0][0]) * size)
        beyond = offset_of(start + left, reduced, 1) - begin - left.to(tl.int64) * stride
        along = col.to(tl.int64) * stride + tl.where(col >= left, beyond, 0)
        if VECTOR > 1:
            along = tl.max_contiguous(tl.multiple_of(along, VECTOR), VECTOR)
        at = x + begin + (x_at[:, None] + along[None, :])
    else:
        at = x + x_at[:, None] + offset_of(start + col, reduced, 1, VECTOR)[None, :]
    if live is None:
        found = tl.load(at, eviction_policy=ONCE_READ)
    else:
        found = tl.load(at, mask=live, other=0, eviction_policy=ONCE_READ)
    return found


@jit
def taken(
    x,
    x_at,
    start,
    col,
    reduced,
    live,
    order,
    MAP: tl.constexpr,
    COMPUTE: tl.constexpr,
    UNIT: tl.constexpr,
    VECTOR: tl.constexpr,
    PIECES: tl.constexpr = 0,
):
    """What is ``loaded``, mapped as it is accumulated."""
    return element_of(loaded(x, x_at, start, col, reduced, live, UNIT, VECTOR, PIECES), order, MAP, COMPUTE)


@jit
def step_of(a, b, v, live, steps, KIND: tl.constexpr, IDENTITY: tl.constexpr):
    """The accumulators (a, b) with the elements ``v``, the ``steps``-th of each accumulator.

    Of ARGMAX and ARGMIN, b is the number of the step that the extremum comes from: half as wide as a position.
    ``live``: which elements exist, or None.
    """
    if KIND == MOMENTS:
        apart = v - a
        mean = a + apart * (1.0 / tl.full((), steps, a.dtype))
        squares = b + apart * (v - mean)
        if live is not None:
            mean, squares = tl.where(live, mean, a), tl.where(live, squares, b)
        a, b = mean, squares
    elif KIND == ARGMAX or KIND == ARGMIN:
        a, b = merged(a, b, v, tl.full((), steps - 1, tl.int32), live, KIND, IDENTITY)
    elif KIND == EXPONENTIALS:
        a, b = merged(a, b, v, 1.0, live, KIND, IDENTITY)
    else:
        a, b = merged(a, b, v, v, live, KIND, IDENTITY)
    return a, b


@jit
def several(
    x,
    x_at,
    start,
    col,
    reduced,
    left,
    UNIT: tl.constexpr,
    VECTOR: tl.constexpr,
    PIECES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The elements of GROUP blocks of each line, from ``start`` on: see ``loaded``. ``left``: how many elements there
    are, or None if all."""
    blocks = ()
    for i in tl.static_range(GROUP):
        at = start + i * col.shape[0]
        live = None if left is None else (col < left - i * col.shape[0])[None, :]
        blocks = blocks + (loaded(x, x_at, at, col, reduced, live, UNIT, VECTOR, PIECES),)
    return blocks


@jit
def group_of(
    a, b, blocks, before, order, KIND: tl.constexpr, MAP: tl.constexpr, COMPUTE: tl.constexpr, IDENTITY: tl.constexpr
):
    """The accumulators (a, b) with the elements ``loaded`` of several blocks, which come after ``before`` blocks.

    EXPONENTIALS: the maximum of all is found first, and the sum is scaled once. MOMENTS: so is the mean of all, and
    their accumulator is merged with (a, b). Otherwise ptxas would load a block only when the one before is accumulated.
    """
    values = ()
    for i in tl.static_range(len(blocks)):
        values = values + (element_of(blocks[i], order, MAP, COMPUTE),)
    if KIND == MOMENTS:
        PART: tl.constexpr = 1.0 / len(values)
        mean = values[0] * PART  # not of their sum: it may overflow
        for i in tl.static_range(1, len(values)):
            mean = tl.fma(values[i], PART, mean)
        for i in tl.static_range(len(values)):
            b = tl.fma(values[i] - mean, values[i] - mean, b)
        # The weight comes first: it is 0 where there was no block before, whose mean may be so far away that squares
        # overflow.
        share = len(values) / tl.full((), before + len(values), a.dtype)
        apart = mean - a
        b = tl.fma(apart * (share * before), apart, b)
        a = tl.fma(apart, share, a)
    elif KIND == EXPONENTIALS:
        top = a
        for i in tl.static_range(len(values)):
            top = larger(top, values[i])
        shift = shift_of(top)
        b *= tl.exp(a - shift)
        for i in tl.static_range(len(values)):
            b += tl.exp(values[i] - shift)
        a = top
    else:
        for i in tl.static_range(len(values)):
            a, b = step_of(a, b, values[i], None, before + i + 1, KIND, IDENTITY)
    return a, b


@jit
def edge_of(
    x,
    a,
    b,
    x_at,
    step,
    first,
    skipped,
    end,
    inside,
    order,
    KIND: tl.constexpr,
    MAP: tl.constexpr,
    IDENTITY: tl.constexpr,
    COMPUTE: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The accumulators (a, b), merged with the elements of a block of which some places may lie outside the line.

    x_at, skipped, end: [ROWS]. Place p of the block, from step * BLOCK on, is x[x_at + first + p]; it belongs to the
    line if skipped <= p < end. A vector of SHIFT places is read if one of them does.
    """
    place = step * BLOCK + tl.arange(0, BLOCK)
    known = inside[:, None] & ((place // SHIFT * SHIFT)[None, :] < end[:, None])
    v = tl.load(x + x_at[:, None] + (first + place)[None, :], mask=known, other=0, eviction_policy=ONCE_READ)
    v = element_of(v, order, MAP, COMPUTE)
    live = known & (place[None, :] >= skipped[:, None]) & (place[None, :] < end[:, None])
    return step_of(a, b, v, live, step + 1, KIND, IDENTITY)


@jit
def vectored(x, x_at, SHIFT: tl.constexpr, ALIGNED: tl.constexpr):
    """(x, x_at) with x at the beginning of a vector, unless it is ALIGNED, and of SHIFT = 1, which says so of lines."""
    if SHIFT > 1 and not ALIGNED:
        # (In i32: Triton would join it with an offset of 64 bits, and forget that vectors begin there.)
        before = (x.to(tl.int64) // (x.dtype.element_ty.primitive_bitwidth // 8) % SHIFT).to(tl.int32)
        x = tl.multiple_of(x - before, 16)
        x_at += before
    return x, x_at


@jit
def turned_lines(
    x,
    unit,
    turn,
    n,
    kept,
    along,
    reduced,
    ROWS: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    TURNS: tl.constexpr,
    SHIFT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """(x, offsets in x, numbers, which exist, elements of each) of the ROWS lines of group ``unit``, of which every
    TURNS-th element is read, from the ``turn``-th on.

    The stride of these, that of ``reduced``, is a multiple of SHIFT, the elements of a vector. A group has the lines of
    whole vectors, so that the first and the last may have fewer.
    """
    blocks = tl.cdiv(along[0] + SHIFT - 1, ROWS)
    point = (unit // blocks).to(POINT_TYPE)
    place = (unit % blocks).to(POINT_TYPE) * ROWS + tl.arange(0, ROWS)
    x, origin = vectored(x, offset_of(point, kept, 1) + turn * (reduced[0][1] // TURNS), SHIFT, ALIGNED)
    skipped = origin % SHIFT
    lane = place - skipped.to(POINT_TYPE)
    inside = (lane >= 0) & (lane < along[0])
    x_at = origin - skipped + neighbours(place, along[0] + skipped.to(POINT_TYPE), SHIFT)
    x_at = tl.max_contiguous(tl.multiple_of(x_at, SHIFT), SHIFT)
    return x, x_at, point * along[0] + lane, inside, (n - turn + TURNS - 1) // TURNS


@jit
def reduce_kernel(
    x,
    out,
    second,
    firsts,
    seconds,
    kept,
    along,
    reduced,
    rows,
    size,
    lanes,
    outer,
    n,
    chunk,
    chunks,
    correction,
    order,
    KIND: tl.constexpr,
    MAP: tl.constexpr,
    FINISH: tl.constexpr,
    IDENTITY: tl.constexpr,
    COMPUTE: tl.constexpr,
    RESULT: tl.constexpr,
    ACROSS: tl.constexpr,
    BESIDE: tl.constexpr,
    FLAT: tl.constexpr,
    UNIT: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFT: tl.constexpr,
    ONCE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SINGLE: tl.constexpr,
    FULL: tl.constexpr,
    AHEAD: tl.constexpr,
    GROUP: tl.constexpr,
    ALL: tl.constexpr,
    PIECES: tl.constexpr,
    TURNS: tl.constexpr,
    LANES_BESIDE: tl.constexpr,
    POINT_TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out[r] = finish(accumulate over k of map(x[r, k])); with ``chunks``, the accumulators of each chunk instead.

    x: any element, at offset kept[r] + reduced[k]; out: [lanes] of RESULT; second: [lanes], or None, see
    ``store_second``; firsts, seconds: [lanes, chunks] of accumulators, or None. A program reduces one chunk of ROWS
    lines with BLOCK accumulators a line, each over every BLOCK-th element, which are merged at the end. BESIDE: see
    ``neighbours``; FLAT: ``flat_lines``; LANES_BESIDE: ``accumulator_at``. AHEAD: a block is loaded before the previous
    one is accumulated; GROUP is 1 then. GROUP: so many blocks are loaded before the first of them is accumulated; ALL:
    lines have no other blocks. PIECES: 1 where lines have several dimensions, and consist of whole blocks that lie
    within the innermost, which is contiguous; 2 where the innermost one of several is as long as a block at least.

    SHIFT = 1: lines are read from their first element on. SHIFT > 1, with ROWS = 1: vectors of SHIFT elements are
    aligned, and a line may begin at any element of one. It is read from that vector on: element k of a line that begins
    ``skipped`` elements behind goes to accumulator (k + skipped) % BLOCK. At the end the accumulators are moved back by
    ``skipped``, so that the bits of the result do not depend on where the line begins. ALIGNED: x begins at a vector.

    ONCE: a line has fewer than BLOCK elements, whose order does not matter. All are read at once, in whole vectors;
    none is moved back, and SHIFT only says where lines begin.

    SINGLE: lines have one block, which they fill if FULL.

    TURNS > 1: lines lie side by side, and the rows that hold one element of each begin between vectors, but every
    TURNS-th at the same distance from one. A chunk has elements of such rows only: see ``turned_lines``. BESIDE is then
    the elements of a vector.

    rows, size: where a line consists of contiguous rows, the dimensions along which these lie, and the elements of one;
    a chunk then has whole rows. Each is read as such a line, but its accumulators are not moved back.
    """
    begin(OVERLAPS)
    group, part, first, chunk = chunk_of(n, chunk, chunks)
    if TURNS > 1:
        x, x_at, number, inside, count = turned_lines(
            x, group, part % TURNS, n, kept, along, reduced, ROWS, POINT_TYPE, TURNS, BESIDE, ALIGNED
        )
        first = (part // TURNS).to(n.dtype) * chunk
        count = tl.maximum(count, first)
    else:
        x_at, out_at, second_at, number, inside = lines_of(
            group, lanes, outer, kept, along, ACROSS, ROWS, POINT_TYPE, BESIDE, FLAT
        )
        count = n
    length = tl.minimum(count - first, chunk)
    col = tl.arange(0, BLOCK)
    a = tl.full((ROWS, BLOCK), IDENTITY, COMPUTE)
    if KIND == ENDS:
        b = tl.full((ROWS, BLOCK), opposite(IDENTITY), COMPUTE)
    else:
        b = tl.zeros((ROWS, BLOCK), tl.int32 if KIND == ARGMAX or KIND == ARGMIN else COMPUTE)
    # Only the last block is masked: a mask whose length is not a multiple of 16 bytes narrows loads.
    whole = length // BLOCK
    if rows is not None:
        each, origin = chunk // size, size * 0
        for row in range(part * each, tl.minimum((part + 1) * each, n // size)):
            at = x_at + offset_of(number * 0 + row, rows, 1)
            skipped = at % SHIFT
            at = tl.multiple_of(at - skipped, SHIFT)
            end = size + skipped
            a, b = edge_of(x, a, b, at, 0, 0, skipped, end, inside, order, KIND, MAP, IDENTITY, COMPUTE, SHIFT, BLOCK)
            for step in range(1, size // BLOCK):
                v = taken(x, at, origin + step * BLOCK, col, reduced, None, order, MAP, COMPUTE, True, VECTOR)
                a, b = step_of(a, b, v, None, step + 1, KIND, IDENTITY)
            for step in range(tl.maximum(size // BLOCK, 1), tl.cdiv(size + SHIFT - 1, BLOCK)):
                a, b = edge_of(
                    x, a, b, at, step, 0, skipped, end, inside, order, KIND, MAP, IDENTITY, COMPUTE, SHIFT, BLOCK
                )
    elif ONCE:
        x, x_at = vectored(x, x_at, SHIFT, ALIGNED)
        skipped = (x_at % SHIFT).to(tl.int32)
        x_at = tl.multiple_of(x_at - skipped, SHIFT)
        end = n.to(tl.int32) + skipped
        PLACES: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
        known = (col // PLACES * PLACES)[None, :] < end[:, None]
        v = tl.load(x + x_at[:, None] + col[None, :], mask=known, other=0, eviction_policy=ONCE_READ)
        v = element_of(v, order, MAP, COMPUTE)
        live = (col[None, :] >= skipped[:, None]) & (col[None, :] < end[:, None])
        a, b = step_of(a, b, v, live, 1, KIND, IDENTITY)
        if KIND == ARGMAX or KIND == ARGMIN:
            # (Places before the line are then the largest numbers, and those behind it larger than all of the line's.)
            b = (col[None, :] - skipped[:, None]).to(tl.uint32, bitcast=True)
    elif SHIFT > 1:
        x, x_at = vectored(x, x_at, SHIFT, ALIGNED)
        skipped = x_at % SHIFT
        x_at = tl.multiple_of(x_at - skipped, SHIFT)
        end = length + skipped
        a, b = edge_of(x, a, b, x_at, 0, first, skipped, end, inside, order, KIND, MAP, IDENTITY, COMPUTE, SHIFT, BLOCK)
        for step in range(1, whole):
            start = first + step * BLOCK
            v = taken(x, x_at, start, col, reduced, None, order, MAP, COMPUTE, UNIT, VECTOR)
            a, b = step_of(a, b, v, None, step + 1, KIND, IDENTITY)
        for step in range(tl.maximum(whole, 1), tl.cdiv(length + SHIFT - 1, BLOCK)):
            a, b = edge_of(
                x, a, b, x_at, step, first, skipped, end, inside, order, KIND, MAP, IDENTITY, COMPUTE, SHIFT, BLOCK
            )
        # In one axis: a gather along the second of two spills thousands of bytes.
        turn = (tl.sum(skipped, 0).to(tl.int32) + col) % BLOCK
        a = tl.gather(tl.reshape(a, (BLOCK,)), turn, 0)[None, :]
        if KIND == EXPONENTIALS or KIND == ENDS:
            b = tl.gather(tl.reshape(b, (BLOCK,)), turn, 0)[None, :]
    elif SINGLE:
        live = None if FULL else (col < n)[None, :]
        v = taken(x, x_at, first, col, reduced, live, order, MAP, COMPUTE, UNIT, VECTOR)
        if KIND != MOMENTS and KIND != EXPONENTIALS:
            a, b = step_of(a, b, v, live, 1, KIND, IDENTITY)
    else:
        if ALL:
            blocks = several(x, x_at, first, col, reduced, None, UNIT, VECTOR, PIECES, GROUP)
            a, b = group_of(a, b, blocks, 0, order, KIND, MAP, COMPUTE, IDENTITY)
        elif AHEAD:
            if whole > 0:
                v = taken(x, x_at, first, col, reduced, None, order, MAP, COMPUTE, UNIT, VECTOR)
                for step in range(1, whole):
                    start = first + step * BLOCK
                    following = taken(x, x_at, start, col, reduced, None, order, MAP, COMPUTE, UNIT, VECTOR)
                    a, b = step_of(a, b, v, None, step, KIND, IDENTITY)
                    v = following
                a, b = step_of(a, b, v, None, whole, KIND, IDENTITY)
        else:
            grouped = whole // GROUP * GROUP if GROUP > 1 else 0
            for step in range(0, grouped, GROUP):
                start = first + step * BLOCK
                blocks = several(x, x_at, start, col, reduced, None, UNIT, VECTOR, PIECES, GROUP)
                a, b = group_of(a, b, blocks, step, order, KIND, MAP, COMPUTE, IDENTITY)
            if ACROSS and GROUP > 1:  # a mask along lines does not narrow loads across them
                if grouped * BLOCK < length:
                    left = length - grouped * BLOCK
                    start = first + grouped * BLOCK
                    blocks = several(x, x_at, start, col, reduced, left, UNIT, VECTOR, PIECES, GROUP)
                    for i in tl.static_range(GROUP):
                        v = element_of(blocks[i], order, MAP, COMPUTE)
                        live = (col < left - i * BLOCK)[None, :]
                        a, b = step_of(a, b, v, live, grouped + i + 1, KIND, IDENTITY)
            else:
                for step in range(grouped, whole):
                    start = first + step * BLOCK
                    v = taken(x, x_at, start, col, reduced, None, order, MAP, COMPUTE, UNIT, VECTOR, PIECES)
                    a, b = step_of(a, b, v, None, step + 1, KIND, IDENTITY)
        if not ALL and PIECES != 1 and not (ACROSS and GROUP > 1) and whole * BLOCK < length:
            start = first + whole * BLOCK
            live = (col < count - start)[None, :]
            v = taken(x, x_at, start, col, reduced, live, order, MAP, COMPUTE, UNIT, VECTOR)
            a, b = step_of(a, b, v, live, whole + 1, KIND, IDENTITY)
    if (KIND == ARGMAX or KIND == ARGMIN) and not ONCE:
        b = first + b.to(n.dtype) * BLOCK + col[None, :]
    if SINGLE and (KIND == MOMENTS or KIND == EXPONENTIALS):
        a, b = folded_elements(v, live, n.to(COMPUTE), KIND)
    else:
        # Two divisions for all accumulators, which have ``whole`` elements or one more.
        has_more, fewer, more = (col < length - whole * BLOCK)[None, :], whole.to(COMPUTE), (whole + 1).to(COMPUTE)
        share = tl.where(has_more, more / length.to(COMPUTE), fewer / length.to(COMPUTE))
        a, b = folded(a, b, tl.where(has_more, more, fewer), share, KIND)
    if firsts is None:
        tl.store(out + out_at, finished(a, b, n.to(COMPUTE), correction, order, FINISH).to(RESULT), mask=inside)
        if second is not None:
            store_second(second + second_at, a, b, inside, KIND)
    else:
        at = accumulator_at(number, part, lanes, chunks, LANES_BESIDE)
        tl.store(firsts + at, a, mask=inside)
        if seconds is not None:
            tl.store(seconds + at, b, mask=inside)
