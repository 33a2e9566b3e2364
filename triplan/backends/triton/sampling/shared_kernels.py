"""What the kernels of sampling share: keys in the order of logits, masses, searches, numbers that are drawn.

Sums are of integers, so that they do not depend on their order. Keys are integers in the order of the logits; each step
of a search for the smallest key that stays leaves a quarter of those that may be it.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.philox_kernels import as_i64, polynomial, words_of
from triplan.backends.triton.common.rows_kernels import axis_offset

#: The mass of the largest logit: 2**MASS_BITS.
WHOLE = tl.constexpr(1 << 40)
#: Temperatures below the largest logit from which on no logit has mass: exp(-29) < 2**-41, and more than twice that for
#: the rounding of a limit to f32.
FAR = tl.constexpr(60.0)
#: The largest finite f32.
MOST = tl.constexpr(3.4028234663852886e38)
#: 1.5 * 2**52. Added to an f64 of less than 2**51 it leaves the nearest integer in the low bits.
ROUNDER = tl.constexpr(6755399441055744.0)
#: The same and the exponent of WHOLE.
EXPONENT = tl.constexpr(6755399441055744.0 + 40)
#: ROUNDER as an i64.
ROUNDER_BITS = tl.constexpr(0x4338000000000000)
#: 2**52, and as an i64: an f64 from it to 2**53 is an integer, and its bits are BASE_BITS and what it exceeds BASE by.
BASE = tl.constexpr(4503599627370496.0)
BASE_BITS = tl.constexpr(0x4330000000000000)
#: 1 / log(2).
LOG2_E = tl.constexpr(1.4426950408889634)
#: Below the key of each logit, and that of -inf.
NO_KEY = tl.constexpr(-(1 << 31))
LEAST_KEY = tl.constexpr(-0x7F800001)


@jit
def load_logits(at, stride, col, known):
    """Logits in f32; -inf where they are not ``known``."""
    return tl.load(at + axis_offset(col, stride), mask=known, other=-float("inf")).to(tl.float32)


@jit
def load_block(at, stride, start, n, BLOCK: tl.constexpr):
    """(columns, logits in f32) of a block of a row; -inf beyond its end."""
    col = start + tl.arange(0, BLOCK)
    return col, load_logits(at, stride, col, col < n)


@jit
def key_of(x):
    """Integers i32 in the order of f32 numbers ``x``; -0 and 0 have one."""
    bits = tl.where(x == 0.0, 0, x.to(tl.int32, bitcast=True))
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def value_of(key):
    """The number whose key is ``key``; 0 of -0."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def rate_of(temperature, row, stride):
    """(1 / temperature as f64, whether the largest logit is taken): 1 / 0 where it is.

    Past the L1 cache, as programs may call it before they wait for the previous launch: there may be older values.
    """
    t = tl.load(temperature + row * stride, cache_modifier=".cg").to(tl.float64)
    is_greedy = ~(t > 0.0)
    return 1.0 / tl.where(is_greedy, 0.0, t), is_greedy


@jit
def scale_of(rate, top):
    """What ``mass_of`` takes of a row: (largest logit in f64, rate in units of log(2), f32 up to which no mass is).

    rate: f64, 1 / temperature; top: f32. Rows of infinite rate, or with +inf, have mass at their largest logits alone.
    """
    key = key_of(top)
    beneath = value_of(key - tl.where(key == 0, 2, 1))  # (-0 has the key of 0)
    lowest = tl.minimum((top.to(tl.float64) - FAR / rate).to(tl.float32), beneath)
    lowest = tl.where(top > MOST, beneath, lowest)  # inf - inf, of an infinite temperature
    return tl.minimum(top, MOST).to(tl.float64), tl.minimum(rate, 1e60) * LOG2_E, lowest


