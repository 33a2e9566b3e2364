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
   estimates choose, and the sums of their masses in buckets.
5. ``finish_kernel``, by rows: the bucket of the threshold, and the threshold; then the chunk of the token, of that the
   group of neighbours, of that the token.

Where too many tokens are left, or the estimates were wrong, the last launch takes the token as ``looped`` does: the
token is the same.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import allow_next, wait_for_previous
from triplan.backends.triton.common.philox_kernels import as_i64
from triplan.backends.triton.sampling.between_kernels import LISTS, kept_between, kept_of, listed_from
from triplan.backends.triton.sampling.levels_kernels import (
    BUCKETS,
    LEVELS,
    OF_BRACKET,
    OF_ROW,
    add_masses,
    bucket_of,
    edges_of,
    finite_rate,
    levels_between,
    load_bracket,
    load_masses,
    no_masses,
    rate_f32,
    store_bracket,
    store_masses,
)
from triplan.backends.triton.sampling.looped_kernels import looped_token
from triplan.backends.triton.sampling.narrow_kernels import DONE, NAN_KEY, SLOW, WIDE
from triplan.backends.triton.sampling.shared_kernels import (
    BASE,
    LEAST_KEY,
    ROUNDER,
    add_two,
    as_integer,
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
    sum_of_masses,
    value_of,
    word_of,
)
from triplan.backends.triton.sampling.tiles_kernels import (
    columns_of,
    load_before,
    load_tile,
    load_tiles,
    ones_of_all,
    tiles_from,
    tiles_until,
    with_bits,
    without_lowest,
)

#: Logits of a thread between two levels that are taken together. Untuned.
AT_ONCE = tl.constexpr(4)


