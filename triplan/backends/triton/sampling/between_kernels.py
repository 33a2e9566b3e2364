"""The exact threshold of top-p among the logits of a row between two levels, for ``split``.

``masses_kernel`` lists these logits by chunks. The list of a chunk has PLACES; of one with more such logits, all are
read again. Lists are read in *units* of UNIT places of one chunk, so that a block of units has few empty places,
whatever chunks the logits are in.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.philox_kernels import as_i64
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
#: Keys of which a search goes on with one a thread.
SMALL = tl.constexpr(64)
#: Logits of longer lists that are looked at together. Untuned.
MANY = tl.constexpr(2048)


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
def kept_of(mass, key, threshold, least):
    """``mass``, but 0 of keys below ``threshold`` and of masses below ``least``, an f64 or None."""
    is_dropped = key < threshold
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
def kept_between(
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
    WIDTH: tl.constexpr,
):
    """(threshold, whether it is among the logits between, mass that stays of each chunk), as ``threshold_of``.

    above: the mass of greater logits than those between; bracket: of ``masses_kernel``; least: the mass (f64) that
    min_p keeps, or None; few: f32, CHUNKS * WIDTH places of the row's own, SMALL at least. Where no chunk has more than
    WIDTH logits between, all are in registers.
    """
    keys = tl.load(bracket), tl.load(bracket + 1)
    chunk = tl.arange(0, CHUNKS)
    count = tl.load(counts + row * chunks + chunk, mask=chunk < chunks, other=0)
    if tl.max(count, 0) > WIDTH:
        UNITS: tl.constexpr = max(min(CHUNKS * WIDTH, MANY) // UNIT, 1)
        threshold, reached, kept = _kept_of_many(
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
            keys,
            few,
            CHUNK,
            CHUNKS,
            PLACES,
            UNITS,
        )
    else:
        pivots = tl.load(bracket + 2), tl.load(bracket + 3), tl.load(bracket + 4)
        threshold, reached, kept = _kept_of_few(
            between + row * chunks * PLACES, count, scale, above, bound, least, keys, pivots, few, PLACES, WIDTH
        )
    return threshold, (above.to(tl.float64) < bound) & (reached.to(tl.float64) >= bound), kept


@jit
def _kept_of_few(
    between, count, scale, above, bound, least, bracket, pivots, few, PLACES: tl.constexpr, WIDTH: tl.constexpr
):
    """(threshold, mass from there on, kept of each chunk) of lists of ``count`` [CHUNKS] logits, WIDTH at most.

    The first step of the search takes ``pivots``. It ends with SMALL logits, each of which is compared with each.
    """
    chunk, slot = tl.arange(0, count.shape[0]), tl.arange(0, WIDTH)
    is_listed = slot[None, :] < count[:, None]
    x = tl.load(between + chunk[:, None] * PLACES + slot[None, :], mask=is_listed, other=-float("inf"))
    key = tl.where(is_listed, key_of(x), NO_KEY)
    mass = tl.where(is_listed, mass_of(x, scale), 0)
    low, high, beyond = bracket[0], bracket[1], above
    left, over = as_i64(tl.sum(count, 0)), as_i64(0)
    while (low < high) & (left - over > SMALL):
        parts = (
            tl.ravel(tl.where(key >= pivots[0], mass, 0)),
            tl.ravel(tl.where(key >= pivots[1], mass, 0)),
            tl.ravel(tl.where(key >= pivots[2], mass, 0)),
            tl.ravel(counts_from(key, pivots)),
        )
        first, second, third, number = tl.reduce(parts, 0, add_four)
        sums = above + first, above + second, above + third
        beyond = beyond_of(sums, bound, beyond)
        low, high, left, over = narrowed((low, high, left, over), pivots, sums, number, bound)
        pivots = pivots_of(low, high)
    threshold = low
    if low < high:
        is_in = tl.ravel((key >= low) & (key <= high))
        place = tl.cumsum(is_in.to(tl.int32), 0) - 1
        tl.store(few + place, value_of(tl.ravel(key)), mask=is_in)
        tl.debug_barrier()  # threads read what other threads of the program have written
        small = tl.arange(0, SMALL)
        is_last = small < left - over
        last = tl.load(few + small, mask=is_last, other=-float("inf"))
        keys = tl.where(is_last, key_of(last), NO_KEY)
        masses = tl.where(is_last, mass_of(last, scale), 0)
        greater = tl.sum(tl.where(keys[None, :] > keys[:, None], masses[None, :], 0), 1)
        stays = is_last & ((beyond + greater).to(tl.float64) < bound)
        threshold = tl.minimum(tl.min(tl.where(stays, keys, 0x7FFFFFFF), 0), high)
    stays = tl.where(key >= threshold, mass, 0)
    of_chunk = tl.sum(stays, 1)
    reached = above + tl.sum(of_chunk, 0)
    kept = of_chunk
    if least is not None:
        kept = tl.sum(tl.where(stays.to(tl.float64) >= least, stays, 0), 1)
    return threshold, reached, kept


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
    """``_kept_of_few`` of lists of any length, block by block."""
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
    reached = above
    kept = tl.zeros((CHUNKS,), tl.int64)
    for first in range(0, units, UNITS):
        x, key, chunk = load_units(
            between, at, stride, n, row, chunks, size, ends, first, bracket, CHUNK, CHUNKS, PLACES, UNITS
        )
        mass = kept_of(tl.where(key == NO_KEY, 0, mass_of(x, scale)), key, threshold, None)
        reached += tl.sum(tl.sum(mass, 1), 0)
        kept += by_chunks(kept_of(mass, key, threshold, least), chunk, CHUNKS)
    return threshold, reached, kept
