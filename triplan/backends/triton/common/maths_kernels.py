"""The functions of the maths table in Triton. The arguments of a function have one type: f32, f64 or an integer.

Python's operators (``OPERATORS``) and functions of libdevice or Triton's language (``NATIVE``) need no function here.

``short_NAME``, if it exists, computes f32 results that will be stored in 16 bits, with fewer instructions: where a sum
with 1 follows, libdevice's exp2, one instruction, which flushes what is lost in the sum. bool is computed as i8.
``accuracy.py`` has the errors.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl
from triton.language.extra import libdevice

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.division_kernels import (
    div,
    floor_divide as floor_divide,
    fmod as fmod,
    remainder as remainder,
    some,
    trunc as trunc,
    truncate_divide as truncate_divide,
)
from triplan.backends.triton.common.philox_kernels import polynomial

#: Functions that are Python operators.
OPERATORS = dict(
    zip(
        "add sub mul eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor logical_and logical_or logical_xor".split(),
        "+ - * == != < <= > >= & | ^ & | ^".split(),
        strict=True,
    )
)
#: Functions that libdevice or Triton's language have, by module.
NATIVE = {
    "libdevice": "exp exp2 expm1 log1p hypot sin cos tan asin acos atan sinh cosh tanh asinh acosh atan2 erf "
    "erfc copysign",
    "tl": "where",
}
#: Versions of functions that got other bits under the same name, also by functions that they call, of any element. They
#: are part of numerics ids. rsqrt: f32's is the hardware's. atanh: f32's has no branch.
VERSIONS = {"rsqrt": 2, "atanh": 2}

# --- what libdevice flushes ---


@jit
def _is_subnormal(x):
    """Whether x is a subnormal f32. Triton compiles libdevice to flush these, which is wrong at a pole or jump at 0."""
    return (tl.abs(x) < 1.1754943508222875e-38) & (x.dtype == tl.float32)


@jit
def _normal(x):
    return tl.where(_is_subnormal(x), x * 16777216.0, x)


# fmt: off

# --- arithmetic ---


@jit
def abs(x): return tl.where(x < 0, -x, x) if x.dtype.is_int() else tl.abs(x)
@jit
def sign(x): return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)
@jit
def reciprocal(x): return div(tl.full((), 1, x.dtype), x)


@jit
def maximum(x, y): return tl.where((x >= y) | (x != x), x, y)
@jit
def minimum(x, y): return tl.where((x <= y) | (x != x), x, y)
@jit
def fmax(x, y): return tl.where((x >= y) | (y != y), x, y)
@jit
def fmin(x, y): return tl.where((x <= y) | (y != y), x, y)

# --- roots, exponentials, logarithms ---
@jit
def sqrt(x): return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)
@jit
def rsqrt(x):
    if x.dtype != tl.float32:
        return reciprocal(sqrt(x))
    return tl.rsqrt(_normal(x)) * tl.where(_is_subnormal(x), 4096.0, 1.0)


@jit
def short_exp(x): return tl.exp(x)


@jit
def short_sqrt(x):
    return tl.sqrt(_normal(x)) * tl.where(_is_subnormal(x), 0.000244140625, 1.0)


@jit
def log(x): return libdevice.log(_normal(x)) - tl.where(_is_subnormal(x), 16.635532333438686, 0.0)
@jit
def log2(x): return libdevice.log2(_normal(x)) - tl.where(_is_subnormal(x), 24.0, 0.0)
@jit
def log10(x): return libdevice.log10(_normal(x)) - tl.where(_is_subnormal(x), 7.224719895935548, 0.0)


@jit
def _log_near_one(f):
    """log(1 + f) for abs(f) < 1/16, with a relative error below 2**-21 (fitted)."""
    return f * polynomial(f, (-0.25078353, 0.33411661, -0.49999928, 0.99999964))


@jit
def _short_log(x, FACTOR: tl.constexpr):
    """log2(x) * FACTOR. The hardware's log2 has an absolute error of 2**-22, which near 1 is a large relative one."""
    far = libdevice.fast_log2f(_normal(x)) - tl.where(_is_subnormal(x), 24.0, 0.0)
    return tl.where(tl.abs(x - 1) < 0.0625, _log_near_one(x - 1) * 1.4426950408889634, far) * FACTOR


