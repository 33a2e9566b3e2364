"""The first k of each row in order, entry ``filtered``: a program reads its part of a row once, and little of it again.

The columns of a part form GROUPS strided groups: group g holds the columns g, g + GROUPS, and so on. Elements are
ordered by (key, position), in which no two are equal. The first k of them lie in the k groups whose own first elements
come first: an element of another group is preceded by the first elements of these k. So a first read finds the first
element of each group, a bisection the k-th of these, and only the k groups up to it are read again. Of these all
elements are kept that do not come behind that k-th one: k at least, and in random rows hardly more.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import axis_offset
from triplan.backends.triton.sorting.shared_kernels import load_keys


@jit
def kth_bound(key, counted, k):
    """An integer that ``k`` of the ``key`` that are ``counted`` do not pass, more only if they equal the k-th of them.

    A bisection between the smallest and the largest of these, one step for each bit of what lies between. It ends as
    soon as a trial leaves ``k`` below itself.
    """
    WIDTH: tl.constexpr = key.dtype.primitive_bitwidth
    HIGHEST: tl.constexpr = (1 << (WIDTH - 1)) - 1
    UNSIGNED: tl.constexpr = tl.uint64 if WIDTH == 64 else tl.uint32
    lowest = tl.min(tl.where(counted, key, HIGHEST), 0)
    between = (tl.max(tl.where(counted, key, -HIGHEST - 1), 0) - lowest).to(UNSIGNED, bitcast=True)
    # The exponent of a float: one too many where it has been rounded up to a power of two, none of 0.
    bit = tl.minimum((between.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, WIDTH) - 1
    found = between * 0
    is_between = found
    while bit >= 0:
        trial = found + (tl.full((), 1, UNSIGNED) << bit.to(UNSIGNED))
        below = tl.sum((counted & (key < lowest + trial.to(key.dtype, bitcast=True))).to(tl.int32), 0)
        is_inside = trial <= between  # (Otherwise the sum above may have overflowed.)
        found = tl.where(is_inside & (below <= k), trial, found)
        is_between = (is_inside & (below == k)).to(UNSIGNED)
        bit = tl.where(is_inside & (below == k), -1, bit - 1)
    return lowest + (found - is_between).to(key.dtype, bitcast=True)


@jit
def first_groups(key, place, k):
    """(which k pairs of ``key`` and ``place`` come first, and a key and a place that these do not pass)."""
    last = kth_bound(key, key == key, k)
    is_below = key < last
    is_equal = key == last
    missing = k - tl.sum(is_below.to(tl.int32), 0)
    at = tl.full((), 0x7FFFFFFF, tl.int32)
    # Only where more of them are equal than are missing do places decide.
    if tl.sum(is_equal.to(tl.int32), 0) > missing:
        at = kth_bound(place, is_equal, missing)
    return is_below | (is_equal & (place <= at)), last, at


@jit
def keep_first(keys, places, kept, k, TILE: tl.constexpr):
    """Keep the first ``k`` of the ``kept`` pairs in keys and places, which lie in the order of places, and do so after.

    TILE pairs at a time, of which k are those that have been kept so far. TILE is larger than k.
    """
    lane = tl.arange(0, TILE)
    held = tl.full((), 0, tl.int32)
    done = tl.full((), 0, tl.int32)
    while done < kept:
        i = tl.where(lane < held, lane, lane + done - held)
        known = i < kept
        key = tl.load(keys + i, mask=known, other=0)
        last = kth_bound(key, known, k)
        is_first = known & (key < last)
        is_equal = known & (key == last)
        missing = k - tl.sum(is_first.to(tl.int32), 0)
        is_first = is_first | (is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= missing))
        to = tl.cumsum(is_first.to(tl.int32), 0) - 1
        place = tl.load(places + i, mask=is_first, other=0)
        tl.debug_barrier()  # all threads have read
        tl.store(keys + to, key, mask=is_first)
        tl.store(places + to, place, mask=is_first)
        tl.debug_barrier()
        done += TILE - held
        held = k


@jit
def last_place_of(keys, places, k, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The place of the last of the first ``k`` pairs in keys and places, which lie in the order of places."""
    last = tl.full((), -(1 << (BITS - 1)), keys.dtype.element_ty)
    found = tl.full((), 0, tl.int32)
    for start in range(0, k, BLOCK):
        i = start + tl.arange(0, BLOCK)
        key = tl.load(keys + i, mask=i < k, other=-(1 << (BITS - 1)))
        place = tl.load(places + i, mask=i < k, other=-1)
        highest = tl.max(key, 0)
        found = tl.where(highest >= last, tl.max(tl.where(key == highest, place, -1), 0), found)
        last = tl.maximum(last, highest)
    return found


@jit
def store_taken(at, order, values, indices, x_step, order_step, values_step, indices_step, place, to, is_taken):
    """values[to], indices[to] = the elements ``place`` of the row at ``at``, and where they were, if ``is_taken``."""
    bits = tl.load(at + axis_offset(place, x_step), mask=is_taken, other=0)
    tl.store(values + axis_offset(to, values_step), bits, mask=is_taken)
    index = place
    if order is not None:
        index = tl.load(order + axis_offset(place, order_step), mask=is_taken, other=0)
    tl.store(indices + axis_offset(to, indices_step), index.to(indices.dtype.element_ty), mask=is_taken)


