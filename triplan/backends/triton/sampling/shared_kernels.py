"""What the kernels of sampling share: keys in the order of logits, masses, searches, numbers that are drawn.

Sums are of integers, so that they do not depend on their order. Thresholds are found by bits: keys are integers in the
order of the logits, and each step of a search decides one or two bits of the smallest key that stays.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.philox_kernels import as_i64, words_of
from triplan.backends.triton.common.rows_kernels import axis_offset

#: The mass of the largest logit: 2**MASS_BITS.
WHOLE = tl.constexpr(1 << 40)
#: A logit so far below the largest, in units of the temperature, has no mass: exp(-28) < 2**-40.
FAR = tl.constexpr(-28.0)
#: Below the key of each logit, and that of -inf.
NO_KEY = tl.constexpr(-(1 << 31))
LEAST_KEY = tl.constexpr(-0x7F800001)


@triton.jit
def load_logits(at, stride, col, known):
    """Logits in f32; -inf where they are not ``known``."""
    return tl.load(at + axis_offset(col, stride), mask=known, other=-float("inf")).to(tl.float32)


@triton.jit
def load_block(at, stride, start, n, BLOCK: tl.constexpr):
    """(columns, logits in f32) of a block of a row; -inf beyond its end."""
    col = start + tl.arange(0, BLOCK)
    return col, load_logits(at, stride, col, col < n)


@triton.jit
def key_of(x):
    """Integers i32 in the order of f32 numbers ``x``; -0 and 0 have one."""
    bits = tl.where(x == 0.0, 0, x.to(tl.int32, bitcast=True))
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The number whose key is ``key``; 0 of -0."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def rate_of(temperature, row, stride):
    """(1 / temperature as f64, whether the largest logit is taken): 1 / 0 where it is."""
    t = tl.load(temperature + row * stride).to(tl.float64)
    is_greedy = ~(t > 0.0)
    return 1.0 / tl.where(is_greedy, 0.0, t), is_greedy


@triton.jit
def mass_of(x, top, rate):
    """floor(2**40 * exp((x - top) * rate)) as i64, where ``top`` (f32) is the largest of ``x`` (f32).

    In f64: f32 has no 40 bits. That of ``top`` is 2**40 also where it or ``rate`` is infinite, or ``rate`` 0.
    """
    z = (x.to(tl.float64) - top.to(tl.float64)) * rate
    is_near = z > FAR
    mass = (tl.exp(tl.where(is_near, z, FAR)) * WHOLE).to(tl.int64)
    return tl.where(x == top, WHOLE, tl.where(is_near, mass, 0))


@triton.jit
def part_of(p, total):
    """The mass that greater logits must have for a token to be dropped by top_p = ``p`` of ``total``; f64."""
    bound = p * total.to(tl.float64)
    return tl.where(bound > 1.0, bound, 1.0)


@triton.jit
def least_of(min_p, row, stride):
    """The least mass that min_p keeps, f64; 0 if there is no such filter."""
    least = tl.full((), 0.0, tl.float64)
    if min_p is not None:
        least = tl.load(min_p + row * stride).to(tl.float64)
        least = tl.where(least > 1.0, 1.0, least) * WHOLE
    return least


@triton.jit
def drawn(seed, position, row, seed_stride, position_stride, total, is_greedy):
    """floor(w * total / 2**64), where w is the row's 64-bit word; 0 if the largest logit is taken."""
    w0, w1, _, _ = words_of(
        tl.load(seed + row * seed_stride), tl.load(position + row * position_stride), tl.full((), 0, tl.int64)
    )
    word = w0.to(tl.uint64) | (w1.to(tl.uint64) << 32)
    chosen = tl.umulhi(word, as_i64(total).to(tl.uint64)).to(tl.int64)
    return tl.where(is_greedy, as_i64(0), chosen)


@triton.jit
def crossing(key, weight, above, low, high, bound):
    """The smallest t of low ... high such that above + sum(weight[key > t]) < bound (f64), as i32; ``high`` is one.

    ``key`` (i32) and ``weight`` are blocks of one shape, of one axis. Each step decides a bit of t - low.
    """
    found = as_i64(low)
    unit = tl.full((), 1, tl.int64)
    while unit * 2 < as_i64(high) - found + 1:
        unit = unit * 2
    while unit > 0:
        # (No key is as large as 2**31 - 1: from there on nothing has weight.)
        first = tl.minimum(found + unit, 0x7FFFFFFF).to(tl.int32)
        reached = above + tl.sum(tl.where(key >= first, weight, 0), 0)
        found += tl.where(reached.to(tl.float64) >= bound, unit, 0)
        unit = unit >> 1
    return found.to(tl.int32)


@triton.jit
def kth_largest(key, low, high, k):
    """The smallest t of low ... high such that fewer than ``k`` keys are above t, as i32; none is above ``high``.

    ``key`` (i32) is a block of one axis and less than 2**20 elements. Each step decides two bits of t - low, by three
    counts that are one sum.
    """
    found = as_i64(low)
    span = as_i64(high) - found + 1
    unit = tl.full((), 1, tl.int64)
    while unit * 4 < span:
        unit = unit * 4
    while unit > 0:
        counts = tl.zeros(key.shape, tl.int64)
        for j in tl.static_range(1, 4):
            first = tl.minimum(found + j * unit, 0x7FFFFFFF).to(tl.int32)
            counts += (key >= first).to(tl.int64) << (20 * (j - 1))
        total = tl.sum(counts, 0)
        steps = tl.full((), 0, tl.int64)
        for j in tl.static_range(3):
            steps += (((total >> (20 * j)) & 0xFFFFF) >= k).to(tl.int64)
        found += steps * unit
        unit = unit >> 2
    return found.to(tl.int32)