@jit
def short_log(x): return _short_log(x, 0.6931471805599453)
@jit
def short_log2(x): return _short_log(x, 1.0)
@jit
def short_log10(x): return _short_log(x, 0.3010299956639812)


@jit
def short_log1p(x):
    far = libdevice.fast_log2f(1 + x) * 0.6931471805599453
    return tl.where(tl.abs(x) < 0.0625, _log_near_one(x), far)


@jit
def pow(x, y):
    if x.dtype.is_int():
        # Modulo 2**bits, by squaring. For a negative exponent the result is 1 / x**-y rounded towards 0.
        odd = (y & 1) != 0
        small = tl.where(x == 1, 1, tl.where(x == -1, tl.where(odd, -1, 1), 0)).to(x.dtype)
        found, base, rest = (x * 0 + 1).to(x.dtype), x, tl.where(y < 0, 0, y).to(x.dtype)
        while some(rest != 0):  # exponents are small, as a rule
            for _ in tl.static_range(4):
                found = tl.where((rest & 1) != 0, found * base, found)
                base *= base
                rest >>= 1
        found = tl.where(y < 0, small, found)
    else:
        found = libdevice.pow(x, y)
    return found


@jit
def short_pow(x, y):
    """2**(y * log2(abs(x))), with the sign of x for odd y; NaN for finite x < 0 unless y is an integer.

    Of a finite, normal result the exponent is at most 128: the relative error is up to 128 * log(2) times that of the
    logarithm, which within 1/8 of 1 is that of a fitted polynomial (2**-21), elsewhere of the hardware's. Subnormal x
    are taken as 0, as by libdevice.
    """
    whole = tl.floor(y) == y
    odd = whole & (tl.floor(y * 0.5) * 2 != y)
    size = tl.where(whole | (x == float("-inf")), tl.abs(x), x)  # of others the hardware's logarithm is NaN
    f = size - 1
    near = f * polynomial(f, (0.29330212, -0.36542839, 0.48087164, -0.72132887, 1.4426951))
    log = tl.where(tl.abs(f) < 0.125, near, libdevice.fast_log2f(size))
    # The largest finite y does what an infinite one does, also for abs(x) = 1, where 0 * infinity would be NaN.
    exponent = minimum(maximum(y, -3.4028234663852886e38), 3.4028234663852886e38) * log
    found = tl.exp2(tl.where((x == 1) | (y == 0), 0.0, exponent))  # 1, also where the other one is NaN
    sign = x.to(tl.int32, bitcast=True) & tl.where(odd, -2147483648, 0)
    return (found.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@jit
def xlogy(x, y): return tl.where((x == 0) & (y == y), 0.0, x * log(y))

# --- special functions ---
@jit
def normal_cdf(x):
    """The cumulative distribution function of the standard normal; erfc keeps the tail's relative accuracy."""
    return 0.5 * libdevice.erfc(x * -0.7071067811865476)


@jit
def short_normal_cdf(x):
    """exp(-x**2 / 2) * P(t) with t = 1 / (1 + 0.38 |x|) for x < 0, and 1 - short_normal_cdf(-x) for x >= 0.

    P, of degree 5, is fitted to exp(x**2 / 2) * normal_cdf(x) on [-14.5, 0]: its relative error is at most 3.6e-5.
    """
    size = tl.abs(x)
    tail = _normal_tail(0.38 * size, size * size * -0.7213475204444817)
    return tl.where(x < 0, tail, 1 - tail)


@jit
def _normal_tail(part, exponent):
    """2**exponent * P(1 / (1 + part)), P of ``short_normal_cdf``."""
    t = libdevice.fast_dividef(tl.full(part.shape, 1.0, tl.float32), 1 + part)
    p = tl.fma(t, tl.full(part.shape, -0.08993583216260533, tl.float32), 0.18889239024961985)
    p = tl.fma(t, p, 0.091968241525125)
    p = tl.fma(t, p, 0.15783270537514066)
    return t * tl.fma(t, p, 0.15122485656650417) * tl.exp2(exponent)


@jit
def short_erfc(x):
    """2 * normal_cdf(-x * sqrt(2))."""
    size = tl.abs(x)
    tail = 2 * _normal_tail(0.5374011537017761 * size, size * size * -1.4426950408889634)
    return tl.where(x < 0, 2 - tail, tail)


@jit
def sigmoid(x): return reciprocal(1 + libdevice.exp(-x))


@jit
def short_sigmoid(x):
    # fast_dividef gives 0 for divisors beyond 2**126, where the exact result is subnormal.
    return libdevice.fast_dividef(tl.full(x.shape, 1.0, tl.float32), 1 + libdevice.exp2(x * -1.4426950408889634))


@jit
def tanh_log1pexp(x):
    """((1 + n)**2 - 1) / ((1 + n)**2 + 1) of n = exp(x), without a difference; from x = 40 on it is 1 in f64."""
    n = libdevice.exp(tl.where(x > 40, 40.0, x))
    w = n * (n + 2)
    return div(w, w + 2)


@jit
def short_tanh_log1pexp(x):
    n = libdevice.exp2(tl.where(x > 40, 40.0, x) * 1.4426950408889634)
    w = n * (n + 2)
    return libdevice.fast_dividef(w, w + 2)


@jit
def log1pexp(x):
    """log(1 + exp(x)) without overflow."""
    return tl.where(x > 0, x, 0) + libdevice.log1p(libdevice.exp(-tl.abs(x)))


@jit
def short_log1pexp(x):
    return tl.where(x > 0, x, 0) + short_log1p(tl.exp(-tl.abs(x)))

# --- hyperbolic functions; arcs, of 16-bit results ---
@jit
def sech2(x):
    """(2 h / (1 + h**2))**2 of h = exp(-|x|), which is not subnormal where the result is."""
    h = libdevice.exp(-tl.abs(x))
    d = tl.fma(h, h, tl.full((), 1.0, x.dtype))
    found = libdevice.fast_dividef(2 * h, d) if x.dtype == tl.float32 else div(2 * h, d)
    return found * found


@jit
def short_sech2(x):
    """4 e / (1 + e)**2 of e = exp(-2 |x|); the exponential is that of 4 e."""
    e = libdevice.exp2(polynomial(tl.abs(x), (-2.8853900817779268, 2.0)))
    d = polynomial(e, (0.25, 1.0))
    return libdevice.fast_dividef(e, d * d)


@jit
def short_tanh(x):
    """(1 - exp(-2 |x|)) / (1 + exp(-2 |x|)), and near 0, where 1 - exp cancels, x * P(x**2) (fitted: 2**-21)."""
    size, square = tl.abs(x), x * x
    e = libdevice.exp2(size * -2.8853900817779268)
    near = x * polynomial(square, (0.12841614, -0.33321908, 0.99999958))
    return tl.where(size < 0.25, near, libdevice.copysign(libdevice.fast_dividef(1 - e, 1 + e), x))


@jit
def _half_exp(size):
    """exp(size) / 2, which overflows where cosh does."""
    return libdevice.exp2(polynomial(size, (1.4426950408889634, -1.0)))


@jit
def _quarter_over(x): return libdevice.fast_dividef(tl.full(x.shape, 0.25, tl.float32), x)


@jit
def short_cosh(x):
    e = _half_exp(tl.abs(x))
    return e + _quarter_over(e)


@jit
def short_sinh(x):
    """(exp(|x|) - exp(-|x|)) / 2, and near 0, where that cancels, x * P(x**2) (Taylor's: 2**-24)."""
    size, square = tl.abs(x), x * x
    e = _half_exp(size)
    near = x * polynomial(square, (0.0083333333, 0.16666667, 1.0))
    return tl.where(size < 0.25, near, libdevice.copysign(e - _quarter_over(e), x))


@jit
def _log_twice(t, more):
    """log(1 + t + more) for t <= more <= t + 2, also where the sum would overflow."""
    large = t > 1152921504606846976.0  # 2**60
    return short_log1p(tl.where(large, t, t + more)) + tl.where(large, 0.6931471805599453, 0.0)


@jit
def short_acosh(x):
    t = x - 1
    return tl.where(x < 1, float("nan"), _log_twice(t, tl.sqrt(t * (t + 2))))


@jit
def short_asinh(x):
    """log(size + sqrt(size**2 + 1)), and sqrt(s) - 1 = (s - 1) / (sqrt(s) + 1)."""
    size = tl.abs(x)
    square = size * size
    return libdevice.copysign(_log_twice(size, libdevice.fast_dividef(square, 1 + tl.sqrt(square + 1))), x)


@jit
def atanh(x):
    """In f32 the operations of libdevice, log(1 + 2 * |x| / (1 - |x|)) / 2, without the branch of its logarithm.

    Before that the elements of a thread would wait for each other. 1 + y is 2**k * (1 + m) with -1/4 <= m < 1/2.
    """
    if x.dtype == tl.float32:
        size = tl.abs(x)
        y = libdevice.fast_dividef(2 * size, 1 - size)
        k = ((y + 1).to(tl.int32, bitcast=True) - 0x3F400000) & -0x800000  # times 2**23
        part = (y.to(tl.int32, bitcast=True) - k).to(tl.float32, bitcast=True)
        m = (0x3F800000 - k).to(tl.float32, bitcast=True) - 1 + part
        p = (-0.045348614, 0.105468884, -0.13229704, 0.14491446, -0.16641565, 0.19988868, -0.25000197, 0.3333351, -0.5)
        found = tl.fma(k.to(tl.float32), 8.262958294867817e-08, tl.fma(m * polynomial(m, p), m, m))  # log(2) * 2**-23
        beyond = tl.where(size == 1, float("inf"), float("nan"))
        found = libdevice.copysign(tl.where(size < 1, 0.5 * found, beyond), x)
    else:
        found = libdevice.atanh(x)
    return found


@jit
def short_atanh(x):
    size = tl.abs(x)
    found = 0.5 * short_log1p(libdevice.fast_dividef(2 * size, 1 - size))
    return libdevice.copysign(tl.where(size > 1, float("nan"), found), x)


@jit
def short_atan(x):
    """t * P(t**2) with t = |x|, and pi / 2 less that with t = 1 / |x| where |x| > 1 (fitted: 2**-20)."""
    size = tl.abs(x)
    t = tl.where(size > 1, libdevice.fast_dividef(tl.full(x.shape, 1.0, tl.float32), size), size)
    p = (0.0078633679, -0.037012976, 0.083871163, -0.1348719, 0.19881482, -0.33326516, 0.99999934)
    found = t * polynomial(t * t, p)
    return libdevice.copysign(tl.where(size > 1, 1.5707963267948966 - found, found), x)

# --- rounding, tests ---
@jit
def floor(x): return x if x.dtype.is_int() else tl.where(_is_subnormal(x) & (x < 0), -1.0, tl.floor(x))
@jit
def ceil(x): return x if x.dtype.is_int() else tl.where(_is_subnormal(x) & (x > 0), 1.0, tl.ceil(x))
@jit
def round(x): return x if x.dtype.is_int() else libdevice.rint(x)
@jit
def isnan(x): return x != x
@jit
def isinf(x): return (x * 0 != 0) & (x == x)
@jit
def isfinite(x): return x * 0 == 0
@jit
def logical_not(x): return x == 0

# --- bits ---
@jit
def bitwise_not(x): return x ^ (x * 0 - 1)


@jit
def bitwise_left_shift(x, y):
    """x << y; 0 for counts outside the width, where the hardware's result is undefined."""
    inside = (y >= 0) & (y < x.dtype.primitive_bitwidth)
    return tl.where(inside, x << tl.where(inside, y, 0), 0)


@jit
def bitwise_right_shift(x, y):
    """x >> y, with sign extension; for counts outside the width, every bit is the sign bit."""
    inside = (y >= 0) & (y < x.dtype.primitive_bitwidth)
    return x >> tl.where(inside, y, x.dtype.primitive_bitwidth - 1).to(x.dtype)

# --- selection ---
@jit
def clamp(x, y, z): return minimum(maximum(x, y), z)
# fmt: on
