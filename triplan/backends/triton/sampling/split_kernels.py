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

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.common.philox_kernels import as_i64
from triplan.backends.triton.sampling.between_kernels import UNIT, kept_between
from triplan.backends.triton.sampling.levels_kernels import LEVELS, OF_ROW, levels_between, rate_f32
from triplan.backends.triton.sampling.looped_kernels import looped_token
from triplan.backends.triton.sampling.narrow_kernels import DONE, NAN_KEY, SLOW, WIDE
from triplan.backends.triton.sampling.shared_kernels import (
    LEAST_KEY,
    NO_KEY,
    drawn,
    key_of,
    least_of,
    load_logits,
    mass_of,
    part_of,
    rate_of,
    scale_of,
    value_of,
)

#: A power of two: of logits up to 2**67, those above a level differ from it by 1 / SHARP or more unless both are tiny.
SHARP = tl.constexpr(2.0**60)


@jit
def larger(a, b):
    """max(a, b), of tensors of one shape; NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
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
    STRIP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Of a chunk: the largest key; that of each group if there is ``largest``; masses above levels if ``masses``.

    tops: [rows, chunks] i32; largest: [rows, groups] i32; both NAN_KEY where there is a NaN. masses: [rows, LEVELS + 1,
    chunks] f32, the last those of all tokens, relative to levels[row, LEVELS]; in STRIP sums each, of a token a thread.
    """
    begin(OVERLAPS)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    at = logits + row * row_stride
    group = tl.arange(0, CHUNK // GROUP)
    col = chunk * CHUNK + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    of_group = tl.reduce(load_logits(at, stride, col, col < n), 1, larger)
    key = tl.where(of_group != of_group, NAN_KEY, key_of(of_group))
    tl.store(tops + tl.program_id(0), tl.max(key, 0))
    if largest is not None:
        tl.store(largest + tl.program_id(0).to(tl.int64) * (CHUNK // GROUP) + group, key)
    if masses is not None:
        levels += row * OF_ROW
        base = tl.load(levels + LEVELS)
        if base == base:
            rate = rate_f32(each[0], row, strides[0])
            level = tl.arange(0, LEVELS)
            # Products by a power of two are exact, and so is 0 or 1 below, by one instruction; a comparison takes two.
            edge = tl.load(levels + level)[:, None] * SHARP
            above = tl.zeros((LEVELS, STRIP), tl.float32)
            total = tl.zeros((STRIP,), tl.float32)
            for i in tl.static_range(CHUNK // STRIP):
                token = chunk * CHUNK + i * STRIP + tl.arange(0, STRIP)
                x = load_logits(at, stride, token, token < n)
                weight = tl.exp2(tl.minimum((x - base) * rate, 100.0))
                total += weight
                above += tl.minimum(tl.maximum(x[None, :] * SHARP - edge, 0.0), 1.0) * weight[None, :]
            masses += row * (LEVELS + 1) * chunks + chunk
            tl.store(masses + level * chunks, tl.sum(above, 1))
            tl.store(masses + LEVELS * chunks, tl.sum(total, 0))


@jit
def ones_of(bits):
    """How many bits of an i32 are 1: sums of 2, 4 and 8 neighbours, then of the four bytes by a product."""
    pairs = bits - ((bits >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return (((fours + (fours >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@jit
def sums_and_most(a0, a1, a2, a3, b0, b1, b2, b3):
    """(a0 + b0, a1 + b1, a2 + b2, max(a3, b3)), of tensors of one shape."""
    return a0 + b0, a1 + b1, a2 + b2, tl.maximum(a3, b3)


@jit
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
    bracket,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PLACES: tl.constexpr,
    TILE: tl.constexpr,
    UNROLL: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Of a chunk of a wide row: masses, and the logits between the levels low and high.

    sums: [rows, 3, chunks] i64, of all masses, of those above high, and of those that min_p keeps of the latter;
    counts: [rows, chunks] i32, of logits above low that are not above high; between: [rows, chunks, PLACES] f32, these
    logits, in any order; bracket: [rows, 2] i32, the least and the largest key that they may have; state: [rows] i32,
    what ``narrow_kernel`` left.
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
            if chunk == 0:
                tl.store(bracket + row * 2, key_of(low) + 1)
                tl.store(bracket + row * 2 + 1, tl.where(high != high, NAN_KEY, key_of(high)))
        of_all = tl.zeros((TILE,), tl.int64)
        of_high = tl.zeros((TILE,), tl.int64)
        of_kept = tl.zeros((TILE,), tl.int64)
        hits = tl.zeros((TILE,), tl.int32)  # a bit for each logit of a thread
        for start in range(0, CHUNK // TILE, UNROLL):
            bits = tl.zeros((TILE,), tl.int32)
            for i in tl.static_range(UNROLL):
                col = chunk * CHUNK + (start + i) * TILE + slot
                x = load_logits(at, stride, col, col < n)
                mass = mass_of(x, scale)
                of_all += mass
                if each[2] is not None:
                    is_high = x > high
                    bits += tl.where((x > low) & ~is_high, 1 << i, 0)
                    mass = tl.where(is_high, mass, 0)
                    of_high += mass
                if each[3] is not None:
                    of_kept += tl.where(mass.to(tl.float64) < least, 0, mass)
            hits |= bits << start
        sums += row * 3 * chunks + chunk
        if each[2] is None:
            tl.store(sums, tl.sum(of_all, 0))
        else:
            count = ones_of(hits)
            all_, high_, count_, most = tl.reduce((of_all, of_high, count, count), 0, sums_and_most)
            tl.store(sums, all_)
            tl.store(sums + chunks, high_)
            tl.store(counts + tl.program_id(0), count_)
            place = tl.cumsum(count, 0) - count
            found = between + tl.program_id(0).to(tl.int64) * PLACES
            for _ in range(most):
                bit = hits & -hits
                number = ((bit.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)) >> 23) - 127
                x = load_logits(at, stride, chunk * CHUNK + number * TILE + slot, hits != 0)
                tl.store(found + place, x, mask=(hits != 0) & (place < PLACES))
                place += 1
                hits ^= bit
        if each[3] is not None:
            tl.store(sums + 2 * chunks, tl.sum(of_kept, 0))


@jit
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
    bracket,
    few,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PLACES: tl.constexpr,
    UNITS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The token of a row that ``narrow_kernel`` left. Operands as in ``masses_kernel`` and, of a row, ``kept_between``.

    CHUNKS >= chunks.
    """
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
                keys = tl.load(bracket + row * 2), tl.load(bracket + row * 2 + 1)
                threshold, is_right, stays = kept_between(
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
                    few + row * UNITS * UNIT,
                    CHUNK,
                    CHUNKS,
                    PLACES,
                    UNITS,
                )
                kept += stays
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
