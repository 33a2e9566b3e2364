"""The k-th element of each row in order, or the first k: entry ``looped``. A program reads its row once for each digit.

The digits of the k-th key are found from the highest on: each pass counts those of the keys that agree so far, until
these digits say which elements are wanted. Counts are of integers, so that nothing depends on their order.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import axis_offset
from triplan.backends.triton.sorting.shared_kernels import DIGITS, digit_of, load_keys


@jit
def kth_key(
    at,
    stride,
    n,
    k,
    BITS: tl.constexpr,
    INFINITY: tl.constexpr,
    DESCENDING: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """(The highest bits of the ``k``-th smallest key of the row at ``at``, how many bits are below them, which of the
    keys with these bits it is): k and the last from 1 on.

    Digits are added until one key has these bits; or with WHOLE until no key that has them comes behind the k-th.
    """
    digits = tl.arange(0, DIGITS)
    found = tl.full((), 0, tl.int64 if BITS == 64 else tl.int32)
    left = k
    shift = tl.full((), BITS, tl.int32)
    unknown = shift
    while unknown > 0:
        shift = unknown - 8
        count = tl.zeros((DIGITS,), tl.int32)
        for start in range(0, n, BLOCK):
            col = start + tl.arange(0, BLOCK)
            key = load_keys(at, stride, col, col < n, BITS, INFINITY, DESCENDING)
            agrees = (col < n) & ((shift == BITS - 8) | (((key >> shift) >> 8) == found))
            # After a few digits most blocks have no such key; a histogram takes about 100 instructions for each key.
            if tl.max(agrees.to(tl.int32), 0) > 0:
                count += tl.histogram(digit_of(key, shift, BITS), DIGITS, mask=agrees)
        upto = tl.cumsum(count, 0)
        digit = tl.sum((upto < left).to(tl.int32), 0)
        left -= tl.sum(tl.where(digits < digit, count, 0), 0)
        # (The highest digit is signed.)
        found = tl.where(shift == BITS - 8, digit - 128, found * 256 + digit).to(found.dtype)
        alike = tl.sum(tl.where(digits == digit, count, 0), 0)
        unknown = tl.where(alike == (left if WHOLE else 1), 0, shift)
    return found, shift, left


@jit
def kth_kernel(
    x,
    values,
    indices,
    x_strides,
    values_strides,
    indices_strides,
    n,
    k,
    BITS: tl.constexpr,
    INFINITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """values[r], indices[r] = the ``k``-th smallest of x[r], stably, and its position. A program takes one row.

    x: [rows, n]; values: [rows], both as integers of their width; indices: [rows] of i64.
    """
    row = tl.program_id(0).to(tl.int64)
    at = x + row * x_strides[0]
    wanted, shift, which = kth_key(at, x_strides[1], n, k, BITS, INFINITY, False, BLOCK, False)
    before = tl.full((), 0, tl.int32)
    place = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, n, BLOCK):
        col = start + tl.arange(0, BLOCK)
        key = load_keys(at, x_strides[1], col, col < n, BITS, INFINITY, False)
        is_equal = ((key >> shift) == wanted) & (col < n)
        equal = tl.sum(is_equal.to(tl.int32), 0)
        if equal > 0:
            number = before + tl.cumsum(is_equal.to(tl.int32), 0)
            place += tl.where(is_equal & (number == which), col, 0)
            before += equal
    index = tl.sum(place, 0)
    tl.store(values + row * values_strides[0], tl.load(at + axis_offset(index, x_strides[1])))
    tl.store(indices + row * indices_strides[0], index.to(tl.int64))


@jit
def topk_kernel(
    x,
    values,
    indices,
    x_strides,
    values_strides,
    indices_strides,
    keys,
    places,
    n,
    k,
    BITS: tl.constexpr,
    INFINITY: tl.constexpr,
    DESCENDING: tl.constexpr,
    BLOCK: tl.constexpr,
    OWN: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """values[r], indices[r] = the first ``k`` of x[r] in order, and their positions. A program takes one row.

    x: [rows, n]; values: [rows, k], both as integers of their width; indices: [rows, k] of i64. keys, places: [rows,
    k], where the elements that are taken wait in the order of their positions, to be ranked OWN at a time by comparison
    with OTHERS at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    at = x + row * x_strides[0]
    keys += row * k
    places += row * k
    wanted, shift, which = kth_key(at, x_strides[1], n, k, BITS, INFINITY, DESCENDING, BLOCK, True)
    equal = tl.full((), 0, tl.int32)
    taken = tl.full((), 0, tl.int32)
    for start in range(0, n, BLOCK):
        col = start + tl.arange(0, BLOCK)
        key = load_keys(at, x_strides[1], col, col < n, BITS, INFINITY, DESCENDING)
        is_equal = (((key >> shift) == wanted) & (col < n)).to(tl.int32)
        is_before = ((key >> shift) < wanted) & (col < n)
        if tl.max(is_equal | is_before.to(tl.int32), 0) > 0:
            number = equal + tl.cumsum(is_equal, 0)
            is_taken = is_before | ((is_equal != 0) & (number <= which))
            to = taken + tl.cumsum(is_taken.to(tl.int32), 0) - 1
            tl.store(keys + to, key, mask=is_taken)
            tl.store(places + to, col, mask=is_taken)
            equal += tl.sum(is_equal, 0)
            taken += tl.sum(is_taken.to(tl.int32), 0)
    tl.debug_barrier()  # threads read what other threads of the program have written
    for start in range(0, k, OWN):
        i = start + tl.arange(0, OWN)
        own = tl.load(keys + i, mask=i < k, other=0)
        rank = tl.zeros((OWN,), tl.int32)
        for other in range(0, k, OTHERS):
            j = other + tl.arange(0, OTHERS)
            key = tl.load(keys + j, mask=j < k, other=0)
            is_before = (key[None, :] < own[:, None]) | ((key[None, :] == own[:, None]) & (j[None, :] < i[:, None]))
            rank += tl.sum((is_before & (j < k)[None, :]).to(tl.int32), 1)
        place = tl.load(places + i, mask=i < k, other=0)
        bits = tl.load(at + axis_offset(place, x_strides[1]), mask=i < k, other=0)
        tl.store(values + row * values_strides[0] + axis_offset(rank, values_strides[1]), bits, mask=i < k)
        tl.store(
            indices + row * indices_strides[0] + axis_offset(rank, indices_strides[1]), place.to(tl.int64), mask=i < k
        )
