"""Random numbers from the words of Philox (common/philox_kernels.py).

Every GPU gives the same bits: multiply-adds are explicit (``tl.fma``) and nothing else is contracted, square roots are
rounded to nearest, and f32 calls no library (rsqrt is one instruction). ``NUMBERS`` has the jit function of each op,
from (word, x, parameters or what ``SCALARS`` makes of them, element of the result); that of ``normal`` takes the two
words of a pair of elements and returns both numbers.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.philox_kernels import as_i64, minus_log, polynomial, words_of


@jit
def _wide(low, high):
    """The 64-bit word of two of 32 bits."""
    return (high.to(tl.uint64) << 32) | low.to(tl.uint64)


@jit
def pairs(seed, offset, counter, WIDE):
    """(a, b): the first and the second word of each pair of elements of ``counter`` (i64).

    Words of 32 bits: two pairs a counter, along a new last axis. WIDE: words of 64 bits, one pair a counter.
    """
    w0, w1, w2, w3 = words_of(seed, offset, counter)
    if WIDE:
        a, b = _wide(w0, w1), _wide(w2, w3)
    else:
        a, b = tl.join(w0, w2), tl.join(w1, w3)
    return a, b


@jit
def elements_of(seed, offset, counter, parameters, NUMBER, PAIRED, WIDE):
    """The words of the elements of ``counter`` (i64), one after another; if PAIRED, their numbers."""
    w0, w1, w2, w3 = words_of(seed, offset, counter)
    if WIDE:
        a, b = _wide(w0, w1), _wide(w2, w3)
        found = NUMBER(a, b, parameters) if PAIRED else (a, b)
    elif PAIRED:
        found = NUMBER(w0, w1, parameters) + NUMBER(w2, w3, parameters)
    else:
        found = (w0, w1, w2, w3)
    return found


@jit
def _signed(x, sign):
    """``x``, its sign bit inverted where ``sign``, an unsigned integer of as many bits, has that bit."""
    return (x.to(sign.dtype, bitcast=True) ^ sign).to(x.dtype, bitcast=True)


@jit
def _negative(x):
    """-x by its bits: Triton's own is 0 - x, an instruction that no other takes in."""
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    return _signed(x, tl.full((), 1 << (BITS - 1), tl.core.get_int_dtype(BITS, False)))


@jit
def root(x):
    """sqrt(x) in f32, rounded to nearest, for x from 2**-100 to 2**100: the same bits as sqrt.rn.

    For such x ptxas translates sqrt.rn into these instructions, on sm_80 and sm_90, behind a branch to the code for all
    others, across which each root would begin after the one before. (A test takes all f32 from 1/2 to 2: a power of 4
    changes exponents alone.)
    """
    y = tl.rsqrt(x)  # rsqrt.approx
    found = x * y
    return tl.fma(tl.fma(_negative(found), found, x), 0.5 * y, found)


@jit
def circle(word):
    """(x, y, sign): cos(2 * pi * u) and sin(2 * pi * u) with u = word * 2**-32 (64-bit words: 2**-64), but for a sign.

    The sign bit of ``sign``, an unsigned integer, inverts both: callers apply it to what they multiply both by. The
    angle is reduced to at most pi / 4 and a quadrant; the polynomials are those of Cephes (sinf.c, sin.c).
    """
    BITS: tl.constexpr = word.dtype.primitive_bitwidth
    ahead = word + (1 << (BITS - 3))  # half a quadrant: its upper two bits are the nearest quadrant
    turned = word << 2  # four times what it is ahead of that, as a signed integer
    if BITS == 32:
        a = turned.to(tl.int32, bitcast=True).to(tl.float32) * 3.657295198167899e-10
        square = a * a
        p = polynomial(square, (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1))
        q = polynomial(square, (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2))
    else:
        a = turned.to(tl.int64, bitcast=True).to(tl.float64) * 8.515303950216385e-20
        square = a * a
        p = polynomial(
            square,
            (
                1.58962301576546568060e-10,
                -2.50507477628578072866e-8,
                2.75573136213857245213e-6,
                -1.98412698295895385996e-4,
                8.33333333332211858878e-3,
                -1.66666666666666307295e-1,
            ),
        )
        q = polynomial(
            square,
            (
                -1.13585365213876817300e-11,
                2.08757008419747316778e-9,
                -2.75573141792967388112e-7,
                2.48015872888517045348e-5,
                -1.38888888888730564116e-3,
                4.16666666666665929218e-2,
            ),
        )
    sin = tl.fma(p * square, a, a)
    cos = tl.fma(q, square * square, tl.fma(square, -0.5, 1.0))
    turns = (ahead & (1 << (BITS - 2))) != 0
    return tl.where(turns, _negative(sin), cos), tl.where(turns, cos, sin), ahead & (1 << (BITS - 1))


@jit
def before(x):
    """The largest number below ``x``, which is finite, in its type."""
    BITS: tl.constexpr = tl.core.get_int_dtype(x.dtype.primitive_bitwidth, True)
    bits = x.to(BITS, bitcast=True)
    least = tl.full((), 1, BITS) << (x.dtype.primitive_bitwidth - 1)  # only the sign bit is set
    found = tl.where(x == 0, least + 1, tl.where(x > 0, bits - 1, bits + 1))
    return found.to(x.dtype, bitcast=True)


# --- numbers ---


