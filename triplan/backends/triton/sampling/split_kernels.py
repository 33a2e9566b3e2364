"""One token of each row, entry ``split``: what reads a whole row does so by chunks, in programs of their own.

1. ``levels_kernel``, by rows, with top-p: a sample of the row gives some logits, *levels*, about where the threshold of
   top-p may be.
2. ``chunks_kernel``, by chunks: the largest logit, with top-k of each group of GROUP neighbouring tokens; with top-p,
   estimates of the masses from each level on. With top-p and no top-k, ``estimates_kernel``, by several chunks.
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
from triplan.backends.triton.common.overlap import allow_next, wait_for_previous
from triplan.backends.triton.common.philox_kernels import as_i64
from triplan.backends.triton.common.rows_kernels import axis_offset
from triplan.backends.triton.sampling.between_kernels import kept_between, kept_of
from triplan.backends.triton.sampling.levels_kernels import (
    LEVELS,
    OF_BRACKET,
    OF_ROW,
    add_masses,
    edges_of,
    levels_between,
    no_masses,
    rate_f32,
    store_masses,
)
from triplan.backends.triton.sampling.looped_kernels import looped_token
from triplan.backends.triton.sampling.narrow_kernels import DONE, NAN_KEY, SLOW, WIDE
from triplan.backends.triton.sampling.shared_kernels import (
    LEAST_KEY,
    NO_KEY,
    ROUNDER,
    ROUNDER_BITS,
    is_plain,
    key_of,
    least_of,
    load_logits,
    mass_of,
    number_of,
    part_of,
    plain_mass,
    plain_scale,
    rate_of,
    scale_of,
    value_of,
    word_of,
)


@jit
def larger(a, b):
    """max(a, b), of tensors of one shape; NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def load_tiles(at, stride, n, first, CHUNK: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr, UNROLL: tl.constexpr):
    """UNROLL times [SPAN * TILE] logits, TILE of each of SPAN chunks in f32; -inf beyond the row.

    ``first`` is a column of the first chunk. Past the L1 cache: programs call it before they wait.
    """
    slot = tl.arange(0, SPAN * TILE)
    col = first + slot // TILE * CHUNK + slot % TILE
    if first + (SPAN - 1) * CHUNK + UNROLL * TILE <= n:
        tiles = _load_tiles(at, stride, col, n, TILE, UNROLL, True)
    else:
        tiles = _load_tiles(at, stride, col, n, TILE, UNROLL, False)
    return tiles


@jit
def _load_tiles(at, stride, col, n, TILE: tl.constexpr, UNROLL: tl.constexpr, KNOWN: tl.constexpr):
    tiles = ()
    for i in tl.static_range(UNROLL):
        places = at + axis_offset(col + i * TILE, stride)
        if KNOWN:
            x = tl.load(places, cache_modifier=".cg")
        else:
            x = tl.load(places, mask=col + i * TILE < n, other=-float("inf"), cache_modifier=".cg")
        tiles += (x.to(tl.float32),)
    return tiles


