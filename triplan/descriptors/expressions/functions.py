"""The maths table: each function once, with its facts and its gradient. The kernels and the reference compute functions
of these names in ``backends``.

Gradients are torch's, also where no derivative exists: 0 for ``abs`` at 0, half for each of two equal arguments of
``maximum``. Gradients are masked by selection, not by multiplying by 0, which would turn infinities into NaN.
"""

from __future__ import annotations

import math

from triplan.descriptors.expressions.expression import Expr, Function, call, function

FLOAT, NUMBER, ANY, WHOLE = "f", "fi", "fib", "ib"
LN2, LN10 = math.log(2), math.log(10)

# --- arithmetic ---
add = function("add", ANY, "same", lambda g, v, x, y: (g, g))
sub = function("sub", NUMBER, "same", lambda g, v, x, y: (g, -g))
mul = function("mul", ANY, "same", lambda g, v, x, y: (g * y, g * x))
div = function("div", ANY, "float", lambda g, v, x, y: (g / y, -g * v / y))
neg = function("neg", NUMBER, "same", lambda g, v, x: (-g,))
abs = function("abs", NUMBER, "same", lambda g, v, x: (g * sign(x),))
sign: Function = function("sign", ANY, "same", arity=1)
reciprocal = function("reciprocal", ANY, "float", lambda g, v, x: (-g * (v * v),))
floor_divide: Function = function("floor_divide", NUMBER, "same", arity=2)
truncate_divide: Function = function("truncate_divide", NUMBER, "same", arity=2)
remainder = function("remainder", NUMBER, "same", lambda g, v, x, y: (g, -g * floor_divide(x, y)), slope=math.inf)
fmod = function("fmod", NUMBER, "same", lambda g, v, x, y: (g, -g * truncate_divide(x, y)), slope=math.inf)
maximum = function("maximum", ANY, "same", lambda g, v, x, y: (_larger(g, x, y), _larger(g, y, x)))
minimum = function("minimum", ANY, "same", lambda g, v, x, y: (_larger(g, y, x), _larger(g, x, y)))
fmax = function("fmax", ANY, "same", lambda g, v, x, y: _chosen(g, (x >= y) | isnan(y)))
fmin = function("fmin", ANY, "same", lambda g, v, x, y: _chosen(g, (x <= y) | isnan(y)))
copysign = function("copysign", ANY, "float", lambda g, v, x, y: (where(eq(x, 0), 0, g * (v / x)), None))

# --- roots, exponentials, logarithms ---
sqrt = function("sqrt", ANY, "float", lambda g, v, x: (g / (2 * v),))
rsqrt = function("rsqrt", ANY, "float", lambda g, v, x: (-0.5 * g * (v * v * v),))
exp = function("exp", ANY, "float", lambda g, v, x: (g * v,))
exp2 = function("exp2", ANY, "float", lambda g, v, x: (g * v * LN2,))
# (1 + expm1(x), which torch multiplies by, has fewer digits below 0, and takes three times the instructions.)
expm1 = function("expm1", ANY, "float", lambda g, v, x: (g * exp(x),))
log = function("log", ANY, "float", lambda g, v, x: (g / x,))
log1p = function("log1p", ANY, "float", lambda g, v, x: (g / (x + 1),))
log2 = function("log2", ANY, "float", lambda g, v, x: (g / (x * LN2),))
log10 = function("log10", ANY, "float", lambda g, v, x: (g / (x * LN10),))
pow = function(
    "pow",
    NUMBER,
    "same",
    lambda g, v, x, y: (
        where(eq(y, 0), 0, g * (y * call("pow", x, y - 1))),
        where(eq(x, 0) & (y >= 0), 0, g * (v * log(x))),
    ),
)
hypot = function("hypot", FLOAT, "same", lambda g, v, x, y: (g * (x / v), g * (y / v)), slope=1.0)

xlogy = function(
    "xlogy",
    ANY,
    "float",
    lambda g, v, x, y: (where(eq(x, 0) & (y <= 0), 0, call("xlogy", g, y)), g * x / y),
)

# --- trigonometry ---
sin = function("sin", ANY, "float", lambda g, v, x: (g * cos(x),), slope=1.0)
cos: Function = function("cos", ANY, "float", lambda g, v, x: (-g * sin(x),), slope=1.0)
tan = function("tan", ANY, "float", lambda g, v, x: (g * (1 + v * v),), slope=math.inf)
asin = function("asin", ANY, "float", lambda g, v, x: (g * rsqrt(1 - x * x),))
acos = function("acos", ANY, "float", lambda g, v, x: (-g * rsqrt(1 - x * x),))
atan = function("atan", ANY, "float", lambda g, v, x: (g / (1 + x * x),))
sinh = function("sinh", ANY, "float", lambda g, v, x: (g * cosh(x),))
cosh: Function = function("cosh", ANY, "float", lambda g, v, x: (g * sinh(x),))
tanh = function("tanh", ANY, "float", lambda g, v, x: (g * _sech2(x),))
# 1 / cosh(x)**2; 1 - tanh(x)**2 cancels where it is small, and takes more instructions.
_sech2: Function = function("sech2", ANY, "float", lambda g, v, x: (-2 * g * (tanh(x) * v),), slope=0.77)
asinh = function("asinh", ANY, "float", lambda g, v, x: (g * rsqrt(x * x + 1),))
acosh = function("acosh", ANY, "float", lambda g, v, x: (g * rsqrt(x * x - 1),))
atanh = function("atanh", ANY, "float", lambda g, v, x: (g / (1 - x * x),))
atan2 = function("atan2", ANY, "float", lambda g, v, x, y: (_turned(g * y, x, y), _turned(-g * x, x, y)))