@jit
def larger(a, b):
    """max(a, b), of tensors of one shape; NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def add_chunk(at, stride, columns, tiles, edges, base, rate, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """(sums of ``add_masses`` of all tiles, largest logits); ``tiles``: the first ones.

    Of a tile that has been added up, the registers take one of the next iteration, which so has time to arrive.
    """
    COUNT: tl.constexpr = len(tiles)
    sums, top = no_masses(tiles[0].shape), tl.full(tiles[0].shape, -float("inf"), tl.float32)
    for start in range(0, CHUNK // TILE, COUNT):
        following, places = (), tiles_from(at, stride, columns, start + COUNT, TILE)
        for i in tl.static_range(COUNT):
            x = tiles[i].to(tl.float32)
            top = larger(top, x)
            sums = add_masses(sums, x, edges, base, rate)
            following += (load_tile(places, stride, i, TILE),)
        tiles = following
    return sums, top


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
    buckets,
    chunks,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Of a chunk: the largest key; that of each group if there is ``largest``; masses above levels if ``masses``.

    tops: [rows, chunks] i32; largest: [rows, groups] i32; both NAN_KEY where there is a NaN. masses: [rows, OF_ROW,
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
        clear_buckets(buckets, row, chunk == 0)
        levels += row * OF_ROW
        base = tl.load(levels + LEVELS)
        if base == base:
            rate = rate_f32(each[0], row, strides[0])
            columns = columns_of(chunk * CHUNK, n, CHUNK, 1, TILE)
            tiles = load_tiles(at, stride, columns, min(CHUNK // TILE, 4), TILE)
            sums, _ = add_chunk(at, stride, columns, tiles, edges_of(levels), base, rate, CHUNK, TILE)
            store_masses(masses + row * OF_ROW * chunks, sums, chunk, chunks)


@jit
def clear_buckets(buckets, row, is_first):
    """Zeros into the buckets of a row, by its first program."""
    bucket = tl.arange(0, BUCKETS)
    tl.store(buckets + row * BUCKETS + bucket, tl.zeros((BUCKETS,), tl.int64), mask=(bucket >= 0) & is_first)


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
    buckets,
    chunks,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """``chunks_kernel`` of SPAN chunks of a row without top-k: the largest key, and masses above levels, of them all.

    AHEAD tiles are loaded while ``levels_kernel`` runs, and are always ahead.
    """
    allow_next(OVERLAPS)
    spans = (chunks + SPAN - 1) // SPAN
    row = (tl.program_id(0) // spans).to(tl.int64)
    begin = tl.program_id(0) % spans * SPAN
    at = logits + row * row_stride
    rate = rate_f32(each[0], row, strides[0])
    columns = columns_of(begin * CHUNK, n, CHUNK, SPAN, TILE)
    tiles = load_tiles(at, stride, columns, AHEAD, TILE)
    # (What launched this one has waited for the last that read the buckets.)
    clear_buckets(buckets, row, begin == 0)
    wait_for_previous(OVERLAPS)
    levels += row * OF_ROW
    base = tl.load(levels + LEVELS)
    edges = edges_of(levels)
    sums, top = add_chunk(at, stride, columns, tiles, edges, base, rate, CHUNK, TILE)
    most = tl.reduce(top, 0, larger)
    tl.store(tops + tl.program_id(0), tl.where(most != most, NAN_KEY, key_of(most)))
    store_masses(masses + row * OF_ROW * spans, sums, tl.program_id(0) % spans, spans)


@jit
def exact_sums(
    at,
    stride,
    columns,
    tiles,
    scale,
    low,
    high,
    least,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """(sums of masses, of those above ``high``, of those that min_p keeps of the latter; bits of the logits above
    ``low`` that are not above ``high``), element by element of a tile. Each sum begins at BASE.

    tiles: the last ones; low: None without top-p; least: of min_p, plus ROUNDER, or None. IS_WHOLE: all tiles are
    there, so that a load takes one instruction, not three.
    """
    COUNT: tl.constexpr = len(tiles)
    LAST: tl.constexpr = CHUNK // TILE - 1
    shape: tl.constexpr = tiles[0].shape
    of_all = tl.full(shape, BASE, tl.float64)
    of_high = tl.full(shape, BASE, tl.float64)
    of_kept = tl.full(shape, BASE, tl.float64)
    words = ()
    for _ in tl.static_range((CHUNK // TILE + 31) // 32):
        words += (tl.zeros(shape, tl.int32),)
    for start in range(0, CHUNK // TILE, COUNT):
        following, places = (), tiles_until(at, stride, columns, LAST - COUNT - start, TILE)
        hits = tl.zeros(shape, tl.int32)
        for i in tl.static_range(COUNT):
            x = tiles[i].to(tl.float32)
            mass = plain_mass(x, scale)
            of_all += mass
            is_kept = x > high
            if low is not None:
                # (low is not above high. ptxas makes ^ a part of the comparison, but of & ~ two choices.)
                hits |= tl.where((x > low) ^ is_kept, 1 << i, 0)
                of_high = tl.where(is_kept, of_high + mass, of_high)
            if least is not None:
                is_kept &= mass + ROUNDER >= least
                of_kept = tl.where(is_kept, of_kept + mass, of_kept)
            following += (load_before(places, stride, i, TILE, tiles[i] if IS_WHOLE else None),)
        tiles = following
        words = with_bits(words, hits, start)
    return of_all, of_high, of_kept, words


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
    buckets,
    bracket,
    chunks,
    parts,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    PLACES: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    UNROLL: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Of SPAN chunks of a wide row: masses, and the logits between the levels low and high. PARTS >= parts of the row.

    sums: [rows, 3, chunks] i64, of all masses, of those above high, and of those that min_p keeps of the latter;
    counts: [rows, chunks] i32, of logits above low that are not above high; between: [rows, chunks, PLACES] f32, these
    logits, in any order; buckets: [rows, BUCKETS] i64, to which their masses are added; bracket: [rows, OF_BRACKET]
    f32, of ``store_bracket``; state: [rows] i32, what ``narrow_kernel`` left.
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
        columns = columns_of(begin * CHUNK, n, CHUNK, SPAN, TILE)
        # Backwards: the last logits were read last, and are still in the L2 cache if not all of them are.
        LAST: tl.constexpr = CHUNK // TILE - 1
        places, tiles = tiles_until(at, stride, columns, LAST, TILE), ()
        for i in tl.static_range(UNROLL):
            tiles += (load_before(places, stride, i, TILE),)
        rate, is_greedy = rate_of(each[0], row, strides[0])
        if state is None:
            wait_for_previous(OVERLAPS)
        low, high, least = None, tl.full((), -float("inf"), tl.float32), None
        if each[3] is not None:
            least = least_of(each[3], row, strides[3]) + ROUNDER
        # All loads, then all sums: these exchange through shared memory, and no load passes the barriers of that.
        part = tl.arange(0, PARTS)
        key = tl.load(tops + row * parts + part, mask=part < parts, other=LEAST_KEY)
        if each[2] is not None:
            p = tl.load(each[2] + row * strides[2])
            of_levels = load_masses(masses + row * OF_ROW * parts, parts, PARTS)
            level = tl.load(levels + row * OF_ROW + tl.arange(0, OF_ROW))
        top = value_of(tl.max(key, 0))
        scale = plain_scale(scale_of(rate, top))
        if each[2] is not None:
            above, of_every = tl.sum(of_levels[0], 1), tl.sum(of_levels[1], 0)
            last = top - tl.div_rn(42.0, finite_rate(rate))  # in units of log(2): nothing has mass below
            low, high, zones = levels_between(above, of_every, level, top, last, p)
            is_filtered = (p < 1.0) & ~is_greedy
            low, high = tl.where(is_filtered, low, -float("inf")), tl.where(is_filtered, high, -float("inf"))
            if begin == 0:
                store_bracket(bracket + row * OF_BRACKET, low, high, zones)
        if (begin + SPAN) * CHUNK <= n:
            found = exact_sums(at, stride, columns, tiles, scale, low, high, least, CHUNK, TILE, True)
        else:
            found = exact_sums(at, stride, columns, tiles, scale, low, high, least, CHUNK, TILE, False)
        of_all, of_high, of_kept, words = found
        chunk = begin + tl.arange(0, SPAN)
        known = chunk < chunks
        to = sums + row * 3 * chunks + chunk
        tl.store(to, sum_of_masses(of_all, SPAN), mask=known)
        if each[3] is not None:
            tl.store(to + 2 * chunks, sum_of_masses(of_kept, SPAN), mask=known)
        if each[2] is not None:
            tl.store(to + chunks, sum_of_masses(of_high, SPAN), mask=known)
            count, calls = ones_of_all(words)
            of_chunk = tl.reshape(count, (SPAN, TILE))
            tl.store(counts + row * chunks + chunk, tl.sum(of_chunk, 1), mask=known)
            place = tl.ravel(tl.cumsum(of_chunk, 1) - of_chunk)
            found = between + (row * chunks + begin + tl.arange(0, SPAN * TILE) // TILE) * PLACES
            col, _ = columns
            first = tl.zeros(count.shape, tl.int32)
            for _ in range(0, tl.max(calls, 0), AT_ONCE):
                x, is_found = (), ()
                for _i in tl.static_range(AT_ONCE):
                    words, first, number, is_own = without_lowest(words, first)
                    x += (load_logits(at, stride, col + (LAST - number) * TILE, is_own),)
                    is_found += (is_own,)
                for i in tl.static_range(AT_ONCE):
                    tl.store(found + place, x[i], mask=is_found[i] & (place < PLACES))
                    place += is_found[i].to(tl.int32)
                    mass = as_integer(plain_mass(x[i], scale))
                    bucket = row * BUCKETS + bucket_of(x[i], zones)
                    tl.atomic_add(buckets + bucket, mass, mask=is_found[i], sem="relaxed")


@jit
def load_kept(at, stride, col, n, scale, threshold, least):
    """``kept_of`` the logits of columns ``col``."""
    x = load_logits(at, stride, col, col < n)
    return kept_of(mass_of(x, scale), x, threshold, least)


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
    buckets,
    bracket,
    few,
    chunks,
    parts,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
    MANY: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The token of a row that ``narrow_kernel`` left. Operands as in ``masses_kernel`` and, of a row, ``kept_between``.

    CHUNKS >= chunks, PARTS >= parts: of the largest keys of the row.
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
    left = tl.full((), WIDE, tl.int32)
    if state is not None:
        left = tl.load(state + row)
    if left != DONE:
        # All loads, then all sums: these exchange through shared memory, and no load passes the barriers of that.
        part = tl.arange(0, PARTS)
        key = tl.load(tops + row * parts + part, mask=part < parts, other=LEAST_KEY)
        is_wide = left == WIDE
        mine = known & is_wide
        of_chunk = sums + row * 3 * chunks + chunk
        kind = 2 if min_p is not None else 1 if top_p is not None else 0
        kept = tl.load(of_chunk + kind * chunks, mask=mine, other=0)
        if top_p is not None:
            p = tl.load(top_p + row * strides[2]).to(tl.float64)
            of_all = tl.load(of_chunk, mask=mine, other=0)
            of_high = tl.load(of_chunk + chunks, mask=mine, other=0)
            count = tl.load(counts + row * chunks + chunk, mask=mine, other=0)
            of_bucket = tl.load(buckets + row * BUCKETS + tl.arange(0, BUCKETS))
            bounds = load_bracket(bracket + row * OF_BRACKET)
            lists = ()
            for i in tl.static_range(LISTS):
                lists += (listed_from(between, count, row, chunks, i * WIDTH, PLACES, WIDTH),)
        best = tl.max(key, 0)
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
            threshold = tl.full((), float("nan"), tl.float32)
            if top_p is not None:
                if (p < 1.0) & ~is_greedy:
                    every, above = tl.reduce((of_all, of_high), 0, add_two)
                    threshold, is_right, stays = kept_between(
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
                        part_of(p, every),
                        least,
                        few + row * MANY,
                        CHUNK,
                        PLACES,
                        WIDTH,
                        MANY,
                    )
                    kept += stays
                    left = tl.where(is_right, WIDE, SLOW).to(tl.int32)
            if left == WIDE:
                number = number_of(word, tl.sum(kept, 0), is_greedy)
                first = tl.sum((tl.cumsum(kept, 0) <= number).to(tl.int32), 0)
                number -= tl.sum(tl.where(chunk < first, kept, 0), 0)
                col = first * CHUNK + tl.arange(0, CHUNK)
                upto = tl.cumsum(load_kept(at, stride, col, n, scale, threshold, least), 0)
                token = first * CHUNK + tl.sum((upto <= number).to(tl.int32), 0)
                tl.store(out + row * strides[6], as_i64(token))
        if left == SLOW:
            tl.store(out + row * strides[6], looped_token(at, stride, n, row, each, strides, STEPS, BLOCK))
