"""One token of each row, entry ``split``: what reads a whole row does so by chunks, in programs of their own.

1. ``levels_kernel``, by rows, with top-p: a sample of the row gives some logits, *levels*, about where the threshold of
   top-p may be.
2. ``chunks_kernel``, by chunks: the largest logit, with top-k of each group of GROUP neighbouring tokens; with top-p,
   estimates of the masses from each level on.
3. ``narrow_kernel``, by rows, with top-k. The k-th largest of the groups' largest logits is at most the k-th largest
   logit, so groups whose largest one is below it hold none of the top k: the few others, in registers, give the token.
   (So is the k-th largest of fewer maxima, of several groups each: it is found sooner, and tried first.) A row without
   top-k is *wide*.
4. ``masses_kernel``, by chunks of wide rows: exact sums of masses; of top-p, the logits between the two levels that the
   estimates choose.
5. ``finish_kernel``, by rows: the exact threshold, among these logits; then the chunk of the token, then the token.

Where too many tokens are left, or the estimates were wrong, the last launch takes the token as ``looped`` does: the
token is the same.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.common.philox_kernels import as_i64
from triplan.backends.triton.sampling.levels_kernels import LEVELS, OF_ROW, levels_between, rate_f32
from triplan.backends.triton.sampling.looped_kernels import looped_token
from triplan.backends.triton.sampling.narrow_kernels import DONE, NAN_KEY, SLOW, WIDE
from triplan.backends.triton.sampling.shared_kernels import (
    LEAST_KEY,
    NO_KEY,
    add_four,
    counts_from,
    drawn,
    goes_on,
    key_of,
    least_of,
    load_logits,
    mass_of,
    narrowed,
    part_of,
    pivots_of,
    rate_of,
    scale_of,
    threshold_of,
    value_of,
)


@triton.jit
def larger(a, b):
    """max(a, b), of tensors of one shape; NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def chunks_kernel(
    logits,
    row_stride,
    stride,
    n,
    each,
    strides,
    levels,
    tops,
    largest,
    masses,
    chunks,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Of a chunk: the largest key; that of each group if there is ``largest``; masses from levels on if ``masses``.

    tops: [rows, chunks] i32; largest: [rows, groups] i32; both NAN_KEY where there is a NaN. masses: [rows, LEVELS + 1,
    chunks] f32, the last those of all tokens, relative to levels[row, LEVELS].
    """
    begin(OVERLAPS)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    group = tl.arange(0, CHUNK // GROUP)
    col = chunk * CHUNK + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = load_logits(logits + row * row_stride, stride, col, col < n)
    of_group = tl.reduce(x, 1, larger)
    key = tl.where(of_group != of_group, NAN_KEY, key_of(of_group))
    tl.store(tops + tl.program_id(0), tl.max(key, 0))
    if largest is not None:
        tl.store(largest + tl.program_id(0).to(tl.int64) * (CHUNK // GROUP) + group, key)
    if masses is not None:
        levels += row * OF_ROW
        base = tl.load(levels + LEVELS)
        if base == base:
            weight = tl.exp2(tl.minimum((x - base) * rate_f32(each[0], row, strides[0]), 100.0))
            masses += row * (LEVELS + 1) * chunks + chunk
            tl.store(masses + LEVELS * chunks, tl.sum(weight))
            for i in tl.static_range(LEVELS):
                # (A product: comparison and addition are two instructions.)
                from_level = (x >= tl.load(levels + i)).to(tl.float32) * weight
                tl.store(masses + i * chunks, tl.sum(from_level))


@triton.jit
def masses_kernel(
    logits,
    row_stride,
    stride,
    n,
    each,
    strides,
    levels,
    tops,
    masses,
    state,
    sums,
    counts,
    between,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PLACES: tl.constexpr,
    TILE: tl.constexpr,
    UNROLL: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Of a chunk of a wide row: masses, and the logits between the levels low and high.

    sums: [rows, 3, chunks] i64, of all masses, of those from high on, and of those that min_p keeps of the latter;
    counts: [rows, chunks] i32, of logits from low on that are not from high on; between: [rows, chunks, PLACES] f32,
    these logits, in any order; state: [rows] i32, what ``narrow_kernel`` left.
    """
    begin(OVERLAPS)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    is_wide = True
    if state is not None:
        is_wide = tl.load(state + row) == WIDE
    if is_wide:
        at = logits + row * row_stride
        slot = tl.arange(0, TILE)
        key = tl.arange(0, CHUNKS)
        top = value_of(tl.max(tl.load(tops + row * chunks + key, mask=key < chunks, other=LEAST_KEY), 0))
        rate, is_greedy = rate_of(each[0], row, strides[0])
        scale = scale_of(rate, top)
        least = least_of(each[3], row, strides[3])
        low = tl.full((), float("nan"), tl.float32)
        high = tl.full((), -float("inf"), tl.float32)
        if each[2] is not None:
            p = tl.load(each[2] + row * strides[2])
            if (p < 1.0) & ~is_greedy:
                low, high = levels_between(levels, masses, p, row, chunks, CHUNKS)
        of_all = tl.zeros((TILE,), tl.int64)
        of_high = tl.zeros((TILE,), tl.int64)
        of_kept = tl.zeros((TILE,), tl.int64)
        count = tl.zeros((TILE,), tl.int32)
        hits = tl.zeros((TILE,), tl.int32)  # a bit for each logit of a thread
        for start in range(0, CHUNK // TILE, UNROLL):
            bits = tl.zeros((TILE,), tl.int32)
            for i in tl.static_range(UNROLL):
                col = chunk * CHUNK + (start + i) * TILE + slot
                x = load_logits(at, stride, col, col < n)
                mass = mass_of(x, scale)
                of_all += mass
                if each[2] is not None:
                    is_high = x >= high
                    bits += tl.where((x >= low) & ~is_high, 1 << i, 0)
                    mass = tl.where(is_high, mass, 0)
                    of_high += mass
                if each[3] is not None:
                    of_kept += tl.where(mass.to(tl.float64) < least, 0, mass)
            hits |= bits << start
        sums += row * 3 * chunks + chunk
        tl.store(sums, tl.sum(of_all, 0))
        if each[2] is not None:
            tl.store(sums + chunks, tl.sum(of_high, 0))
            for i in tl.static_range(CHUNK // TILE):
                count += (hits >> i) & 1
            tl.store(counts + tl.program_id(0), tl.sum(count, 0))
            place = tl.cumsum(count, 0) - count
            found = between + tl.program_id(0).to(tl.int64) * PLACES
            for _ in range(tl.max(count, 0)):
                bit = hits & -hits
                number = ((bit.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)) >> 23) - 127
                x = load_logits(at, stride, chunk * CHUNK + number * TILE + slot, hits != 0)
                tl.store(found + place, x, mask=(hits != 0) & (place < PLACES))
                place += 1
                hits ^= bit
        if each[3] is not None:
            tl.store(sums + 2 * chunks, tl.sum(of_kept, 0))


@triton.jit
def load_between(between, counts, start, row, chunks, CHUNKS: tl.constexpr, PLACES: tl.constexpr, TILE: tl.constexpr):
    """(logits, whether there is one) of places start ... start + TILE - 1 of each chunk: [CHUNKS, TILE]."""
    chunk, place = tl.arange(0, CHUNKS)[:, None], start + tl.arange(0, TILE)[None, :]
    is_there = place < tl.load(counts + row * chunks + chunk, mask=chunk < chunks, other=0)
    at = between + (row * chunks + chunk) * PLACES + place
    return tl.load(at, mask=is_there, other=-float("inf")), is_there


@triton.jit
def threshold_among(x, is_there, scale, above, bound, least):
    """(threshold, whether it is among them, mass that stays of each chunk), of logits ``x``, a block [chunks, tile].

    As ``threshold_of``; least: the mass (f64) that min_p keeps.
    """
    key = tl.where(is_there, key_of(x), NO_KEY)
    mass = tl.where(is_there, mass_of(x, scale), 0)
    lowest = tl.full((), LEAST_KEY, tl.int32)
    threshold, is_right = threshold_of(tl.ravel(key), tl.ravel(mass), above, lowest, bound, as_i64(0))
    mass = tl.where((key < threshold) | (mass.to(tl.float64) < least), 0, mass)
    return threshold, is_right & (above.to(tl.float64) < bound), tl.sum(mass, 1)


@triton.jit
def threshold_between(
    between,
    counts,
    most,
    row,
    chunks,
    scale,
    above,
    bound,
    CHUNKS: tl.constexpr,
    PLACES: tl.constexpr,
    TILE: tl.constexpr,
):
    """(threshold, whether it is among the logits between): as ``threshold_of``, of keys in memory.

    above: the mass of greater logits than those; most: how many of them a chunk has, at most.
    """
    masses = tl.zeros((CHUNKS, TILE), tl.int64)
    left = tl.zeros((CHUNKS, TILE), tl.int32)
    lows = tl.full((CHUNKS, TILE), NAN_KEY, tl.int32)
    highs = tl.full((CHUNKS, TILE), LEAST_KEY, tl.int32)
    for start in range(0, most, TILE):
        x, is_there = load_between(between, counts, start, row, chunks, CHUNKS, PLACES, TILE)
        masses += tl.where(is_there, mass_of(x, scale), 0)
        left += is_there.to(tl.int32)
        lows = tl.minimum(lows, tl.where(is_there, key_of(x), NAN_KEY))
        highs = tl.maximum(highs, tl.where(is_there, key_of(x), LEAST_KEY))
    reached = above + tl.sum(tl.sum(masses, 1), 0)
    is_right = (above.to(tl.float64) < bound) & (reached.to(tl.float64) >= bound)
    low = tl.min(tl.min(lows, 1), 0)
    high = tl.where(is_right, tl.max(tl.max(highs, 1), 0), low)
    left = as_i64(tl.sum(tl.sum(left, 1), 0))
    over = as_i64(0)
    while goes_on((low, high, left, over), as_i64(0)):
        pivots = pivots_of(low, high)
        first = tl.zeros((CHUNKS, TILE), tl.int64)
        second = tl.zeros((CHUNKS, TILE), tl.int64)
        third = tl.zeros((CHUNKS, TILE), tl.int64)
        number = tl.zeros((CHUNKS, TILE), tl.int64)
        for start in range(0, most, TILE):
            x, is_there = load_between(between, counts, start, row, chunks, CHUNKS, PLACES, TILE)
            mass = tl.where(is_there, mass_of(x, scale), 0)
            key = tl.where(is_there, key_of(x), NO_KEY)
            first += tl.where(key >= pivots[0], mass, 0)
            second += tl.where(key >= pivots[1], mass, 0)
            third += tl.where(key >= pivots[2], mass, 0)
            number += counts_from(key, pivots)
        of_chunks = tl.reduce((first, second, third, number), 1, add_four)
        first, second, third, number = tl.reduce(of_chunks, 0, add_four)
        sums = (above + first, above + second, above + third)
        low, high, left, over = narrowed((low, high, left, over), pivots, sums, number, bound)
    return low, is_right


@triton.jit
def finish_kernel(
    logits,
    row_stride,
    stride,
    n,
    each,
    strides,
    tops,
    state,
    sums,
    counts,
    between,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PLACES: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The token of a row that ``narrow_kernel`` left. Operands as in ``masses_kernel``; CHUNKS >= chunks."""
    begin(OVERLAPS)
    temperature, _, top_p, min_p, seed, position, out = each
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * row_stride
    chunk = tl.arange(0, CHUNKS)
    known = chunk < chunks
    best = tl.max(tl.load(tops + row * chunks + chunk, mask=known, other=LEAST_KEY), 0)
    left = tl.full((), WIDE, tl.int32)
    if state is not None:
        left = tl.load(state + row)
    if (best == NAN_KEY) | (best == LEAST_KEY):
        tl.store(out + row * strides[6], as_i64(-1))
        left = tl.full((), DONE, tl.int32)
    if left == WIDE:
        rate, is_greedy = rate_of(temperature, row, strides[0])
        scale = scale_of(rate, value_of(best))
        least = least_of(min_p, row, strides[3])
        of_chunk = sums + row * 3 * chunks + chunk
        threshold = tl.full((), NO_KEY, tl.int32)
        part = 2 if min_p is not None else 1 if top_p is not None else 0
        kept = tl.load(of_chunk + part * chunks, mask=known, other=0)
        if top_p is not None:
            p = tl.load(top_p + row * strides[2]).to(tl.float64)
            if (p < 1.0) & ~is_greedy:
                bound = part_of(p, tl.sum(tl.load(of_chunk, mask=known, other=0), 0))
                above = tl.sum(tl.load(of_chunk + chunks, mask=known, other=0), 0)
                most = tl.max(tl.load(counts + row * chunks + chunk, mask=known, other=0), 0)
                is_right = most <= PLACES
                if most <= TILE:
                    x, is_there = load_between(between, counts, 0, row, chunks, CHUNKS, PLACES, TILE)
                    threshold, is_right, stays = threshold_among(x, is_there, scale, above, bound, least)
                    kept += stays
                elif is_right:
                    threshold, is_right = threshold_between(
                        between, counts, most, row, chunks, scale, above, bound, CHUNKS, PLACES, (TILE + 1) // 2
                    )
                    for start in range(0, most, TILE):
                        x, is_there = load_between(between, counts, start, row, chunks, CHUNKS, PLACES, TILE)
                        mass = mass_of(x, scale)
                        dropped = ~is_there | (key_of(x) < threshold) | (mass.to(tl.float64) < least)
                        kept += tl.sum(tl.where(dropped, 0, mass), 1)
                left = tl.where(is_right, WIDE, SLOW).to(tl.int32)
        if left == WIDE:
            number = drawn(seed, position, row, strides[4], strides[5], tl.sum(kept, 0), is_greedy)
            first = tl.sum((tl.cumsum(kept, 0) <= number).to(tl.int32), 0)
            number -= tl.sum(tl.where(chunk < first, kept, 0), 0)
            col = first * CHUNK + tl.arange(0, CHUNK)
            x = load_logits(at, stride, col, col < n)
            mass = mass_of(x, scale)
            dropped = (key_of(x) < threshold) | (mass.to(tl.float64) < least)
            upto = tl.cumsum(tl.where(dropped, 0, mass), 0)
            token = first * CHUNK + tl.sum((upto <= number).to(tl.int32), 0)
            tl.store(out + row * strides[6], as_i64(token))
    if left == SLOW:
        tl.store(out + row * strides[6], looped_token(at, stride, n, row, each, strides, STEPS, BLOCK))