# --- special functions ---
erf = function("erf", ANY, "float", lambda g, v, x: (g * (2 / math.sqrt(math.pi) * exp(-x * x)),))
erfc = function("erfc", ANY, "float", lambda g, v, x: (-g * (2 / math.sqrt(math.pi) * exp(-x * x)),))
normal_cdf = function("normal_cdf", ANY, "float", lambda g, v, x: (g * ((2 * math.pi) ** -0.5 * exp(-0.5 * (x * x))),))
sigmoid = function("sigmoid", ANY, "float", lambda g, v, x: (g * (v * (1 - v)),))
log1pexp = function("log1pexp", ANY, "float", lambda g, v, x: (g * sigmoid(x),))
# tanh(log1pexp(x)), by one exponential and one division
function("tanh_log1pexp", ANY, "float", lambda g, v, x: (g * ((1 - v * v) * sigmoid(x)),))
# Composed: the gradients of their trees are numbers where they are NaN, and take four divisions in place of one.
logit = function("logit", ANY, "float", lambda g, v, x: (_of_logit(g, x),), body=lambda x: _log_odds(x))
function(
    "logit_clamped",
    ANY,
    "float",
    lambda g, v, x, eps: _of_clamped(g, x, eps, 1 - eps),
    # torch asks for the lower limit first; clamp has the upper one where they cross, with eps > 0.5
    body=lambda x, eps: _log_odds(where(x < eps, eps, where(x > 1 - eps, 1 - eps, x))),
)
# Composed: the gradient of its tree selects twice as often.
function(
    "elu",
    ANY,
    "float",
    lambda g, v, x, alpha, scale, input_scale: _of_elu(g, x, alpha, scale, input_scale),
    body=lambda x, alpha, scale, input_scale: where(
        x <= 0, expm1(where(x <= 0, x, 0) * input_scale) * (alpha * scale), x * scale
    ),
)

# --- rounding, tests ---
floor: Function = function("floor", NUMBER, "same", arity=1)
ceil = function("ceil", NUMBER, "same", arity=1)
round = function("round", NUMBER, "same", arity=1)
trunc: Function = function("trunc", NUMBER, "same", arity=1)
isnan: Function = function("isnan", ANY, "bool", arity=1)
isinf = function("isinf", ANY, "bool", arity=1)
isfinite = function("isfinite", ANY, "bool", arity=1)
eq: Function = function("eq", ANY, "bool", arity=2)
ne = function("ne", ANY, "bool", arity=2)
lt = function("lt", ANY, "bool", arity=2)
le = function("le", ANY, "bool", arity=2)
gt = function("gt", ANY, "bool", arity=2)
ge = function("ge", ANY, "bool", arity=2)
logical_not = function("logical_not", ANY, "truth", arity=1)
logical_and = function("logical_and", ANY, "truth", arity=2)
logical_or = function("logical_or", ANY, "truth", arity=2)
logical_xor = function("logical_xor", ANY, "truth", arity=2)

# --- bits ---
bitwise_not = function("bitwise_not", WHOLE, "same", arity=1)
bitwise_and = function("bitwise_and", WHOLE, "same", arity=2)
bitwise_or = function("bitwise_or", WHOLE, "same", arity=2)
bitwise_xor = function("bitwise_xor", WHOLE, "same", arity=2)
bitwise_left_shift = function("bitwise_left_shift", "i", "same", arity=2)
bitwise_right_shift = function("bitwise_right_shift", "i", "same", arity=2)

# --- selection ---
where: Function = function("where", ANY, "select", lambda g, v, c, x, y: (None, where(c, g, 0), where(c, 0, g)))


clamp: Function = function(
    "clamp",
    ANY,
    "same",
    lambda g, v, x, y, z: (
        where((x >= y) & (x <= z), g, 0),
        where((x < y) & (y < z), g, 0),
        where((x > z) | (z < y), g, 0),
    ),
    slope=1.0,
)


def _turned(part: Expr, x: Expr, y: Expr) -> Expr:
    """``part / (x**2 + y**2)``; 0 at the origin."""
    square = x * x + y * y
    return where(eq(square, 0), 0, part / square)


def _log_odds(p: Expr) -> Expr:
    return log(p / (1.0 - p))


def _of_logit(g: Expr, p: Expr) -> Expr:
    """The gradient of p in logit(p)."""
    product = p * (1 - p)
    return where(product < 0, math.nan, g / product)


def _of_clamped(g: Expr, x: Expr, low: Expr, high: Expr) -> tuple[Expr, Expr]:
    """The gradients of x and of ``low`` in logit(clamp(x, low, high)), with ``high = 1 - low``."""
    found = _of_logit(g, clamp(x, low, high))
    return where((x < low) | (x > high), 0, found), where(x < low, found, where(x > high, -found, 0))


def _of_elu(g: Expr, x: Expr, alpha: Expr, scale: Expr, input_scale: Expr) -> tuple[Expr, ...]:
    """The gradients of x, ``alpha``, ``scale`` and ``input_scale`` in elu, with no exponential of an x above 0."""
    curved, low = x <= 0, where(x <= 0, x, 0)
    power, drop = exp(low * input_scale), expm1(low * input_scale)
    return (
        where(curved, g * (alpha * scale * input_scale) * power, g * scale),
        where(curved, g * scale * drop, 0),
        where(curved, g * alpha * drop, g * x),
        where(curved, g * (alpha * scale) * power * low, 0),
    )


def _larger(g: Expr, x: Expr, y: Expr) -> Expr:
    """The gradient of x in maximum(x, y): half where they are equal."""
    return where(x < y, 0, where(eq(x, y), 0.5 * g, g))


def _chosen(g: Expr, first: Expr) -> tuple[Expr, Expr]:
    return where(first, g, 0), where(first, 0, g)