@jit
def add_chunk(
    sums, at, stride, n, first, edges, base, rate, CHUNK: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr
):
    """``add_masses`` of all of SPAN chunks, from column ``first`` on."""
    UNROLL: tl.constexpr = min(CHUNK // TILE, 16)
    for start in range(first, first + CHUNK, UNROLL * TILE):
        tiles = load_tiles(at, stride, n, start, CHUNK, SPAN, TILE, UNROLL)
        for i in tl.static_range(UNROLL):
            sums = add_masses(sums, tiles[i], edges, base, rate)
    return sums


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
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Of a chunk: the largest key; that of each group if there is ``largest``; masses above levels if ``masses``.

    tops: [rows, chunks] i32; largest: [rows, groups] i32; both NAN_KEY where there is a NaN. masses: [rows, LEVELS + 1,
    chunks] f32, the last those of all tokens, relative to levels[row, LEVELS].
    """
    wait_for_previous(OVERLAPS)
    allow_next(OVERLAPS)  # (later launches read logits before they wait)
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
            sums = no_masses((TILE,))
            sums = add_chunk(sums, at, stride, n, chunk * CHUNK, edges_of(levels), base, rate, CHUNK, 1, TILE)
            store_masses(masses + row * (LEVELS + 1) * chunks, sums, chunk + tl.arange(0, 1), chunks, 1)


@jit
def estimates_kernel(
    logits,
    row_stride,
    stride,
    n,
    each,
    strides,
    levels,
    tops,
    masses,
    chunks,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """``chunks_kernel`` of SPAN chunks of a row without top-k: the largest key of each, and masses above levels.

    Twice AHEAD tiles are loaded while ``levels_kernel`` runs, and half of that always is ahead.
    """
    allow_next(OVERLAPS)
    spans = (chunks + SPAN - 1) // SPAN
    row = (tl.program_id(0) // spans).to(tl.int64)
    begin = tl.program_id(0) % spans * SPAN
    at = logits + row * row_stride
    rate = rate_f32(each[0], row, strides[0])
    first = begin * CHUNK
    STEP: tl.constexpr = AHEAD * TILE
    one = load_tiles(at, stride, n, first, CHUNK, SPAN, TILE, AHEAD)
    two = load_tiles(at, stride, n, first + STEP, CHUNK, SPAN, TILE, AHEAD)
    wait_for_previous(OVERLAPS)
    levels += row * OF_ROW
    base = tl.load(levels + LEVELS)
    edges = edges_of(levels)
    sums = no_masses((SPAN * TILE,))
    top = tl.full((SPAN * TILE,), -float("inf"), tl.float32)
    for start in range(0, CHUNK, 2 * STEP):
        for i in tl.static_range(AHEAD):
            top = larger(top, one[i])
            sums = add_masses(sums, one[i], edges, base, rate)
        if start + 2 * STEP < CHUNK:
            one = load_tiles(at, stride, n, first + start + 2 * STEP, CHUNK, SPAN, TILE, AHEAD)
        for i in tl.static_range(AHEAD):
            top = larger(top, two[i])
            sums = add_masses(sums, two[i], edges, base, rate)
        if start + 2 * STEP < CHUNK:
            two = load_tiles(at, stride, n, first + start + 3 * STEP, CHUNK, SPAN, TILE, AHEAD)
    chunk = begin + tl.arange(0, SPAN)
    most = tl.reduce(tl.reshape(top, (SPAN, TILE)), 1, larger)
    tl.store(tops + row * chunks + chunk, tl.where(most != most, NAN_KEY, key_of(most)), mask=chunk < chunks)
    store_masses(masses + row * (LEVELS + 1) * chunks, sums, chunk, chunks, SPAN)


@jit
def ones_of(bits):
    """How many bits of an i32 are 1: sums of 2, 4 and 8 neighbours, then of the four bytes by a product."""
    pairs = bits - ((bits >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return (((fours + (fours >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@jit
def lowest_bit(bits):
    """(the lowest bit of an i32 that is 1, its number)."""
    bit = bits & -bits
    return bit, (bit.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


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
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    UNROLL: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Of SPAN chunks of a wide row: masses, and the logits between the levels low and high.

    sums: [rows, 3, chunks] i64, of all masses, of those above high, and of those that min_p keeps of the latter;
    counts: [rows, chunks] i32, of logits above low that are not above high; between: [rows, chunks, PLACES] f32, these
    logits, in any order; bracket: [rows, OF_BRACKET] i32, the least and the largest key that they may have, and three
    about where the threshold probably is; state: [rows] i32,
    what ``narrow_kernel`` left.
    """
    allow_next(OVERLAPS)
    spans = (chunks + SPAN - 1) // SPAN
    row = (tl.program_id(0) // spans).to(tl.int64)
    begin = tl.program_id(0) % spans * SPAN
    at = logits + row * row_stride
    is_wide = True
    if state is not None:
        wait_for_previous(OVERLAPS)
        is_wide = tl.load(state + row) == WIDE
    if is_wide:
        tiles = load_tiles(at, stride, n, begin * CHUNK, CHUNK, SPAN, TILE, UNROLL)
        if state is None:
            wait_for_previous(OVERLAPS)
        key = tl.arange(0, CHUNKS)
        top = value_of(tl.max(tl.load(tops + row * chunks + key, mask=key < chunks, other=LEAST_KEY), 0))
        rate, is_greedy = rate_of(each[0], row, strides[0])
        scale = plain_scale(scale_of(rate, top))
        low = tl.full((), float("nan"), tl.float32)
        high = tl.full((), -float("inf"), tl.float32)
        if each[2] is not None:
            p = tl.load(each[2] + row * strides[2])
            if (p < 1.0) & ~is_greedy:
                low, high, guess, error = levels_between(levels, masses, p, row, chunks, CHUNKS)
                if begin == 0:
                    first, last = key_of(low) + 1, tl.where(high != high, NAN_KEY, key_of(high))
                    one = key_of(guess - error)
                    two = tl.maximum(key_of(guess), one)
                    three = tl.maximum(key_of(guess + error), two)
                    own = bracket + row * OF_BRACKET
                    tl.store(own, first)
                    tl.store(own + 1, last)
                    tl.store(own + 2, tl.minimum(tl.maximum(one, first), last))
                    tl.store(own + 3, tl.minimum(tl.maximum(two, first), last))
                    tl.store(own + 4, tl.minimum(tl.maximum(three, first), last))
        least = least_of(each[3], row, strides[3]) + ROUNDER
        of_all = tl.zeros((SPAN * TILE,), tl.int64)
        of_high = tl.zeros((SPAN * TILE,), tl.int64)
        of_kept = tl.zeros((SPAN * TILE,), tl.int64)
        chunk = begin + tl.arange(0, SPAN)
        known = chunk < chunks
        slot = tl.arange(0, SPAN * TILE)
        listed = tl.zeros((SPAN,), tl.int32)
        for start in range(0, CHUNK, UNROLL * TILE):
            hits = tl.zeros((SPAN * TILE,), tl.int32)  # of what a thread has, a bit for each logit
            for i in tl.static_range(UNROLL):
                mass = plain_mass(tiles[i], scale)  # and ROUNDER_BITS
                of_all += mass
                is_kept = tiles[i] > high
                if each[2] is not None:
                    is_between = (tiles[i] > low) & ~is_kept
                    hits |= tl.where(is_between, (1 << i) - (i // 31 << 32), 0)  # (bit 31 is the sign)
                    of_high += tl.where(is_kept, mass, ROUNDER_BITS)
                if each[3] is not None:
                    is_kept &= mass.to(tl.float64, bitcast=True) >= least
                    of_kept += tl.where(is_kept, mass, ROUNDER_BITS)
            if start + UNROLL * TILE < CHUNK:
                tiles = load_tiles(at, stride, n, begin * CHUNK + start + UNROLL * TILE, CHUNK, SPAN, TILE, UNROLL)
            if each[2] is not None:
                count = ones_of(hits)
                of_chunk = tl.reshape(count, (SPAN, TILE))
                place = tl.ravel(listed[:, None] + tl.cumsum(of_chunk, 1) - of_chunk)
                listed += tl.sum(of_chunk, 1)
                found = between + (row * chunks + begin + slot // TILE) * PLACES
                col = begin * CHUNK + start + slot // TILE * CHUNK + slot % TILE
                for _ in range(0, tl.max(count, 0), 2):
                    first, number = lowest_bit(hits)
                    second, next_number = lowest_bit(hits ^ first)
                    one = load_logits(at, stride, col + number * TILE, first != 0)
                    two = load_logits(at, stride, col + next_number * TILE, second != 0)
                    tl.store(found + place, one, mask=(first != 0) & (place < PLACES))
                    tl.store(found + place + 1, two, mask=(second != 0) & (place + 1 < PLACES))
                    place += 2
                    hits ^= first | second
        places = sums + row * 3 * chunks + chunk
        tl.store(places, sum_of_masses(of_all, CHUNK, SPAN), mask=known)
        if each[3] is not None:
            tl.store(places + 2 * chunks, sum_of_masses(of_kept, CHUNK, SPAN), mask=known)
        if each[2] is not None:
            tl.store(places + chunks, sum_of_masses(of_high, CHUNK, SPAN), mask=known)
            tl.store(counts + row * chunks + chunk, listed, mask=known)


@jit
def sum_of_masses(sums, COUNT: tl.constexpr, SPAN: tl.constexpr):
    """The sums [SPAN] of COUNT masses each, of i64 ``sums`` [SPAN * TILE], in which each has ROUNDER_BITS too."""
    excess: tl.constexpr = (COUNT * ROUNDER_BITS + (1 << 63)) % (1 << 64) - (1 << 63)
    return tl.sub(
        tl.sum(tl.reshape(sums, (SPAN, sums.shape[0] // SPAN)), 1),
        tl.full((), excess, tl.int64),
        sanitize_overflow=False,
    )


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
    WIDTH: tl.constexpr,
    FEW: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The token of a row that ``narrow_kernel`` left. Operands as in ``masses_kernel`` and, of a row, ``kept_between``.

    CHUNKS >= chunks.
    """
    allow_next(OVERLAPS)
    temperature, _, top_p, min_p, seed, position, out = each
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * row_stride
    chunk = tl.arange(0, CHUNKS)
    known = chunk < chunks
    rate, is_greedy = rate_of(temperature, row, strides[0])
    word = word_of(seed, position, row, strides[4], strides[5])
    wait_for_previous(OVERLAPS)
    best = tl.max(tl.load(tops + row * chunks + chunk, mask=known, other=LEAST_KEY), 0)
    left = tl.full((), WIDE, tl.int32)
    if state is not None:
        left = tl.load(state + row)
    if (best == NAN_KEY) | (best == LEAST_KEY):
        tl.store(out + row * strides[6], as_i64(-1))
        left = tl.full((), DONE, tl.int32)
    top = value_of(best)
    scale = scale_of(rate, top)
    if (left == WIDE) & ~is_plain(top, scale):
        left = tl.full((), SLOW, tl.int32)
    if left == WIDE:
        least = None
        if min_p is not None:
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
                    bracket + row * OF_BRACKET,
                    few + row * FEW,
                    CHUNK,
                    CHUNKS,
                    PLACES,
                    WIDTH,
                )
                kept += stays
                left = tl.where(is_right, WIDE, SLOW).to(tl.int32)
        if left == WIDE:
            number = number_of(word, tl.sum(kept, 0), is_greedy)
            first = tl.sum((tl.cumsum(kept, 0) <= number).to(tl.int32), 0)
            number -= tl.sum(tl.where(chunk < first, kept, 0), 0)
            col = first * CHUNK + tl.arange(0, CHUNK)
            x = load_logits(at, stride, col, col < n)
            mass = kept_of(mass_of(x, scale), key_of(x), threshold, least)
            token = first * CHUNK + tl.sum((tl.cumsum(mass, 0) <= number).to(tl.int32), 0)
            tl.store(out + row * strides[6], as_i64(token))
    if left == SLOW:
        tl.store(out + row * strides[6], looped_token(at, stride, n, row, each, strides, STEPS, BLOCK))
