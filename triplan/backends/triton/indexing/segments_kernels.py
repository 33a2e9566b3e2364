"""Sums over sorted segments: a segment is the run of contributions to one slot, ascending in position.

The order of the additions is defined by the segment alone. Contributions are added one after another in chunks of
CHUNK, counted from the segment's start; then the chunks' sums one after another in groups of CHUNK chunks, the first
group starting with the first chunk; then the groups' sums one after another; and the result is added to what the table
held. No reduction across lanes takes part, so the bits depend neither on block sizes nor on the number of warps.

The first chunk of a segment is summed by ``segments_kernel``, which owns the table's elements. Of the others (*late*
chunks) at most one starts in any window of CHUNK sorted positions: ``chunks_kernel`` sums it into the row of
``partials`` of that window, and ``groups_kernel`` sums the rows of whole groups. So even a slot that receives all
contributions is summed by all multiprocessors. Where no segment is long, both return after three loads.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.offsets_kernels import unravel
from triplan.backends.triton.indexing.sorting_kernels import lower_bound


@jit
def add_scaled(acc, x, alpha):
    """acc + x * alpha with one rounding.

    The FMA is explicit: otherwise the compiler would fuse in one kernel and not in another, and their bits differ.
    """
    x = x.to(acc.dtype)
    if alpha is None:
        acc += x
    elif acc.dtype.is_floating():
        # A tensor, because in Triton's interpreter a plain number would pass through f32 on its way into fma.
        acc = tl.fma(x, tl.full((), alpha, acc.dtype), acc)
    else:
        acc += x * alpha
    return acc


@jit
def walk(position, span, sizes, strides, FLAT: tl.constexpr, OFFSET: tl.constexpr):
    """position * span if FLAT, else the offset of ``position``, numbered over ``sizes``, under ``strides``."""
    if FLAT:
        offset = position.to(OFFSET) * span
    else:
        offset = unravel(position.to(OFFSET), sizes, strides)
    return offset


@jit
def add_contributions(
    acc, dense, order, first, last, live, alpha, inner, sizes, strides, FLAT: tl.constexpr, OFFSET: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """acc[r, c] + sum of alpha * dense[order[i], c] for i in first[r] ... last[r] - 1, one after another.

    ``acc`` (ROWS, COLS); ``first`` and ``last`` (ROWS,); ``dense`` (ROWS, COLS) addresses the lanes of the contribution
    at position 0. UNROLL contributions are loaded at a time.
    """
    length = tl.max(last - first, axis=0)
    for step in range(0, length, UNROLL):
        for u in tl.static_range(UNROLL):
            valid = first + (step + u) < last
            position = tl.load(order + first + (step + u), mask=valid, other=0)
            offset = walk(position, inner, sizes, strides, FLAT, OFFSET)
            hit = valid[:, None] & live
            x = tl.load(dense + offset[:, None], mask=hit, other=0)
            acc = tl.where(hit, add_scaled(acc, x, alpha), acc)
    return acc


@jit
def add_partials(acc, partials, lanes, row, first, last, stride, live, UNROLL: tl.constexpr):
    """acc[r, c] + sum of partials[row[r] + k, c] for k in range(first[r], last[r], stride), one after another.

    ``acc`` (ROWS, COLS); ``row``, ``first`` and ``last`` (ROWS,); ``partials`` addresses row 0; its rows have
    stride ``lanes``.
    """
    length = tl.max(last - first, axis=0)
    for step in range(0, length, UNROLL * stride):
        for u in tl.static_range(UNROLL):
            k = first + (step + u * stride)
            hit = (k < last)[:, None] & live
            x = tl.load(partials + (row + k).to(tl.int64)[:, None] * lanes, mask=hit, other=0)
            acc = tl.where(hit, acc + x, acc)
    return acc


@jit
def late_chunk(keys, count, window, slots, steps, CHUNK: tl.constexpr):
    """(start, number within its segment, whether it exists) of the late chunk that starts in ``window``.

    ``keys`` (count,) i32, sorted. The segment of such a chunk also covers the CHUNK positions before it, and so the
    window's first position and the one half a window before or behind that: comparing these rules out most
    windows.
    """
    first = window * CHUNK
    key = tl.load(keys + first)
    before = tl.load(keys + first - CHUNK // 2, mask=first > 0, other=-1)
    after = tl.load(keys + first + CHUNK // 2, mask=first + CHUNK // 2 < count, other=-1)
    start = first
    number = first * 0
    found = (key < slots) & ((key == before) | (key == after))
    if found:
        segment = lower_bound(keys, key, first * 0, first, steps)
        number = (first - segment + CHUNK - 1) // CHUNK
        start = segment + number * CHUNK
        found = (number > 0) & (tl.load(keys + start, mask=start < count, other=-1) == key)
    return start, number, found


@jit
def segment_end(keys, start, reach, count, steps):
    """The end of the run of keys equal to keys[start], at most start + reach."""
    return lower_bound(keys, tl.load(keys + start) + 1, start, tl.minimum(start + reach, count), steps)


@jit
def chunks_kernel(
    dense,
    keys,
    order,
    partials,
    alpha,
    count,
    slots,
    outer,
    inner,
    span,
    steps,
    outer_sizes,
    outer_dense,
    inner_sizes,
    inner_dense,
    step_sizes,
    step_dense,
    FLAT: tl.constexpr,
    OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """partials[window, lane] = sum of the late chunk that starts in ``window``, if there is one.

    ``dense`` (count, outer x inner lanes, or ``span`` from one contribution to the next), of any strides; ``keys`` and
    ``order`` (count,) i32; ``partials`` (windows, outer * inner) in COMPUTE. A program sums ROWS of the outer lanes
    times COLS of the inner ones.
    """
    pid = tl.program_id(0)
    col_blocks = tl.cdiv(inner, COLS)
    row_blocks = tl.cdiv(outer, ROWS)
    window = pid // (row_blocks * col_blocks)
    start, _, found = late_chunk(keys, count, window, slots, steps, CHUNK)
    if found:
        row = (pid // col_blocks) % row_blocks * ROWS + tl.arange(0, ROWS)
        col = pid % col_blocks * COLS + tl.arange(0, COLS)
        step = inner if span is None else span
        live = (row < outer)[:, None] & (col < step)[None, :]
        lane = walk(row, count.to(OFFSET) * step, outer_sizes, outer_dense, FLAT, OFFSET)[:, None]
        lane += walk(col, 1, inner_sizes, inner_dense, FLAT, OFFSET)[None, :]
        last = segment_end(keys, start, CHUNK, count, steps)
        acc = add_contributions(
            tl.zeros((ROWS, COLS), COMPUTE), dense + lane, order, row * 0 + start, row * 0 + last, live, alpha, step,
            step_sizes, step_dense, FLAT, OFFSET, UNROLL,
        )  # fmt: skip
        to = (window.to(tl.int64) * outer + row)[:, None] * inner + col[None, :]
        tl.store(partials + to, acc, mask=live & (col < inner)[None, :])


@jit
def groups_kernel(
    keys,
    partials,
    count,
    slots,
    lanes,
    steps,
    CHUNK: tl.constexpr,
    COLS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """partials[w] += sum of partials[w + 1 ... w + CHUNK - 1], where a group other than a segment's first starts in w.

    ``keys`` (count,) i32; ``partials`` (windows, lanes). A group has CHUNK chunks as a chunk has CHUNK positions: at
    most one starts in CHUNK windows.
    """
    pid = tl.program_id(0)
    col_blocks = tl.cdiv(lanes, COLS)
    start, _, found = late_chunk(keys, count, pid // col_blocks, slots, steps, CHUNK * CHUNK)
    if found:
        window = start // CHUNK
        last = segment_end(keys, start, CHUNK * CHUNK, count, steps)
        chunks = (last - start + CHUNK - 1) // CHUNK
        col = pid % col_blocks * COLS + tl.arange(0, COLS)
        live = (col < lanes)[None, :]
        first = tl.arange(0, 1)
        own = partials + col.to(tl.int64)[None, :]
        to = own + window.to(tl.int64) * lanes
        acc = tl.load(to, mask=live, other=0)
        acc = add_partials(acc, own, lanes, first + window, first + 1, first + chunks, 1, live, UNROLL)
        tl.store(to, acc, mask=live)


@jit
def segments_kernel(
    dense,
    table,
    keys,
    order,
    starts,
    partials,
    alpha,
    count,
    slots,
    items,
    outer,
    inner,
    span,
    steps,
    outer_sizes,
    outer_dense,
    outer_table,
    inner_sizes,
    inner_dense,
    inner_table,
    step_sizes,
    step_dense,
    slot_sizes,
    slot_strides,
    KEEP: tl.constexpr,
    FLAT: tl.constexpr,
    OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """table[slot, lane] = sum of the slot's segment, added to what the table holds with KEEP.

    ``dense`` (count, outer x inner lanes, or ``span`` from one contribution to the next) and ``table`` (slots, outer x
    inner), of any strides; ``keys`` and ``order`` (count,) i32; ``starts`` (slots + 1,) i32; ``partials`` (windows,
    outer * inner) in COMPUTE. A program takes COLS inner lanes of ROWS items: slots, whose segments ``starts`` bounds;
    or, if ``starts`` is None, sorted positions, and the position that starts a segment sums it. With KEEP slots without
    contributions are not written.
    """
    pid = tl.program_id(0)
    col_blocks = tl.cdiv(inner, COLS)
    item_blocks = tl.cdiv(items, ROWS)
    item = (pid // col_blocks) % item_blocks * ROWS + tl.arange(0, ROWS)
    live_item = item < items
    if starts is None:
        key = tl.load(keys + item, mask=live_item, other=slots)
        former = tl.load(keys + item - 1, mask=live_item & (item > 0), other=-1)
        owned = live_item & (key < slots) & (key != former)
        slot = key
        first = item
        at = item[:, None] + 1 + tl.arange(0, CHUNK)[None, :]
        inside = owned[:, None] & (at < count)
        same = inside & (tl.load(keys + at, mask=inside, other=-1) == key[:, None])
        last = first + owned.to(tl.int32) + tl.sum(same.to(tl.int32), axis=1)
        if tl.max(last - first, axis=0) > CHUNK:
            high = tl.where(last - first > CHUNK, count, last)
            last = lower_bound(keys, key + 1, last, high, steps)
    else:
        slot = item
        first = tl.load(starts + item, mask=live_item, other=0)
        last = tl.load(starts + item + 1, mask=live_item, other=0)
        if KEEP:
            owned = live_item & (last > first)
        else:
            owned = live_item
    if tl.max(owned.to(tl.int32), axis=0) > 0:
        outer_row = pid // (col_blocks * item_blocks)
        col = pid % col_blocks * COLS + tl.arange(0, COLS)
        step = inner if span is None else span
        live = owned[:, None] & (col < step)[None, :]
        kept = owned[:, None] & (col < inner)[None, :]
        lane = walk(col, 1, inner_sizes, inner_dense, FLAT, OFFSET)
        lane += walk(outer_row, count.to(OFFSET) * step, outer_sizes, outer_dense, FLAT, OFFSET)
        to = walk(col, 1, inner_sizes, inner_table, FLAT, OFFSET)
        to += walk(outer_row, slots.to(OFFSET) * inner, outer_sizes, outer_table, FLAT, OFFSET)
        own = table + (walk(slot, inner, slot_sizes, slot_strides, FLAT, OFFSET)[:, None] + to[None, :])
        if KEEP:
            held = tl.load(own, mask=kept, other=0)
        acc = tl.zeros((ROWS, COLS), COMPUTE)
        split = tl.minimum(last, first + CHUNK)
        acc = add_contributions(
            acc, dense + lane[None, :], order, first, split, live, alpha, step,
            step_sizes, step_dense, FLAT, OFFSET, UNROLL,
        )  # fmt: skip
        if partials is not None:
            chunks = (last - first + CHUNK - 1) // CHUNK
            longest = tl.max(chunks, axis=0)
            if longest > 1:
                row = first // CHUNK  # chunk k starts in window row + k
                lanes = outer.to(tl.int64) * inner
                sums = partials + (outer_row.to(tl.int64) * inner + col)[None, :]
                grouped = tl.minimum(chunks, CHUNK)
                acc = add_partials(acc, sums, lanes, row, first * 0 + 1, grouped, 1, kept, UNROLL)
                if longest > CHUNK:
                    acc = add_partials(acc, sums, lanes, row, first * 0 + CHUNK, chunks, CHUNK, kept, UNROLL)
        if KEEP:
            acc += held.to(COMPUTE)
        tl.store(own, acc.to(table.dtype.element_ty), mask=kept)


@jit
def wide_kernel(
    dense,
    table,
    order,
    starts,
    partials,
    alpha,
    count,
    slots,
    outer,
    inner,
    span,
    KEEP: tl.constexpr,
    OFFSET: tl.constexpr,
    COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr,
    COLS: tl.constexpr,
    UNROLL: tl.constexpr,
    LOOP: tl.constexpr,
):
    """table[slot, lane] = sum of the slot's segment, added to what the table holds with KEEP.

    As ``segments_kernel`` with ``starts``, for packed operands and wide rows: a program takes COLS inner lanes of LOOP
    slots, one after another. A segment's bounds, its first positions and its first values depend on each other, and
    each is a round trip to memory. The bounds and positions of the next slot are loaded while this one is summed, so
    that only the values are waited for.
    """
    pid = tl.program_id(0)
    col_blocks = tl.cdiv(inner, COLS)
    blocks = tl.cdiv(slots, LOOP)
    base = (pid // col_blocks) % blocks * LOOP
    outer_row = pid // (col_blocks * blocks)
    col = pid % col_blocks * COLS + tl.arange(0, COLS)
    step = inner if span is None else span
    live = col < step
    kept = col < inner
    dense += outer_row.to(OFFSET) * count * step
    table += outer_row.to(OFFSET) * slots * inner
    first = tl.load(starts + base)
    last = tl.load(starts + base + 1)
    one = tl.load(order + first, mask=first < last, other=0)
    two = tl.load(order + first + 1, mask=first + 1 < last, other=0)
    for turn in range(LOOP):
        slot = base + turn
        end = tl.load(starts + slot + 2, mask=slot + 1 < slots, other=0)
        next_one = tl.load(order + last, mask=last < end, other=0)
        next_two = tl.load(order + last + 1, mask=last + 1 < end, other=0)
        if slot < slots:
            own = table + (slot.to(OFFSET) * inner + col)
            if KEEP:
                owned = kept & (first < last)
                held = tl.load(own, mask=owned, other=0)
            else:
                owned = kept
            # Both loads are issued before either value is added.
            x = tl.load(dense + (one.to(OFFSET) * step + col), mask=live & (first < last), other=0)
            y = tl.load(dense + (two.to(OFFSET) * step + col), mask=live & (first + 1 < last), other=0)
            acc = tl.zeros((COLS,), COMPUTE)
            acc = tl.where(first < last, add_scaled(acc, x, alpha), acc)
            acc = tl.where(first + 1 < last, add_scaled(acc, y, alpha), acc)
            split = tl.minimum(last, first + CHUNK)
            for done in range(first + 2, split, UNROLL):
                for u in tl.static_range(UNROLL):
                    valid = done + u < split
                    position = tl.load(order + done + u, mask=valid, other=0)
                    z = tl.load(dense + (position.to(OFFSET) * step + col), mask=live & valid, other=0)
                    acc = tl.where(valid, add_scaled(acc, z, alpha), acc)
            if partials is not None:
                if last - first > CHUNK:
                    chunks = (last - first + CHUNK - 1) // CHUNK
                    lanes = outer.to(tl.int64) * inner
                    sums = partials + (first // CHUNK) * lanes + outer_row.to(tl.int64) * inner
                    grouped = tl.minimum(chunks, CHUNK)
                    for k in range(1, grouped, UNROLL):
                        for u in tl.static_range(UNROLL):
                            valid = k + u < grouped
                            part = tl.load(sums + (k + u) * lanes + col, mask=kept & valid, other=0)
                            acc = tl.where(valid, acc + part, acc)
                    for k in range(CHUNK, chunks, CHUNK):
                        acc += tl.load(sums + k * lanes + col, mask=kept, other=0)
            if KEEP:
                acc += held.to(COMPUTE)
            tl.store(own, acc.to(table.dtype.element_ty), mask=owned)
        first, last, one, two = last, end, next_one, next_two
