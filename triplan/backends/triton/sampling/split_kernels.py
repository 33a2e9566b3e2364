"""One token of each row, entry ``split``: what reads a whole row does so by chunks, in programs of their own.

1. ``largest_kernel``, by chunks: the largest key of each group of GROUP neighbouring tokens.
2. ``narrow_kernel``, by rows. The k-th largest of these is at most the k-th largest logit, so groups whose largest key
   is below it hold none of the top k: the few others, in registers, give the token. (So is the k-th largest of fewer
   maxima, of several groups each: it is found sooner, and tried first.) A row without top-k is *wide*: of top_p, an
   estimate says between which keys its threshold lies.
3. ``masses_kernel``, by chunks of wide rows: exact sums of masses, and the keys between those two.
4. ``finish_kernel``, by rows: the exact threshold, among these keys; then the chunk of the token, then the token.

Where too many tokens are left, or the estimate was wrong, the last launch takes the token as ``looped`` does: the token
is the same.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.common.philox_kernels import as_i64
from triplan.backends.triton.common.rows_kernels import exponential
from triplan.backends.triton.sampling.looped_kernels import looped_token
from triplan.backends.triton.sampling.shared_kernels import (
    FAR,
    LEAST_KEY,
    NO_KEY,
    crossing,
    drawn,
    key_of,
    kth_largest,
    least_of,
    load_logits,
    mass_of,
    part_of,
    rate_of,
    value_of,
)

#: The key of a group that holds a NaN.
NAN_KEY = tl.constexpr(0x7FFFFFFF)
#: What is left to do for a row: nothing, as for a wide row, or all.
DONE = tl.constexpr(0)
WIDE = tl.constexpr(1)
SLOW = tl.constexpr(2)
#: Cells of the estimate along the logits that have mass, of 0.0017 temperatures each.
CELLS = tl.constexpr(1 << 14)
#: The width of a cell, in temperatures.
CELL = tl.constexpr(28.0 / (1 << 14))
#: Groups of which a first bound knows one maximum.
NEIGHBOURS = tl.constexpr(16)
#: Tokens of few groups that a program takes as a small block. Untuned.
SMALL = tl.constexpr(2048)


@triton.jit
def largest_kernel(
    logits,
    row_stride,
    stride,
    n,
    largest,
    chunks,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """largest[row, group] = the largest key of a group of GROUP tokens, NAN_KEY if one is NaN."""
    begin(OVERLAPS)
    row = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    group = tl.arange(0, CHUNK // GROUP)
    col = chunk * CHUNK + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = load_logits(logits + row.to(tl.int64) * row_stride, stride, col, col < n)
    key = tl.where(x != x, NAN_KEY, key_of(x))
    tl.store(largest + tl.program_id(0).to(tl.int64) * (CHUNK // GROUP) + group, tl.max(key, 1))


@triton.jit
def token_of_few(x, col, known, n, row, low, best, rate, is_greedy, each, strides):
    """The token of a row of which no other tokens than the ``known`` of a block can be drawn.

    x, col, known: logits, ascending ids, and which are the row's. No logit with a key below ``low`` stays, nor is one
    above ``best``.
    """
    _, top_k, top_p, min_p, seed, position, _ = each
    top = value_of(best)
    key = tl.where(known, key_of(x), NO_KEY)
    if top_k is not None:
        k = tl.load(top_k + row * strides[1])
        if (k > 0) & (k < n):
            low = kth_largest(key, low, best, k)
    mass = tl.where(known & (key >= low), mass_of(x, top, rate), 0)
    if top_p is not None:
        p = tl.load(top_p + row * strides[2]).to(tl.float64)
        if p < 1.0:
            low = crossing(key, mass, 0, low, best, part_of(p, tl.sum(mass, 0)))
            mass = tl.where(key >= low, mass, 0)
    if min_p is not None:
        mass = tl.where(mass.to(tl.float64) < least_of(min_p, row, strides[3]), 0, mass)
    number = drawn(seed, position, row, strides[4], strides[5], tl.sum(mass, 0), is_greedy)
    place = tl.sum((tl.cumsum(mass, 0) <= number).to(tl.int32), 0)
    return tl.sum(tl.where(tl.arange(0, x.shape[0]) == place, col, 0), 0).to(tl.int64)


@triton.jit
def token_of_groups(
    places,
    count,
    at,
    stride,
    n,
    row,
    low,
    best,
    rate,
    is_greedy,
    each,
    strides,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
):
    """``token_of_few`` of ``count`` groups of GROUP tokens, whose numbers are at ``places``; of SIZE tokens at most."""
    slot = tl.arange(0, SIZE)
    is_taken = slot // GROUP < count
    col = tl.load(places + slot // GROUP, mask=is_taken, other=0) * GROUP + slot % GROUP
    is_taken = is_taken & (col < n)
    x = load_logits(at, stride, col, is_taken)
    return token_of_few(x, col, is_taken, n, row, low, best, rate, is_greedy, each, strides)


@triton.jit
def below_top(x, top, rate):
    """(weight, distance below ``top`` in temperatures) of logits, in f32, for an estimate."""
    far = tl.where(x == top, 0.0, (top - x) * rate)
    return tl.where(far < -FAR, exponential(-far), 0.0), far


@triton.jit
def edge_of(weight, far, own_weight, own_far, bound):
    """The distance, by cells, that ``bound`` is reached at: less lies before it."""
    found = tl.full((), 0, tl.int32)
    unit = tl.full((), CELLS // 2, tl.int32)
    while unit > 0:
        edge = (found + unit).to(tl.float32) * CELL
        sums = tl.where(far < edge, weight, 0.0) + tl.where(own_far < edge, own_weight, 0.0)
        found += tl.where(tl.sum(sums, 0) < bound, unit, 0)
        unit = unit // 2
    return (found.to(tl.float32) + 0.5) * CELL


@triton.jit
def width_of(count, apart, own_count, own_apart, KEYS: tl.constexpr):
    """The largest of some widths, CELL * 2**(i / 4), below which KEYS tokens at most are ``apart``; or the smallest."""
    found = tl.full((), 0, tl.int32)
    unit = tl.full((), 32, tl.int32)
    while unit > 0:
        width = CELL * tl.exp2((found + unit).to(tl.float32) * 0.25)
        counts = tl.where(apart < width, count, 0) + tl.where(own_apart < width, own_count, 0)
        found += tl.where(tl.sum(counts, 0) <= KEYS, unit, 0)
        unit = unit // 2
    return CELL * tl.exp2(found.to(tl.float32) * 0.25)


@triton.jit
def estimate(
    at,
    stride,
    n,
    largest,
    own,
    known,
    best,
    rate,
    p,
    groups,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
):
    """(low, high): the threshold of top_p probably is a key of low ... high - 1; about KEYS tokens have one of these.

    Of each group the largest logit is known, ``own``; the others are estimated from FEW tokens, of every so many
    groups.
    """
    # What follows from an estimate is checked; so it is f32, and need not be the same on all GPUs.
    top = value_of(best)
    scale = rate.to(tl.float32)
    slot = tl.arange(0, FEW)
    step = (groups + FEW // GROUP - 1) // (FEW // GROUP)
    group = (slot // GROUP) * step
    col = group * GROUP + slot % GROUP
    is_sampled = (group < groups) & (col < n)
    x = load_logits(at, stride, col, is_sampled)
    is_sampled = is_sampled & (key_of(x) < tl.load(largest + group, mask=is_sampled, other=NO_KEY))
    weight, far = below_top(x, top, scale)
    weight = tl.where(is_sampled, weight * step.to(tl.float32), 0.0)
    own_weight, own_far = below_top(value_of(own), top, scale)
    own_weight = tl.where(known, own_weight, 0.0)

    edge = edge_of(weight, far, own_weight, own_far, p.to(tl.float32) * tl.sum(weight + own_weight, 0))
    count = tl.where(is_sampled, step, 0).to(tl.int32)
    width = width_of(count, tl.abs(far - edge), known.to(tl.int32), tl.abs(own_far - edge), KEYS)
    high = tl.where(edge < width, best, key_of(top - (edge - width) / scale)) + 1
    low = key_of(top - (edge + width) / scale)
    # (Of an infinite temperature both may be anything.)
    low = tl.minimum(tl.maximum(low, LEAST_KEY), best)
    return low, tl.minimum(tl.maximum(high, low + 1), best + 1)


@triton.jit
def narrow_kernel(
    logits,
    row_stride,
    stride,
    n,
    each,
    strides,
    largest,
    chosen,
    state,
    groups,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The token of a row of which few tokens can be drawn, into out; what is left to do for it, into state.

    largest: [rows, groups]; chosen: [rows, FEW // GROUP], the groups whose tokens are looked at; state: [rows, 4],
    what is left to do, the keys between which the threshold of top_p lies, the largest key. FEW >= groups.
    """
    begin(OVERLAPS)
    temperature, top_k, top_p, _, _, _, out = each
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * row_stride
    of_row = largest + row * groups
    group = tl.arange(0, FEW)
    known = group < groups
    keys = tl.load(of_row + group, mask=known, other=LEAST_KEY)
    best = tl.max(keys, 0)
    is_bad = (best == NAN_KEY) | (best == LEAST_KEY)
    rate, is_greedy = rate_of(temperature, row, strides[0])
    is_few = is_greedy
    k = tl.full((), 1, tl.int64)
    if top_k is not None:
        given = tl.load(top_k + row * strides[1])
        is_few = is_few | ((given > 0) & (given < n))
        k = tl.where(is_greedy, k, given)

    left = tl.full((), WIDE, tl.int32)
    low = tl.full((), NO_KEY, tl.int32)
    high = tl.full((), NO_KEY, tl.int32)
    if is_bad:
        tl.store(out + row * strides[6], as_i64(-1))
        left = tl.full((), DONE, tl.int32)
    if is_few & (left == WIDE):
        # (The largest is at the end of a search that has but one key to find.)
        start = tl.where(is_greedy, best, LEAST_KEY)
        maxima = tl.max(tl.reshape(keys, (FEW // NEIGHBOURS, NEIGHBOURS)), 1)
        least = kth_largest(maxima, start, best, k)
        count = tl.sum((known & (keys >= least)).to(tl.int32), 0)
        if count * GROUP > FEW:
            least = kth_largest(keys, start, best, k)
            count = tl.sum((known & (keys >= least)).to(tl.int32), 0)
        left = tl.where(count * GROUP <= FEW, DONE, SLOW).to(tl.int32)
        if left == DONE:
            is_chosen = known & (keys >= least)
            places = chosen + row * (FEW // GROUP)
            tl.store(places + tl.cumsum(is_chosen.to(tl.int32), 0) - 1, group, mask=is_chosen)
            tl.debug_barrier()  # threads read what other threads of the program have written
            token = tl.full((), 0, tl.int64)
            if count * GROUP <= SMALL:
                token = token_of_groups(
                    places, count, at, stride, n, row, least, best, rate, is_greedy, each, strides, GROUP, SMALL
                )
            else:
                token = token_of_groups(
                    places, count, at, stride, n, row, least, best, rate, is_greedy, each, strides, GROUP, FEW
                )
            tl.store(out + row * strides[6], token)
    if top_p is not None:
        p = tl.load(top_p + row * strides[2]).to(tl.float64)
        if (left == WIDE) & (p < 1.0):
            # Loaded again: kept in registers until here, they would be spilled.
            keys = tl.load(of_row + group, mask=known, other=LEAST_KEY)
            low, high = estimate(at, stride, n, of_row, keys, known, best, rate, p, groups, KEYS, GROUP, FEW)
    state += row * 4
    tl.store(state, left)
    tl.store(state + 1, low)
    tl.store(state + 2, high)
    tl.store(state + 3, best)


@triton.jit
def store_between(
    at, stride, n, begins, low, high, base, found, CHUNK: tl.constexpr, PLACES: tl.constexpr, LINE: tl.constexpr
):
    """Store the keys low ... high - 1 of a chunk at ``found``, those of each line from its place ``base`` on.

    base: [LINES]; line i has LINE tokens of each LINES * LINE. No key is stored that has a place from PLACES on.
    """
    line = tl.arange(0, base.shape[0])
    for start in range(0, CHUNK, base.shape[0] * LINE):
        col = begins + start + line[:, None] * LINE + tl.arange(0, LINE)[None, :]
        key = key_of(load_logits(at, stride, col, col < n))
        is_between = ((key >= low) & (key < high) & (col < n)).to(tl.int32)
        place = base[:, None] + tl.cumsum(is_between, 1) - 1
        tl.store(found + place, key, mask=(is_between != 0) & (place < PLACES))
        base += tl.sum(is_between, 1)


@triton.jit
def masses_kernel(
    logits,
    row_stride,
    stride,
    n,
    each,
    strides,
    state,
    sums,
    counts,
    between,
    chunks,
    CHUNK: tl.constexpr,
    PLACES: tl.constexpr,
    LINES: tl.constexpr,
    LINE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Of a chunk of a wide row: masses, and the keys between low and high of state.

    sums: [rows, 4, chunks], of all masses, of those from high on, of those that min_p keeps of the latter, and what
    ``finish_kernel`` makes of the rest; counts: [rows, chunks], of keys of low ... high - 1; between: [rows, chunks,
    PLACES], these keys. A program has LINES lines of LINE tokens at a time; lines fit warps, so that those that count
    keys need not wait for each other.
    """
    begin(OVERLAPS)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    begins = (tl.program_id(0) % chunks) * CHUNK
    at = logits + row * row_stride
    state += row * 4
    if tl.load(state) == WIDE:
        rate, _ = rate_of(each[0], row, strides[0])
        top = value_of(tl.load(state + 3))
        low, high = tl.load(state + 1), tl.load(state + 2)
        least = least_of(each[3], row, strides[3])
        of_all = tl.zeros((LINES, LINE), tl.int64)
        of_high = tl.zeros((LINES, LINE), tl.int64)
        of_kept = tl.zeros((LINES, LINE), tl.int64)
        count = tl.zeros((LINES, LINE), tl.int32)
        for start in range(0, CHUNK, LINES * LINE):
            col = begins + start + tl.arange(0, LINES)[:, None] * LINE + tl.arange(0, LINE)[None, :]
            x = load_logits(at, stride, col, col < n)
            mass = tl.where(col < n, mass_of(x, top, rate), 0)
            of_all += mass
            if each[2] is not None:
                key = key_of(x)
                count += ((key >= low) & (key < high) & (col < n)).to(tl.int32)
                mass = tl.where(key >= high, mass, 0)
                of_high += mass
            if each[3] is not None:
                of_kept += tl.where(mass.to(tl.float64) < least, 0, mass)
        of_chunk = sums + row * 4 * chunks + tl.program_id(0) % chunks
        tl.store(of_chunk, tl.sum(tl.sum(of_all, 1), 0))
        tl.store(of_chunk + chunks, tl.sum(tl.sum(of_high if each[2] is not None else of_all, 1), 0))
        if each[3] is not None:
            tl.store(of_chunk + 2 * chunks, tl.sum(tl.sum(of_kept, 1), 0))
        if each[2] is not None:
            of_line = tl.sum(count, 1)
            tl.store(counts + tl.program_id(0), tl.sum(of_line, 0))
            if low < high:
                found = between + tl.program_id(0).to(tl.int64) * PLACES
                base = tl.cumsum(of_line, 0) - of_line
                store_between(at, stride, n, begins, low, high, base, found, CHUNK, PLACES, LINE)


@triton.jit
def finish_kernel(
    logits,
    row_stride,
    stride,
    n,
    each,
    strides,
    state,
    sums,
    counts,
    between,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PLACES: tl.constexpr,
    BETWEEN: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The token of a row that ``narrow_kernel`` left. Operands as in ``masses_kernel``; CHUNKS >= chunks.

    The last of sums: running sums, over chunks, of the masses that stay of those between.
    """
    begin(OVERLAPS)
    temperature, _, top_p, min_p, seed, position, out = each
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * row_stride
    state += row * 4
    left = tl.load(state)
    if left == WIDE:
        rate, is_greedy = rate_of(temperature, row, strides[0])
        best = tl.load(state + 3)
        top = value_of(best)
        least = least_of(min_p, row, strides[3])
        chunk = tl.arange(0, CHUNKS)
        known = chunk < chunks
        of_chunk = sums + row * 4 * chunks + chunk
        kept = tl.load(of_chunk + (2 if min_p is not None else 1) * chunks, mask=known, other=0)
        threshold = tl.full((), NO_KEY, tl.int32)
        if top_p is not None:
            p = tl.load(top_p + row * strides[2]).to(tl.float64)
            if p < 1.0:
                low, high = tl.load(state + 1), tl.load(state + 2)
                bound = part_of(p, tl.sum(tl.load(of_chunk, mask=known, other=0), 0))
                above = tl.sum(tl.load(of_chunk + chunks, mask=known, other=0), 0)
                of_row = counts + row * chunks
                most = tl.max(tl.load(of_row + chunk, mask=known, other=0), 0)
                slot = tl.arange(0, BETWEEN)
                of, place = slot // PLACES, slot % PLACES
                is_there = place < tl.load(of_row + of, mask=of < chunks, other=0)
                key = tl.load(between + row * chunks * PLACES + slot, mask=is_there, other=NO_KEY)
                mass = tl.where(is_there, mass_of(value_of(key), top, rate), 0)
                reached = above + tl.sum(mass, 0)
                is_right = (above.to(tl.float64) < bound) & (reached.to(tl.float64) >= bound) & (most <= PLACES)
                left = tl.where(is_right, WIDE, SLOW).to(tl.int32)
                if left == WIDE:
                    threshold = crossing(key, mass, above, low, high - 1, bound)
                    mass = tl.where((key < threshold) | (mass.to(tl.float64) < least), 0, mass)
                    ends = of_chunk + 3 * chunks
                    last_of = sums + row * 4 * chunks + 3 * chunks + of
                    tl.store(last_of, tl.cumsum(mass, 0), mask=(place == PLACES - 1) & (of < chunks))
                    tl.debug_barrier()  # threads read what other threads of the program have written
                    kept += tl.load(ends, mask=known, other=0) - tl.load(ends - 1, mask=known & (chunk > 0), other=0)
        if left == WIDE:
            number = drawn(seed, position, row, strides[4], strides[5], tl.sum(kept, 0), is_greedy)
            first = tl.sum((tl.cumsum(kept, 0) <= number).to(tl.int32), 0)
            number -= tl.sum(tl.where(chunk < first, kept, 0), 0)
            col = first * CHUNK + tl.arange(0, CHUNK)
            x = load_logits(at, stride, col, col < n)
            mass = mass_of(x, top, rate)
            dropped = (col >= n) | (key_of(x) < threshold) | (mass.to(tl.float64) < least)
            upto = tl.cumsum(tl.where(dropped, 0, mass), 0)
            token = first * CHUNK + tl.sum((upto <= number).to(tl.int32), 0)
            tl.store(out + row * strides[6], as_i64(token))
    if left == SLOW:
        tl.store(out + row * strides[6], looped_token(at, stride, n, row, each, strides, STEPS, BLOCK))
