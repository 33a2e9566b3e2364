"""Levels of ``split``: logits of which two neighbours probably enclose the threshold of top-p.

What follows from them is checked, so estimates are f32 and need not be the same on all GPUs.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import allow_next, wait_for_previous
from triplan.backends.triton.sampling.narrow_kernels import has_few
from triplan.backends.triton.sampling.shared_kernels import LOG2_E, MOST, load_logits, rate_of, sum_and_ends

#: A power of two: of logits up to 2**67, those above a level differ from it by 1 / SHARP or more unless both are tiny.
SHARP = tl.constexpr(2.0**60)
#: Levels of a row. Untuned.
LEVELS = tl.constexpr(11)
#: Numbers of a row that ``levels_kernel`` writes: its levels, and what the estimates of masses are relative to. Then
#: nothing, up to a power of two, 2**OF_ROW_BITS.
OF_ROW = tl.constexpr(16)
OF_ROW_BITS = tl.constexpr(4)
#: Numbers of a row that ``store_bracket`` writes.
OF_BRACKET = tl.constexpr(8)
#: About how far the threshold is from where the mass is if it is spread evenly between two levels, in parts of what is
#: between these. In few drawn rows it is further; then its bucket has more logits.
ERROR = tl.constexpr(0.1)
#: Buckets of a row, into which the logits between two levels are sorted: half of them are about where the threshold
#: probably is, a quarter on each side. Chosen by hand from 1024, 2048 and 4096, for 64 rows of 128,256 tokens (H200).
BUCKETS = tl.constexpr(2048)
#: Cells of a histogram of the sample; the last has what is too small to have mass.
CELLS = tl.constexpr(128)
#: Estimates of a mass are wrong by less than this part of the sum: by roundings to f32 in sums by halves, and of
#: exponents, of 40 at most where there is mass.
SLACK = tl.constexpr(2.0**-14)
#: The median absolute error of an estimated mass, in standard deviations of the sample. And the part of rows in which
#: the sample misses the tokens with most mass, so that the threshold may be at any token of the sample. Of a few values
#: of each that were tried on drawn rows, these leave the fewest logits between two levels.
MEDIAN_ERROR = tl.constexpr(1.0)
MISSES = tl.constexpr(0.03)


@jit
def rate_f32(temperature, row, stride):
    """``finite_rate`` of a row."""
    return finite_rate(rate_of(temperature, row, stride)[0])


@jit
def finite_rate(rate):
    """``rate``, 1 / temperature, in units of log(2), for estimates: f32 that is neither 0 nor infinite."""
    return tl.minimum(tl.maximum(rate * LOG2_E, 1e-30), 1e30).to(tl.float32)


@jit
def probability_below(error, median):
    """0.5 * error / (median + abs(error)): the probability of a smaller error, less 1/2.

    The distribution has heavy tails, and ``median`` is the median of the absolute error.
    """
    return 0.5 * error / (median + tl.abs(error))


@jit
def extremes(a0, a1, b0, b1):
    """(max(a0, b0), min(a1, b1)), of tensors of one shape."""
    return tl.maximum(a0, b0), tl.minimum(a1, b1)


@jit
def cell_at(target, upto):
    """Where the running sums ``upto`` [targets, cells] of cells reach each ``target`` [targets]; in cells."""
    target = target[:, None]
    is_less = upto < target
    before = tl.where(is_less, upto, 0.0)
    whole, before, after = tl.reduce((is_less.to(tl.float32), before, tl.where(is_less, 1e38, upto)), 1, sum_and_ends)
    part = (tl.reshape(target, whole.shape) - before) / tl.maximum(after - before, 1e-30)
    return whole + tl.minimum(tl.maximum(part, 0.0), 1.0)


@jit
def levels_kernel(
    logits,
    row_stride,
    stride,
    n,
    each,
    strides,
    levels,
    SAMPLE: tl.constexpr,
    RUN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """levels[row] = LEVELS logits, and the largest of the sample of SAMPLE tokens; [rows, OF_ROW] f32.

    The largest is NaN in rows that ``narrow_kernel`` takes, whose levels are not written.

    Of every so many runs of RUN tokens one is taken. A histogram of them over the logits gives an estimate m of the
    mass above each logit. The threshold is where m is b, the part of the mass that top_p asks for, but for the error
    of m: with the median absolute error s, m - b has the distribution function 1/2 + (m - b) / (s + abs(m - b)) / 2.
    (Its tails are heavy, as the sample may miss a few tokens with much mass.) This gives the probability q of each
    cell to hold the threshold. Levels are at equal steps of the running sum of sqrt(q * tokens): then the expected
    number of tokens between the two levels about the threshold is least.
    """
    wait_for_previous(OVERLAPS)
    if each[1] is not None:
        allow_next(OVERLAPS)  # (later launches read logits before they wait)
    row = tl.program_id(0).to(tl.int64)
    levels += row * OF_ROW
    # These first: what the next launch loads is ahead of loads after it.
    rate = rate_f32(each[0], row, strides[0])
    p = tl.load(each[2] + row * strides[2])
    if has_few(each, strides, row, n):
        tl.store(levels + LEVELS, float("nan"))
    else:
        slot = tl.arange(0, SAMPLE)
        step = ((n + RUN - 1) // RUN + SAMPLE // RUN - 1) // (SAMPLE // RUN)
        col = (slot // RUN) * step * RUN + slot % RUN
        x = load_logits(logits + row * row_stride, stride, col, col < n)
        x = tl.where(x != x, -float("inf"), x)
        top, least = tl.reduce((x, tl.where(x == -float("inf"), float("inf"), x)), 0, extremes)
        if each[1] is None:
            allow_next(OVERLAPS)  # the sample is there
        least = tl.maximum(least, top - 40.0 / rate)  # in units of log(2): nothing has mass below
        width = tl.maximum((top - least) / (CELLS - 2), 1e-30)
        cell = tl.minimum(tl.maximum(((top - x) / width).to(tl.int32), 0), CELLS - 2)
        count = tl.histogram(tl.where(x >= least, cell, CELLS - 1), CELLS).to(tl.float32)
        cell = tl.arange(0, CELLS)
        weight = tl.exp2(-(cell.to(tl.float32) + 0.5) * width * rate)
        weight = tl.where(cell == CELLS - 1, 0.0, weight)
        own = count * weight
        upto = tl.cumsum(own, 0)
        whole = tl.sum(own, 0)
        bound = p * whole
        part = tl.where(upto < bound, 1.0 - p, p)
        median = tl.maximum(MEDIAN_ERROR * tl.sqrt(tl.sum(own * weight * part * part, 0)), 1e-6 * whole)
        chance = probability_below(upto - bound, median) - probability_below(upto - own - bound, median)
        score = tl.cumsum(tl.sqrt(tl.maximum(chance + MISSES * own / whole, 0.0) * count), 0)
        level = tl.arange(0, OF_ROW)
        target = tl.max(score, 0) * tl.minimum(level.to(tl.float32) / (LEVELS - 1), 1.0)
        found = top - width * cell_at(target, score[None, :])
        is_finite = tl.abs(top) <= MOST
        found = tl.maximum(tl.where(is_finite, found, top), -MOST)
        tl.store(levels + level, tl.where(level < LEVELS, found, tl.where(is_finite, top, 0.0)))


@jit
def edges_of(levels):
    """The levels at ``levels``, times SHARP."""
    edges = ()
    for j in tl.static_range(LEVELS):
        edges += (tl.load(levels + j) * SHARP,)
    return edges


@jit
def no_masses(shape: tl.constexpr):
    """Where ``add_masses`` begins."""
    sums = ()
    for _ in tl.static_range(LEVELS + 1):
        sums += (tl.zeros(shape, tl.float32),)
    return sums


@jit
def add_masses(sums, x, edges, base, rate):
    """``sums`` and estimates of the masses of ``x`` above each level, and of all, element by element.

    base: a logit, whose mass is 1; rate: of ``rate_f32``. A mass too large for f32 is infinite. Its logit is above
    ``base``, and so above all levels, so that all estimates are then infinite.
    """
    weight = tl.exp2((x - base) * rate)
    found = ()
    for j in tl.static_range(LEVELS):
        # Products by a power of two are exact, and so is 0 or 1 here, by one instruction; a comparison takes two.
        is_above = tl.minimum(tl.maximum(x * SHARP - edges[j], 0.0), 1.0)
        found += (sums[j] + is_above * weight,)
    return found + (sums[LEVELS] + weight,)


@jit
def store_masses(masses, sums, part, parts):
    """``sums`` of ``add_masses`` of a part of a row, as column ``part`` of [OF_ROW, parts] at ``masses``."""
    # All sums at once: one after the other, each would wait for shared memory. Joined they are [TILE, 2, 2, ...].
    halves = sums
    for _ in tl.static_range(OF_ROW - len(sums)):
        halves += (tl.zeros(sums[0].shape, tl.float32),)
    for _ in tl.static_range(OF_ROW_BITS):
        joined = ()
        for i in tl.static_range(len(halves) // 2):
            joined += (tl.join(halves[i], halves[i + len(halves) // 2]),)
        halves = joined
    level = tl.arange(0, OF_ROW)
    tl.store(masses + level * parts + part, tl.reshape(tl.sum(halves[0], 0), (OF_ROW,)))


@jit
def load_masses(masses, parts, PARTS: tl.constexpr):
    """(masses above levels [OF_ROW], of all tokens []) of a row, from ``store_masses``. PARTS >= parts."""
    level, part = tl.arange(0, OF_ROW)[:, None], tl.arange(0, PARTS)
    is_part = part < parts
    above = tl.load(masses + level * parts + part[None, :], mask=is_part[None, :], other=0.0)
    return above, tl.load(masses + LEVELS * parts + part, mask=is_part, other=0.0)


@jit
def levels_between(reached, whole, x, largest, least, p):
    """(low, high, zones): the threshold of top-p is a logit l with low < l and not l > high; NaN if no level is above
    it. zones: what ``bucket_of`` takes of the row.

    reached: estimates of the masses above the levels ``x`` [OF_ROW], the first LEVELS; whole: of all; largest, least:
    logits of the row, the least one that has mass. The threshold is about where it is if the mass is spread evenly
    between two levels.
    """
    bound = p.to(tl.float32) * whole
    is_level = tl.arange(0, OF_ROW) < LEVELS
    is_low = is_level & (reached >= bound * (1.0 + SLACK))
    is_high = is_level & (reached < bound * (1.0 - SLACK))
    low, high, from_low, from_high = tl.reduce(
        (
            tl.where(is_low, x, -float("inf")),
            tl.where(is_high, x, float("inf")),
            tl.where(is_low, reached, float("inf")),
            tl.where(is_high, reached, 0.0),
        ),
        0,
        ends_of,
    )
    first, last = tl.where(high == float("inf"), largest, high), tl.maximum(low, least)
    width = tl.maximum(first - last, 0.0)
    part = tl.div_rn(bound - from_high, tl.maximum(tl.minimum(from_low, whole) - from_high, 1e-30))
    guess = first - width * tl.minimum(part, 1.0)
    second, third = guess + width * ERROR, guess - width * ERROR
    above, about = per_logit(BUCKETS // 4, first, second), per_logit(BUCKETS // 2, second, third)
    zones = (first, second, third, above, about, per_logit(BUCKETS // 4, third, last))
    return low, tl.where(high == float("inf"), float("nan"), high), zones


@jit
def ends_of(a0, a1, a2, a3, b0, b1, b2, b3):
    """(max(a0, b0), min(a1, b1), min(a2, b2), max(a3, b3)), of tensors of one shape."""
    return tl.maximum(a0, b0), tl.minimum(a1, b1), tl.minimum(a2, b2), tl.maximum(a3, b3)


@jit
def per_logit(count: tl.constexpr, above, below):
    """``count`` buckets over the logits from ``below`` to ``above``: a positive finite number."""
    return tl.minimum(tl.div_rn(tl.full((), count, tl.float32), tl.maximum(above - below, 1e-30)), 1e30)


@jit
def bucket_of(x, zones):
    """The bucket of logits ``x`` (f32): numbers that grow as logits fall. Equal logits are in one bucket."""
    bucket = depth_of(x, zones).to(tl.int32)
    return tl.minimum(tl.maximum(bucket, 0), BUCKETS - 1)  # (of a row with NaN, there is any number)


@jit
def depth_of(x, zones):
    """``bucket_of`` logits ``x`` before it is rounded down, in f32.

    zones: the logits at which three zones begin, and buckets a logit of each.

    Each step is monotone with its rounding, so the logits of a bucket are neighbours in the order of all.
    """
    first, second, third, above, about, below = zones
    part = tl.minimum(tl.maximum((first - x) * above, 0.0), BUCKETS // 4)
    part += tl.minimum(tl.maximum((second - x) * about, 0.0), BUCKETS // 2)
    return part + tl.minimum(tl.maximum((third - x) * below, 0.0), BUCKETS // 4 - 0.5)


@jit
def store_bracket(bracket, low, high, zones):
    """``low``, ``high`` and ``zones`` as [OF_BRACKET] at ``bracket``."""
    tl.store(bracket, low)
    tl.store(bracket + 1, high)
    for i in tl.static_range(6):
        tl.store(bracket + 2 + i, zones[i])


@jit
def load_bracket(bracket):
    """(low, high, zones) of ``store_bracket``."""
    zones = ()
    for i in tl.static_range(6):
        zones += (tl.load(bracket + 2 + i),)
    return tl.load(bracket), tl.load(bracket + 1), zones
