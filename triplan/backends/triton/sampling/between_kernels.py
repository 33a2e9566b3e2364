"""The exact threshold of top-p among the logits of a row between two levels, for ``split``.

``masses_kernel`` lists these logits by chunks, and adds their masses up in buckets. ``kept_between`` tries the values
of a bucket. If they are too many, ``_kept_of_many`` searches all lists. The list of a chunk has PLACES; of one with
more such logits, all are read again. Lists are read in *units* of UNIT places of one chunk, so that a block of units
has few empty places, whatever chunks the logits are in.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.philox_kernels import as_i64
from triplan.backends.triton.sampling.levels_kernels import BUCKETS, depth_of
from triplan.backends.triton.sampling.narrow_kernels import NAN_KEY
from triplan.backends.triton.sampling.shared_kernels import (
    NO_KEY,
    add_four,
    beyond_of,
    counts_from,
    key_of,
    load_logits,
    mass_of,
    narrowed,
    pivots_of,
    sum_and_ends,
    threshold_of,
    value_of,
)

#: Neighbouring places of a chunk that are read together: a sector or two. Untuned.
UNIT = tl.constexpr(16)
#: Values of a bucket that are tried one after the other. Untuned.
TRIES = tl.constexpr(32)
#: Pieces of each list that the last launch loads with all else that it needs: most lists of drawn rows have no more.
LISTS = tl.constexpr(4)


@jit
def units_of(counts, row, chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PLACES: tl.constexpr):
    """(logits to read of each chunk, units before the end of each), [CHUNKS] i32."""
    chunk = tl.arange(0, CHUNKS)
    size = tl.load(counts + row * chunks + chunk, mask=chunk < chunks, other=0)
    size = tl.where(size > PLACES, CHUNK, size)
    return size, tl.cumsum((size + UNIT - 1) // UNIT, 0)


@jit
def load_units(
    between,
    at,
    stride,
    n,
    row,
    chunks,
    size,
    ends,
    first,
    bracket,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PLACES: tl.constexpr,
    UNITS: tl.constexpr,
):
    """(logits, keys, chunk of each unit) of units first ... first + UNITS - 1: [UNITS, UNIT], [UNITS, UNIT], [UNITS].

    A key is NO_KEY where there is no logit with a key from bracket[0] to bracket[1].
    """
    unit = first + tl.arange(0, UNITS)
    is_before = ends[None, :] <= unit[:, None]
    chunk = tl.sum(is_before.to(tl.int32), 1)
    start = tl.max(tl.where(is_before, ends[None, :], 0), 1)
    is_own = tl.arange(0, CHUNKS)[None, :] == chunk[:, None]
    of_unit = tl.sum(tl.where(is_own, size[None, :], 0), 1)  # (0 behind the last unit)
    place = (unit - start)[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    is_there = place < of_unit[:, None]
    is_listed = is_there & (of_unit <= PLACES)[:, None]
    x = tl.load(between + (row * chunks + chunk)[:, None] * PLACES + place, mask=is_listed, other=-float("inf"))
    if PLACES < CHUNK:
        col = chunk[:, None] * CHUNK + place
        x = tl.maximum(x, load_logits(at, stride, col, is_there & ~is_listed & (col < n)))
    key = key_of(x)
    return x, tl.where(is_there & (key >= bracket[0]) & (key <= bracket[1]), key, NO_KEY), chunk


@jit
def by_chunks(mass, chunk, CHUNKS: tl.constexpr):
    """Sums of ``mass`` [UNITS, UNIT] i64 over units of one chunk: [CHUNKS]."""
    is_own = chunk[:, None] == tl.arange(0, CHUNKS)[None, :]
    return tl.sum(tl.where(is_own, tl.sum(mass, 1)[:, None], 0), 0)


@jit
def kept_of(mass, x, threshold, least):
    """``mass``, but 0 of logits ``x`` below ``threshold`` (NaN: of none) and of masses below ``least``, f64 or None."""
    is_dropped = x < threshold
    if least is not None:
        is_dropped |= mass.to(tl.float64) < least
    return tl.where(is_dropped, 0, mass)


@jit
def fewer_between(
    between,
    at,
    stride,
    n,
    row,
    chunks,
    size,
    ends,
    scale,
    above,
    bound,
    bracket,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PLACES: tl.constexpr,
    UNITS: tl.constexpr,
):
    """(low, high, beyond): the threshold is a key from low to high, and beyond the mass of greater ones.

    No more logits than a block has have such keys, or all of them are equal: then low is high.
    """
    units = tl.max(ends, 0)
    low, high, beyond = bracket[0], bracket[1], above
    left, over = as_i64(units) * UNIT, as_i64(0)
    while (low < high) & (left - over > UNITS * UNIT):
        least, most, count = high, low, tl.full((), 0, tl.int32)
        for first in range(0, units, UNITS):
            _, key, _ = load_units(
                between, at, stride, n, row, chunks, size, ends, first, (low, high), CHUNK, CHUNKS, PLACES, UNITS
            )
            is_in = key != NO_KEY
            parts = (is_in.to(tl.int32), tl.where(is_in, key, low), tl.where(is_in, key, high))
            found = tl.reduce((tl.ravel(parts[0]), tl.ravel(parts[1]), tl.ravel(parts[2])), 0, sum_and_ends)
            count, most, least = count + found[0], tl.maximum(most, found[1]), tl.minimum(least, found[2])
        low, high, left, over = tl.minimum(least, most), most, as_i64(count), as_i64(0)
        if (low < high) & (left > UNITS * UNIT):
            pivots = pivots_of(low, high)
            first_sum, second_sum, third_sum, counts = beyond, beyond, beyond, as_i64(0)
            for first in range(0, units, UNITS):
                x, key, _ = load_units(
                    between, at, stride, n, row, chunks, size, ends, first, (low, high), CHUNK, CHUNKS, PLACES, UNITS
                )
                mass = mass_of(x, scale)
                parts = (
                    tl.ravel(tl.where(key >= pivots[0], mass, 0)),
                    tl.ravel(tl.where(key >= pivots[1], mass, 0)),
                    tl.ravel(tl.where(key >= pivots[2], mass, 0)),
                    tl.ravel(counts_from(key, pivots)),
                )
                found = tl.reduce(parts, 0, add_four)
                first_sum += found[0]
                second_sum += found[1]
                third_sum += found[2]
                counts += found[3]
            sums = (first_sum, second_sum, third_sum)
            low, high, left, over = narrowed((low, high, left, over), pivots, sums, counts, bound)
            beyond = beyond_of(sums, bound, beyond)
    return low, high, beyond


@jit
def next_largest(a0, a1, b0, b1):
    """(larger number, how many have it), of tensors of one shape."""
    return tl.maximum(a0, b0), tl.where(a0 >= b0, a1, 0) + tl.where(b0 >= a0, b1, 0)


@jit
def sum_and_most(a0, a1, b0, b1):
    """(a0 + b0, max(a1, b1)), of tensors of one shape."""
    return a0 + b0, tl.maximum(a1, b1)


@jit
def listed_from(between, count, row, chunks, first, PLACES: tl.constexpr, WIDTH: tl.constexpr):
    """The logits [CHUNKS, WIDTH] that are listed from place ``first`` on, -inf where there is none."""
    chunk, place = tl.arange(0, count.shape[0])[:, None], first + tl.arange(0, WIDTH)[None, :]
    at = between + (row * chunks + chunk) * PLACES + place
    return tl.load(at, mask=place < tl.minimum(count, PLACES)[:, None], other=-float("inf"))


@jit
def listed_at(lists, between, count, row, chunks, first, PLACES: tl.constexpr, WIDTH: tl.constexpr):
    """``listed_from`` place ``first`` on, a multiple of WIDTH; lists: the first LISTS of these."""
    x = lists[0]
    for i in tl.static_range(1, LISTS):
        x = tl.where(first == i * WIDTH, lists[i], x)
    if first >= LISTS * WIDTH:
        x = listed_from(between, count, row, chunks, first, PLACES, WIDTH)
    return x


@jit
def kept_between(
    between,
    counts,
    count,
    lists,
    of_bucket,
    bounds,
    at,
    stride,
    n,
    row,
    chunks,
    scale,
    above,
    bound,
    least,
    few,
    CHUNK: tl.constexpr,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
    MANY: tl.constexpr,
):
    """(the threshold, a logit; whether it is among those between; mass that stays of each chunk), as ``threshold_of``.

    count, lists, of_bucket, bounds: how many logits each chunk lists, of ``listed_at``, the sums of buckets, what
    ``load_bracket`` gives; above: the mass of greater logits than those between; least: the mass (f64) that min_p
    keeps, or None; few: f32, MANY places. The threshold is in the first bucket with which the sum reaches ``bound``.
    Of that, the logits are tried from the largest on: they are few, or many have one value. WIDTH places of each list
    are looked at together: a program runs this once, and of long code most time goes into fetching it.
    """
    low, high, zones = bounds
    CHUNKS: tl.constexpr = count.shape[0]
    upto = above + tl.cumsum(of_bucket, 0)
    is_before = upto.to(tl.float64) < bound
    before, beyond = tl.reduce((is_before.to(tl.int32), tl.where(is_before, upto, above)), 0, sum_and_most)
    is_right = (above.to(tl.float64) < bound) & (before < BUCKETS)
    most = tl.max(count, 0)
    threshold, tries = tl.full((), float("inf"), tl.float32), tl.full((), TRIES, tl.int32)
    if (most > PLACES) | ~is_right:
        tries = tl.full((), 0, tl.int32)
    is_found = False
    while tries > 0:
        largest = tl.full((CHUNKS, WIDTH), -float("inf"), tl.float32)
        number = tl.zeros((CHUNKS, WIDTH), tl.int32)
        for first in range(0, most, WIDTH):
            x = listed_at(lists, between, count, row, chunks, first, PLACES, WIDTH)
            depth = depth_of(x, zones)
            is_left = (depth >= before) & (depth < before + 1) & (x < threshold)  # (-inf has no mass)
            x = tl.where(is_left, x, -float("inf"))
            largest, number = next_largest(largest, number, x, is_left.to(tl.int32))
        threshold, own = tl.reduce((tl.ravel(largest), tl.ravel(number)), 0, next_largest)
        beyond += own * mass_of(threshold, scale)
        is_found = (beyond.to(tl.float64) >= bound) & (own > 0)
        tries = tl.where(is_found | (own == 0), 0, tries - 1)
    kept = tl.zeros((CHUNKS,), tl.int64)
    if is_found:
        stays = tl.zeros((CHUNKS, WIDTH), tl.int64)
        for first in range(0, most, WIDTH):
            x = listed_at(lists, between, count, row, chunks, first, PLACES, WIDTH)
            stays += kept_of(mass_of(x, scale), x, threshold, least)
        kept = tl.sum(stays, 1)
    elif is_right:
        threshold, kept = _kept_of_many(
            between,
            counts,
            at,
            stride,
            n,
            row,
            chunks,
            scale,
            above,
            bound,
            least,
            (key_of(low) + 1, tl.where(high != high, NAN_KEY, key_of(high))),
            few,
            CHUNK,
            CHUNKS,
            PLACES,
            MANY // UNIT,
        )
    return threshold, is_right, kept


@jit
def _kept_of_many(
    between,
    counts,
    at,
    stride,
    n,
    row,
    chunks,
    scale,
    above,
    bound,
    least,
    bracket,
    few,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PLACES: tl.constexpr,
    UNITS: tl.constexpr,
):
    """(threshold, mass that stays of each chunk) of lists of any length, block by block."""
    size, ends = units_of(counts, row, chunks, CHUNK, CHUNKS, PLACES)
    units = tl.max(ends, 0)
    threshold, high, beyond = fewer_between(
        between, at, stride, n, row, chunks, size, ends, scale, above, bound, bracket, CHUNK, CHUNKS, PLACES, UNITS
    )
    if threshold < high:
        left = tl.full((), 0, tl.int32)
        for first in range(0, units, UNITS):
            x, key, _ = load_units(
                between, at, stride, n, row, chunks, size, ends, first, (threshold, high), CHUNK, CHUNKS, PLACES, UNITS
            )
            is_own = tl.ravel(key) != NO_KEY
            tl.store(few + left + tl.cumsum(is_own.to(tl.int32), 0) - 1, tl.ravel(x), mask=is_own)
            left += tl.sum(is_own.to(tl.int32), 0)
        tl.debug_barrier()  # threads read what other threads of the program have written
        slot = tl.arange(0, UNITS * UNIT)
        found = tl.load(few + slot, mask=slot < left, other=-float("inf"))
        key = tl.where(slot < left, key_of(found), NO_KEY)
        threshold, _ = threshold_of(key, mass_of(found, scale), beyond, threshold, bound, as_i64(0))
    kept = tl.zeros((CHUNKS,), tl.int64)
    for first in range(0, units, UNITS):
        x, key, chunk = load_units(
            between, at, stride, n, row, chunks, size, ends, first, bracket, CHUNK, CHUNKS, PLACES, UNITS
        )
        mass = tl.where(key == NO_KEY, 0, mass_of(x, scale))
        kept += by_chunks(kept_of(mass, x, value_of(threshold), least), chunk, CHUNKS)
    return value_of(threshold), kept
