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
def kth_bound(key, counted, k, bits, lowest):
    """An integer that ``k`` of the ``key`` that are ``counted`` do not pass, more only if they equal the k-th of them.

    A bisection over integers of ``bits`` bits, the smallest of which is ``lowest``, of the type of ``key``. It ends as
    soon as a trial leaves ``k`` below itself.
    """
    found = lowest
    bit = bits - 1
    is_between = tl.full((), 0, key.dtype)
    while bit >= 0:
        trial = found + (tl.full((), 1, key.dtype) << bit)
        below = tl.sum((counted & (key < trial)).to(tl.int32), 0)
        found = tl.where(below <= k, trial, found)
        is_between = (below == k).to(key.dtype)
        bit = tl.where(below == k, -1, bit - 1)
    return found - is_between


@jit
def first_groups(key, place, k, BITS: tl.constexpr):
    """(which k pairs of ``key`` and ``place`` come first, and a key and a place that these do not pass)."""
    last = kth_bound(key, key == key, k, BITS, tl.full((), -(1 << (BITS - 1)), key.dtype))
    is_equal = key == last
    missing = k - tl.sum((key < last).to(tl.int32), 0)
    # Only where more of them are equal than are missing do places decide.
    bits = tl.where(tl.sum(is_equal.to(tl.int32), 0) > missing, 31, 0)
    at = kth_bound(place, is_equal, missing, bits, tl.full((), 0, tl.int32))
    at = tl.where(bits == 0, 0x7FFFFFFF, at)
    return (key < last) | (is_equal & (place <= at)), last, at


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
    ONLY_KTH: tl.constexpr,
):
    """values[r, p], indices[r, p] = the first ``k`` of part p of x[r] in order, and their positions.

    x: [rows, n]; values: [rows, parts * k], both as integers of their width; indices: [rows, parts * k] of i32 or i64;
    order: None, or [rows, n], the positions that the elements had. A part has ``span`` columns, the last one all that
    are left: GROUPS at least; or ``parts`` is None, and a row is one part. A program takes one part. Its scratch:
    groups, [k], and keys and places, [capacity]. The elements that are kept are ranked, OWN at a time, by comparison
    with OTHERS at a time. With ONLY_KTH, of one part, values and indices are [rows, 1]: only the ``k``-th is stored.
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
    is_chosen, last, last_place = first_groups(first, place, k, BITS)
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
        bits = tl.load(at + axis_offset(own_place, x_strides[1]), mask=is_taken, other=0)
        tl.store(values + row * values_strides[0] + axis_offset(to, values_strides[1]), bits, mask=is_taken)
        index = own_place
        if order is not None:
            index = tl.load(
                order + row * order_strides[0] + axis_offset(own_place, order_strides[1]), mask=is_taken, other=0
            )
        index = index.to(indices.dtype.element_ty)
        tl.store(indices + row * indices_strides[0] + axis_offset(to, indices_strides[1]), index, mask=is_taken)