@jit
def exp2_near(r):
    """2**r of f64 |r| <= 1/2: 1 + r * q(r), by the Remez algorithm; its relative error is below 2**-40."""
    return polynomial(
        r,
        (
            1.317893137603303e-06,
            1.5309156104221423e-05,
            0.000154038254704941,
            0.0013333454860869729,
            0.009618128616117192,
            0.05550410935265866,
            0.24022650698110598,
            0.6931471805482124,
            1.0,
        ),
    )


@jit
def mass_of(x, scale):
    """2**40 * exp((x - top) / temperature), rounded to an i64, of logits ``x`` (f32) of a row of ``scale_of``.

    In f64: f32 has no 40 bits. Every product here is one of ``fma``, so that all kernels round alike. The library's
    exponential takes twice the instructions, for arguments that do not occur here.
    """
    top, rate, lowest = scale
    mass = as_integer(near_mass(tl.minimum(x, MOST).to(tl.float64) - top, rate))
    return tl.where(x > lowest, mass, 0)


@jit
def as_integer(mass):
    """The integer i64 nearest to f64 ``mass``, by an addition: a conversion has a sixteenth of its throughput."""
    return tl.add((mass + ROUNDER).to(tl.int64, bitcast=True), -ROUNDER_BITS, sanitize_overflow=False)


@jit
def near_mass(below, rate):
    """2**40 * 2**(below * rate), f64, of f64 numbers; nonsense where that is beneath 2**-900.

    Its last bit is 1, so that it is no integer and a half: added to an integer from 2**52 to 2**53, it is rounded to
    the same integer whatever that one is, and sums in f64 know no order.
    """
    exponent = tl.full((), EXPONENT, tl.float64)
    power = tl.fma(below, rate, exponent)
    rest = tl.fma(below, rate, exponent - power)
    bits = exp2_near(rest).to(tl.int64, bitcast=True)
    # Only the high half is added to: of a sum of 64 bits, ptxas would add the low half too, for its carry. And the 1
    # is computed: to set a bit to a constant, LLVM clears it first.
    shift = power.to(tl.int64, bitcast=True).to(tl.int32) << 20
    high = tl.add((bits >> 32).to(tl.int32), shift, sanitize_overflow=False)
    one = (rate >= 0.0).to(tl.int64)
    return ((high.to(tl.int64) << 32) | (bits & 0xFFFFFFFF) | one).to(tl.float64, bitcast=True)


@jit
def is_plain(top, scale):
    """Whether ``plain_mass`` gives the masses of a row: neither its largest logit nor its temperature is infinite."""
    return (top <= MOST) & (scale[2] >= -MOST)


@jit
def plain_scale(scale):
    """``scale_of`` for ``plain_mass``: no logit of a steep row is so far below the largest that exponents overflow."""
    top, rate, lowest = scale
    return top, tl.minimum(rate, 256.0 / (top - lowest.to(tl.float64))), lowest


@jit
def plain_mass(x, scale):
    """``mass_of`` before it is rounded, f64, in fewer instructions. scale: of ``plain_scale``.

    Instead of a choice of 0 up to the ``lowest`` logit, it gives all these the mass of that one, which rounds to 0.
    """
    top, rate, lowest = scale
    return near_mass(tl.maximum(x, lowest).to(tl.float64) - top, rate)