@jit
def uniform(word, x, parameters, OUT):
    """low + u * (high - low), rounded down to OUT; below high, although the sum may round up to high."""
    if word.dtype == tl.uint32:
        u = (word >> 8).to(tl.float32) * 5.960464477539063e-08
    else:
        u = (word >> 11).to(tl.float64) * 1.1102230246251565e-16
    low, high = tl.full((), parameters[0], tl.float64), tl.full((), parameters[1], tl.float64)
    lowest = low.to(u.dtype)
    v = tl.fma(u, (high - low).to(u.dtype), lowest)
    v = tl.minimum(v, tl.maximum(before(high.to(u.dtype)), lowest))
    if OUT == tl.bfloat16:  # the upper half of the bits rounds towards 0
        bits = v.to(tl.int32, bitcast=True)
        v = ((bits + ((bits >> 31) & 0xFFFF)) >> 16).to(tl.int16).to(OUT, bitcast=True)
    elif OUT == tl.float16:
        rounded = v.to(OUT)
        v = tl.where(rounded.to(tl.float32) > v, before(rounded), rounded)
    return v


@jit
def normal(a, b, parameters):
    """(mean + std * r * cos(t), mean + std * r * sin(t)), with r = sqrt(-2 * log(u(a))) and t = 2 * pi * u(b)."""
    square = minus_log(a, TIMES=2)
    if square.dtype == tl.float32:
        r = root(square)  # from 2**-32 to 45.8
    else:
        r = tl.sqrt(square)  # rounds to nearest
    x, y, sign = circle(b)
    r = _signed(r, sign)
    mean = tl.full((), parameters[0], tl.float64).to(r.dtype)
    std = tl.full((), parameters[1], tl.float64).to(r.dtype)
    return tl.fma(r * x, std, mean), tl.fma(r * y, std, mean)


@jit
def _rate(parameters, OUT):
    """(1 / lambd,) in the type in which results of OUT are computed."""
    rate = 1.0 / tl.full((), parameters[0], tl.float64)
    return ((rate if OUT == tl.float64 else rate.to(tl.float32)),)


@jit
def exponential(word, x, scalars, OUT):
    return minus_log(word, OUT.primitive_bitwidth == 16) * scalars[0]


@jit
def randint(word, x, parameters, OUT):
    """low + the upper 64 bits of word * (high - low): no rejection loop; relative bias of (high - low) / 2**64."""
    low, high = as_i64(parameters[0]), as_i64(parameters[1])
    span = tl.sub(high, low, sanitize_overflow=False).to(tl.uint64, bitcast=True)
    # Both ways give the upper 64 bits of word * span; of a span below 2**32 by two products of 32 bits, not four.
    if span >> 32 == 0:
        short = span.to(tl.uint32)
        carried = tl.umulhi(word.to(tl.uint32), (word * 0).to(tl.uint32) + short).to(tl.uint64)
        above = ((word >> 32) * short.to(tl.uint64) + carried) >> 32
    else:
        above = tl.umulhi(word, word * 0 + span)
    above = above.to(tl.int64, bitcast=True)
    found = tl.add(above, low, sanitize_overflow=False)
    if OUT.is_floating() and OUT.primitive_bitwidth == 16:
        found = found.to(tl.float32)
    return found


@jit
def _limit(p):
    """(limit, whether all words are below): word * 2**-32 < p where word < limit, or where all are.

    (2**32, which every word is below, does not fit in 32 bits. To compare 64 bits would take twice as many
    instructions; to test both conditions for each word, two more than a branch for all words.)
    """
    limit = tl.ceil(tl.minimum(tl.maximum(tl.full((), p, tl.float64), 0.0), 1.0) * 4294967296.0).to(tl.int64)
    return limit.to(tl.uint32), limit >= 4294967296


@jit
def _drops(parameters, OUT):
    return _limit(parameters[0])


@jit
def _one(chosen, OUT):
    """1 where ``chosen``, else 0, as OUT (as f32 if OUT is any float)."""
    return tl.where(chosen, 1.0, 0.0) if OUT.is_floating() else tl.where(chosen, 1, 0)


@jit
def bernoulli_p(word, x, scalars, OUT):
    limit, all_below = scalars
    if all_below:
        found = _one(word == word, OUT)
    else:
        found = _one(word < limit, OUT)
    return found


@jit
def bernoulli(word, x, parameters, OUT):
    return _one(word.to(tl.float64) < x.to(tl.float64) * 4294967296.0, OUT)


@jit
def _scale_of(parameters, OUT):
    """(limit, whether all are dropped, 1 / (1 - p) in the type in which results of OUT are computed).

    A division is a branch, across which neither loads nor words are moved. Newton's steps, from the bits of f32, end
    within a unit in the last place of f64, which f32 does not show. (1 - p is at least 2**-53, or 0: all are dropped.)
    """
    kept = 1.0 - tl.full((), parameters[0], tl.float64)
    if OUT == tl.float64:
        scale = 1.0 / kept
    else:
        short = kept.to(tl.float32)
        near = (0x7EF311C7 - short.to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True)
        for _ in tl.static_range(3):
            near = tl.fma(tl.fma(-short, near, tl.full((), 1.0, tl.float32)), near, near)
        found = near.to(tl.float64)
        for _ in tl.static_range(2):
            found = tl.fma(tl.fma(-kept, found, tl.full((), 1.0, tl.float64)), found, found)
        scale = found.to(tl.float32)
    return _limit(parameters[0]) + (scale,)


@jit
def dropout(word, x, scalars, OUT):
    limit, all_dropped, scale = scalars
    if all_dropped:
        found = tl.zeros(x.shape, scale.dtype)
    else:
        found = tl.where(word < limit, 0.0, x.to(scale.dtype) * scale)
    return found


#: What NUMBERS of some ops take instead of the parameters: computed of them once per program, as it takes f64.
SCALARS = {"exponential": _rate, "bernoulli_p": _drops, "dropout": _scale_of}
NUMBERS = {f.__name__: f for f in (uniform, normal, exponential, randint, bernoulli_p, bernoulli, dropout)}