@jit
def filtered_kernel(
    x,
    order,
    values,
    indices,
    x_strides,
    order_strides,
    values_strides,
    indices_strides,
    groups,
    keys,
    places,
    n,
    k,
    parts,
    span,
    capacity,
    BITS: tl.constexpr,
    INFINITY: tl.constexpr,
    DESCENDING: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    OWN: tl.constexpr,
    OTHERS: tl.constexpr,
    TILE: tl.constexpr,
    ONLY_KTH: tl.constexpr,
):
    """values[r, p], indices[r, p] = the first ``k`` of part p of x[r], and their positions.

    x: [rows, n]; values: [rows, parts * k], both as integers of their width; indices: [rows, parts * k] of i32 or i64;
    order: None, or [rows, n], the positions that the elements had. A part has ``span`` columns, the last one all that
    are left: GROUPS at least; or ``parts`` is None, and a row is one part. A program takes one part. Its scratch:
    groups, [k], and keys and places, [capacity].

    The first k are stored in order: the elements that are kept are ranked, OWN at a time, by comparison with OTHERS at
    a time. If TILE, a power of two of 2 * k at least, is not 0, they are stored as they lie in x: a second bisection
    finds them, which takes less time than comparing all pairs of many. With ONLY_KTH, of one part, values and indices
    are [rows, 1]: only the ``k``-th is stored.
    """
    row = tl.program_id(0).to(tl.int64)
    begin = 0
    end = n
    taken = tl.full((), 0, tl.int32)
    if parts is not None:
        row = (tl.program_id(0) // parts).to(tl.int64)
        part = tl.program_id(0) % parts
        begin = part * span
        end = tl.where(part == parts - 1, n, begin + span)
        taken = part * k
    groups += tl.program_id(0).to(tl.int64) * k
    keys += tl.program_id(0).to(tl.int64) * capacity
    places += tl.program_id(0).to(tl.int64) * capacity
    at = x + row * x_strides[0]

    group = tl.arange(0, GROUPS)
    place = begin + group
    first = load_keys(at, x_strides[1], place, place < end, BITS, INFINITY, DESCENDING)
    for start in range(begin + GROUPS, end, GROUPS):
        col = start + group
        key = load_keys(at, x_strides[1], col, col < end, BITS, INFINITY, DESCENDING)
        # (Positions ascend: of equal elements the earlier one stays.)
        is_before = (key < first) & (col < end)
        first = tl.where(is_before, key, first)
        place = tl.where(is_before, col, place)
    is_chosen, last, last_place = first_groups(first, place, k)
    tl.store(groups + tl.cumsum(is_chosen.to(tl.int32), 0) - 1, group, mask=is_chosen)
    tl.debug_barrier()  # threads read what other threads of the program have written

    kept = tl.full((), 0, tl.int32)
    for start in range(0, capacity, BLOCK):
        i = start + tl.arange(0, BLOCK)
        col = begin + tl.load(groups + i % k) + i // k * GROUPS
        key = load_keys(at, x_strides[1], col, col < end, BITS, INFINITY, DESCENDING)
        is_kept = ((key < last) | ((key == last) & (col <= last_place))) & (col < end) & (i < capacity)
        to = kept + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        tl.store(keys + to, key, mask=is_kept)
        tl.store(places + to, col, mask=is_kept)
        kept += tl.sum(is_kept.to(tl.int32), 0)
    tl.debug_barrier()

    values += row * values_strides[0]
    indices += row * indices_strides[0]
    order_step = None
    if order is not None:
        order += row * order_strides[0]
        order_step = order_strides[1]
    x_step, values_step, indices_step = x_strides[1], values_strides[1], indices_strides[1]
    if TILE > 0:
        if kept > k:
            keep_first(keys, places, kept, k, TILE)
        if ONLY_KTH:
            at_last = last_place_of(keys, places, k, BITS, BLOCK)
        for start in range(0, k, BLOCK):
            i = start + tl.arange(0, BLOCK)
            col = tl.load(places + i, mask=i < k, other=0)
            is_taken = i < k
            to = taken + i
            if ONLY_KTH:
                is_taken = is_taken & (col == at_last)
                to = i * 0
            store_taken(at, order, values, indices, x_step, order_step, values_step, indices_step, col, to, is_taken)
    else:
        for start in range(0, kept, OWN):
            i = start + tl.arange(0, OWN)
            own = tl.load(keys + i, mask=i < kept, other=0)
            own_place = tl.load(places + i, mask=i < kept, other=0)
            before = tl.zeros((OTHERS, OWN), tl.int32)
            for other in range(0, kept, OTHERS):
                j = other + tl.arange(0, OTHERS)
                key = tl.load(keys + j, mask=j < kept, other=0)[:, None]
                col = tl.load(places + j, mask=j < kept, other=0)[:, None]
                is_before = (key < own[None, :]) | ((key == own[None, :]) & (col < own_place[None, :]))
                before += (is_before & (j < kept)[:, None]).to(tl.int32)
            rank = tl.sum(before, 0)
            is_taken = (i < kept) & (rank < k)
            to = taken + rank
            if ONLY_KTH:
                is_taken = is_taken & (rank == k - 1)
                to = rank * 0
            store_taken(
                at, order, values, indices, x_step, order_step, values_step, indices_step, own_place, to, is_taken
            )