@jit
def sum_of_masses(sums, SPAN: tl.constexpr):
    """The sums [SPAN] of f64 ``sums`` [SPAN * TILE], each of masses and BASE, as i64."""
    found = tl.add(sums.to(tl.int64, bitcast=True), -BASE_BITS, sanitize_overflow=False)
    return tl.sum(tl.reshape(found, (SPAN, sums.shape[0] // SPAN)), 1)


@jit
def part_of(p, total):
    """The mass that greater logits must have for a token to be dropped by top_p = ``p`` of ``total``; f64."""
    bound = p * total.to(tl.float64)
    return tl.where(bound > 1.0, bound, 1.0)


@jit
def least_of(min_p, row, stride):
    """The least mass that min_p keeps, f64; 0 if there is no such filter."""
    least = tl.full((), 0.0, tl.float64)
    if min_p is not None:
        least = tl.load(min_p + row * stride).to(tl.float64)
        least = tl.where(least > 1.0, 1.0, least) * WHOLE
    return least


@jit
def word_of(seed, position, row, seed_stride, position_stride):
    """The 64-bit word of a row, as u64. Past the L1 cache, as ``rate_of``."""
    key = tl.load(seed + row * seed_stride, cache_modifier=".cg")
    counter = tl.load(position + row * position_stride, cache_modifier=".cg")
    w0, w1, _, _ = words_of(key, counter, tl.full((), 0, tl.int64))
    return w0.to(tl.uint64) | (w1.to(tl.uint64) << 32)


@jit
def number_of(word, total, is_greedy):
    """floor(word * total / 2**64); 0 if the largest logit is taken."""
    chosen = tl.umulhi(word, as_i64(total).to(tl.uint64)).to(tl.int64)
    return tl.where(is_greedy, as_i64(0), chosen)


@jit
def drawn(seed, position, row, seed_stride, position_stride, total, is_greedy):
    """``number_of`` the row's word."""
    return number_of(word_of(seed, position, row, seed_stride, position_stride), total, is_greedy)


@jit
def pivots_of(low, high):
    """Three keys (i32) that divide low + 1 ... high into quarters; some are equal if it has fewer than 4 keys.

    If it has positive and negative numbers, 0 is one. Else most keys would be those of tiny numbers.
    """
    span = as_i64(high) - low
    first = (low + ((span + 3) >> 2)).to(tl.int32)
    second = (low + ((2 * span + 3) >> 2)).to(tl.int32)
    third = (low + ((3 * span + 3) >> 2)).to(tl.int32)
    # (2**23 keys below that of a number is that of its half.)
    is_mixed = (low < -(1 << 23)) & (high > 1 << 23)
    return (
        tl.where(is_mixed, low + (1 << 23), first),
        tl.where(is_mixed, 0, second),
        tl.where(is_mixed, high - (1 << 23), third),
    )


@jit
def counts_from(key, pivots):
    """1 for each pivot that ``key`` reaches, as i64 fields of 20 bits."""
    found = (key >= pivots[0]).to(tl.int64) + ((key >= pivots[1]).to(tl.int64) << 20)
    return found + ((key >= pivots[2]).to(tl.int64) << 40)


@jit
def add_two(a0, a1, b0, b1):
    """The sums of two pairs of tensors of one shape."""
    return a0 + b0, a1 + b1


@jit
def add_four(a0, a1, a2, a3, b0, b1, b2, b3):
    """The sums of four pairs of tensors of one shape."""
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@jit
def narrowed(search, pivots, sums, counts, bound):
    """(low, high, left, over) of a search after a step.

    search: low and high, keys (i32) between which the threshold lies; how many keys there are from low on, and above
    high (i64). sums: the weights from each pivot on; counts: sum of ``counts_from``.
    """
    low, high, left, over = search
    reached = (sums[0].to(tl.float64) >= bound, sums[1].to(tl.float64) >= bound, sums[2].to(tl.float64) >= bound)
    number = (counts & 0xFFFFF, (counts >> 20) & 0xFFFFF, counts >> 40)
    for j in tl.static_range(3):
        is_last = ~reached[2 - j]
        high = tl.where(is_last, pivots[2 - j] - 1, high)
        over = tl.where(is_last, number[2 - j], over)
    for j in tl.static_range(3):
        low = tl.where(reached[j], pivots[j], low)
        left = tl.where(reached[j], number[j], left)
    return low, high, left, over


@jit
def goes_on(search, fits):
    """Whether a search still has several keys to choose from, and more than ``fits`` from the lower end on."""
    low, high, left, over = search
    return (low < high) & (left > fits) & (left - over > 1)


@jit
def sum_and_ends(a0, a1, a2, b0, b1, b2):
    """(a0 + b0, max(a1, b1), min(a2, b2)), of tensors of one shape."""
    return a0 + b0, tl.maximum(a1, b1), tl.minimum(a2, b2)


@jit
def survey(a0, a1, a2, a3, b0, b1, b2, b3):
    """(a0 + b0, a1 + b1, min(a2, b2), max(a3, b3)), of tensors of one shape."""
    return a0 + b0, a1 + b1, tl.minimum(a2, b2), tl.maximum(a3, b3)


@jit
def guess_of(low, high, above, total, bound):
    """Pivots about the key at which ``bound`` is reached if the weights are spread evenly over low ... high.

    total: sum of the weights. Of many hundred random weights it is nearer than a 32nd part of these keys, most times.
    """
    span = as_i64(high) - low
    part = (bound - above.to(tl.float64)) / tl.maximum(as_i64(total), 1).to(tl.float64)
    centre = high - (span.to(tl.float64) * tl.minimum(tl.maximum(part, 0.0), 1.0)).to(tl.int64)
    first = tl.maximum(centre - (span >> 5), low + 1)
    third = tl.minimum(centre + (span >> 5), high)
    return (
        tl.minimum(first, high).to(tl.int32),
        tl.maximum(tl.minimum(centre, high), first).to(tl.int32),
        tl.maximum(third, first).to(tl.int32),
    )


@jit
def beyond_of(sums, bound, beyond):
    """The weight of keys above ``high`` after ``narrowed``; before, it was ``beyond``."""
    for j in tl.static_range(3):
        beyond = tl.where(sums[2 - j].to(tl.float64) < bound, sums[2 - j], beyond)
    return beyond


@jit
def threshold_of(key, weight, above, low, bound, fits):
    """(t, whether the weights reach ``bound``). From t on are those keys k with above + sum(weight[key > k]) < bound.

    key (i32) and weight (i64) are blocks of one axis, of less than 2**20 elements; a weight of None is 1. above: i64,
    bound: f64. Keys below ``low`` do not count; t is ``low`` if the weights do not reach ``bound``. The search ends
    earlier, with more keys, if they are not more than ``fits``.
    """
    is_in = key >= low
    one = is_in.to(tl.int64)
    weights = one if weight is None else tl.where(is_in, weight, 0)
    lows = tl.where(is_in, key, 0x7FFFFFFF)
    total, left, least, high = tl.reduce((weights, one, lows, tl.where(is_in, key, low)), 0, survey)
    is_enough = (above + total).to(tl.float64) >= bound
    given = low
    low = tl.where(is_enough, least, given)
    high = tl.where(is_enough, high, given)
    over = as_i64(0)
    guesses = tl.full((), 0, tl.int32)
    if weight is not None:
        guess = guess_of(low, high, as_i64(above), total, bound)
        guesses = ((low < 0) == (high < 0)).to(tl.int32)
    while goes_on((low, high, left, over), fits):
        pivots = pivots_of(low, high)
        if weight is not None:
            pivots = (
                tl.where(guesses > 0, guess[0], pivots[0]),
                tl.where(guesses > 0, guess[1], pivots[1]),
                tl.where(guesses > 0, guess[2], pivots[2]),
            )
            guesses -= 1
        counts = counts_from(key, pivots)
        if weight is None:
            counts = tl.sum(counts, 0)
            sums = (counts & 0xFFFFF, (counts >> 20) & 0xFFFFF, counts >> 40)
        else:
            parts = (
                tl.where(key >= pivots[0], weight, 0),
                tl.where(key >= pivots[1], weight, 0),
                tl.where(key >= pivots[2], weight, 0),
            )
            first, second, third, counts = tl.reduce((parts[0], parts[1], parts[2], counts), 0, add_four)
            sums = (above + first, above + second, above + third)
        low, high, left, over = narrowed((low, high, left, over), pivots, sums, counts, bound)
    return low, is_enough
