"""Words of Philox4x32-10 by position in a stream, and what several families make of them.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011); docs/random.md says which word an element gets. f32
calls no library and contracts nothing but what is written as ``tl.fma`` (launch with ``fuses=False``), so that the bits
are those of every GPU.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.sku import interpreting

INTERPRETED = tl.constexpr(interpreting())


@jit
def as_i64(x):
    """A scalar as i64: in the interpreter it is as narrow as its value."""
    return tl.full((), x, tl.int64)


@jit
def state_of(state):
    """(seed, offset) as i64 scalars, of state = (address, seed, offset, place).

    place: 0, both are given; 1, both are loaded from the address, and the offset given is added to the one that is
    loaded; 2, both are given, and ``keep`` writes them there.
    One binary serves all three: calls that a graph captures, which have them on the device, may not compile.
    """
    address, seed, offset, place = state
    loaded = place == 1
    seed = tl.load(address, mask=loaded, other=as_i64(seed))
    found = tl.load(address + 1, mask=loaded, other=as_i64(0))
    return seed, tl.add(found, as_i64(offset), sanitize_overflow=False)


@jit
def keep(state):
    """Write seed and offset to the address in ``state``, if it says so, in the first program."""
    address, seed, offset, place = state
    is_kept = (place == 2) & (tl.program_id(0) == 0)
    tl.store(address, as_i64(seed), mask=is_kept)
    tl.store(address + 1, as_i64(offset), mask=is_kept)


@jit
def _wide_product(x, FACTOR: tl.constexpr):
    """x * FACTOR of two u32 as u64, by one IMAD.WIDE.

    LLVM does not see everywhere that a product of 64 bits has factors of 32; ptxas then adds zeros to its upper half.
    """
    if INTERPRETED:
        found = x.to(tl.uint64) * FACTOR
    else:
        text: tl.constexpr = f"mul.wide.u32 $0, $1, {FACTOR};"
        found = tl.inline_asm_elementwise(text, "=l,r", [x], dtype=tl.uint64, is_pure=True, pack=1)
    return found


@jit
def words_of(seed, offset, counter):
    """The four u32 words of each ``counter`` (i64, of any shape) in the stream of i64 scalars ``seed`` and ``offset``.

    The key is the seed, counter words 0 and 1 are ``counter``, 2 and 3 are ``offset``; low halves first. ``tl.philox``
    gives the same words, but multiplies twice for the halves of a product.
    """
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    c2, c3 = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        low, high = _wide_product(c0, 0xD2511F53), _wide_product(c2, 0xCD9E8D57)
        c0, c2 = (high >> 32).to(tl.uint32) ^ c1 ^ k0, (low >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = high.to(tl.uint32), low.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@jit
def polynomial(x, COEFFICIENTS, TIMES: tl.constexpr = 1):
    """sum(TIMES * COEFFICIENTS[i] * x**(n - 1 - i)), by Horner's rule in x's type, of a tuple of n numbers."""
    found = tl.full(x.shape, TIMES * COEFFICIENTS[0], x.dtype)
    for i in tl.static_range(1, len(COEFFICIENTS)):
        found = tl.fma(found, x, tl.full((), TIMES * COEFFICIENTS[i], x.dtype))  # a number alone would be one of f32
    return found


@jit
def _minus_log_f32(word, SHORT, TIMES):
    """-TIMES * log(u), u = (word + 1/2) * 2**-32, within 3 ulp; SHORT: within 2**-16 of it, for 16-bit results.

    f * polynomial(f) is -log(1 - f): near 1 of f = 1 - u, which f32 holds where it does not hold u, else of f = 1 - m,
    u = m * 2**e. The polynomials' largest relative errors are the least (found by reweighted least squares).
    """
    near = word >= 0xB504F400
    v = tl.fma((word ^ tl.where(near, 0xFFFFFFFF, 0)).to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10)
    bits = v.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) & tl.where(near, 0, -0x800000)  # e * 2**23, with sqrt(1/2) <= m < sqrt(2)
    f = tl.where(near, v, 1.0 - (bits - exponent).to(tl.float32, bitcast=True))
    if SHORT:
        p = polynomial(f, (0.142920718, 0.220559493, 0.254032731, 0.332580239, 0.499902189, 1.00000453), TIMES)
    else:
        p = polynomial(
            f,
            (
                7.620848715e-2,
                1.290452628e-1,
                1.324350834e-1,
                1.418186128e-1,
                1.660901010e-1,
                2.000196725e-1,
                2.500158549e-1,
                3.333332539e-1,
                4.999998808e-1,
                1.0,
            ),
            TIMES,
        )
    return tl.fma(exponent.to(tl.float32), TIMES * -8.262958294867817e-08, f * p)  # log(2) * 2**-23


@jit
def minus_log(word, SHORT: tl.constexpr = False, TIMES: tl.constexpr = 1):
    """-log(u), u in (0, 1): the middle of the interval of 2**-32 that ``word`` numbers, or of 2**-52 for 64-bit words.

    So it is never 0 nor infinite: of 32 bits, from 2**-33 to 22.9. TIMES, a power of 2, multiplies it, and all that it
    is computed of 32 bits from, at no cost.
    """
    if word.dtype == tl.uint32:
        found = _minus_log_f32(word, SHORT, TIMES)
    else:
        found = -TIMES * tl.log(tl.fma((word >> 12).to(tl.float64), 2.220446049250313e-16, 1.1102230246251565e-16))
    return found
