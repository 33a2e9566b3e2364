"""Functions of numbers by torch's names: a line is what torch's arguments mean as a named op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from triplan.errors import shown
from triplan.functional._replay.recording import setting
from triplan.functional.elementwise.table import both, function

# fmt: off
__all__ = [
    "abs", "abs_", "acos", "acos_", "acosh", "acosh_", "add", "add_", "addcdiv", "addcdiv_", "addcmul",
    "addcmul_", "asin", "asin_", "asinh", "asinh_", "atan", "atan2", "atan2_", "atan_", "atanh", "atanh_",
    "bitwise_and", "bitwise_and_", "bitwise_left_shift", "bitwise_left_shift_", "bitwise_not", "bitwise_not_",
    "bitwise_or", "bitwise_or_", "bitwise_right_shift", "bitwise_right_shift_", "bitwise_xor", "bitwise_xor_",
    "ceil", "ceil_", "clamp", "clamp_", "clamp_max", "clamp_max_", "clamp_min", "clamp_min_", "copysign",
    "copysign_", "cos", "cos_", "cosh", "cosh_", "div", "div_", "eq", "eq_", "erf", "erf_", "erfc", "erfc_",
    "exp", "exp2", "exp2_", "exp_", "expm1", "expm1_", "floor", "floor_", "floor_divide", "floor_divide_", "fmax",
    "fmin", "fmod", "fmod_", "frac", "frac_", "ge", "ge_", "gt", "gt_", "hypot", "hypot_", "isfinite", "isinf",
    "isnan", "le", "le_", "lerp", "lerp_", "log", "log1p", "log1p_", "log2", "log2_", "log10", "log10_", "log_",
    "logical_and", "logical_and_", "logical_not", "logical_not_", "logical_or", "logical_or_", "logical_xor",
    "logical_xor_", "logit", "logit_", "lt", "lt_", "maximum", "minimum", "mul", "mul_", "nan_to_num",
    "nan_to_num_", "ne", "ne_", "neg", "neg_", "pow", "pow_", "reciprocal", "reciprocal_", "remainder",
    "remainder_", "round", "round_", "rsqrt", "rsqrt_", "sigmoid", "sigmoid_", "sign", "sign_", "sin", "sin_",
    "sinh", "sinh_", "sqrt", "sqrt_", "square", "square_", "sub", "sub_", "tan", "tan_", "tanh", "tanh_", "trunc",
    "trunc_", "where", "xlogy", "xlogy_",
]
# fmt: on


def _promoted(input: Any, *others: Any) -> tuple[Any, ...]:
    """``others``, whose product is added to ``input``, with integers in the dtype in which torch computes all.

    Left as they are, the product would have the dtype of its own factors and scale: an integer one in which it wraps
    around, or one to which torch does not promote the sum.
    """
    given = (input, *others)
    if len({o.dtype if isinstance(o, Tensor) else type(o) for o in given}) == 1:
        return others
    if not any(isinstance(o, Tensor) and o.is_floating_point() for o in given):
        setting(torch.get_default_dtype)  # what promotion reads
    # Numbers count by their types, and may be symbols.
    likes = (
        o if isinstance(o, (Tensor, bool)) else 0.5 if isinstance(o, (float, torch.SymFloat)) else 1 for o in given
    )
    common = elementwise_dtypes(*likes, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)[1]
    numbers = (int(o) if isinstance(o, bool) else o for o in others)
    return tuple(
        o.to(common) if isinstance(o, Tensor) and not o.is_floating_point() and o.dtype != common else o
        for o in numbers
    )


def _scaled(op: str, input: Any, other: Any, alpha: Any) -> tuple[Any, ...]:
    given = [o.dtype if isinstance(o, Tensor) else torch.tensor(o).dtype for o in (input, other)]
    if op == "sub" and torch.bool in given:  # also of one bool, which promotion would make a number
        raise NotImplementedError("sub(): sub does not take bool")
    if isinstance(alpha, bool) and any(d is not torch.bool for d in given):
        raise RuntimeError("Boolean alpha only supported for Boolean results.")
    if isinstance(alpha, float) and not any(d.is_floating_point for d in given):
        raise RuntimeError("For integral input tensors, argument alpha must not be a floating point number.")
    if alpha == 1:
        return op, input, other
    if given[0] is given[1] is torch.bool:
        return op, input, other if alpha else (torch.zeros_like(other) if isinstance(other, Tensor) else False)
    return f"{op}_scaled", input, *_promoted(input, other), alpha


def _divided(input: Any, other: Any, rounding_mode: str | None) -> tuple[Any, ...]:
    ops = {None: "div", "floor": "floor_divide", "trunc": "truncate_divide"}
    if rounding_mode not in ops:
        raise RuntimeError(
            f"div expected rounding_mode to be one of None, 'trunc', or 'floor' but found '{shown(rounding_mode)}'"
        )
    return ops[rounding_mode], input, other


def _power(input: Any, exponent: Any) -> tuple[Any, ...]:
    whole = isinstance(input, Tensor) and not input.is_floating_point()
    if whole and isinstance(exponent, int) and exponent < 0:
        raise RuntimeError("Integers to negative integer powers are not allowed.")
    return "pow", input, exponent


def _rounded(input: Tensor, decimals: int) -> tuple[Any, ...]:
    if decimals == 0:
        return "round", input
    if not input.is_floating_point():
        raise NotImplementedError(f"round(): decimals of {input.dtype}: only floating-point tensors have them")
    return "round_decimals", input, 10.0 ** max(decimals, 0), 10.0 ** max(-decimals, 0)


def _finite(input: Tensor, nan: float | None, posinf: float | None, neginf: float | None) -> tuple[Any, ...]:
    if not input.is_floating_point():
        return "bitwise_or", input, False if input.dtype is torch.bool else 0
    limits = torch.finfo(input.dtype)
    highest, lowest = limits.max if posinf is None else posinf, limits.min if neginf is None else neginf
    return "nan_to_num", input, 0.0 if nan is None else float(nan), float(highest), float(lowest)


def _clamped(input: Tensor, min: Any, max: Any) -> tuple[Any, ...]:
    if min is None and max is None:
        raise RuntimeError("torch.clamp: At least one of 'min' or 'max' must not be None")
    if min is None or max is None:
        return ("clamp_max", input, max) if min is None else ("clamp_min", input, min)
    return "clamp", input, min, max


square, square_ = both("square", lambda input: ("pow", input, 2) if input.dtype is torch.bool else ("square", input))
logit, logit_ = both(
    "logit", lambda input, eps=None: ("logit", input) if eps is None or eps < 0 else ("logit_clamped", input, eps)
)
round, round_ = both("round", lambda input, *, decimals=0: _rounded(input, decimals))
nan_to_num, nan_to_num_ = both(
    "nan_to_num", lambda input, nan=None, posinf=None, neginf=None: _finite(input, nan, posinf, neginf)
)
add, add_ = both("add", lambda input, other, *, alpha=1: _scaled("add", input, other, alpha))
sub, sub_ = both("sub", lambda input, other, *, alpha=1: _scaled("sub", input, other, alpha))
div, div_ = both("div", lambda input, other, *, rounding_mode=None: _divided(input, other, rounding_mode))
pow, pow_ = both("pow", lambda input, exponent: _power(input, exponent))
where = function("where", lambda condition, input, other: ("where", condition, input, other))
clamp, clamp_ = both("clamp", lambda input, min=None, max=None: _clamped(input, min, max))
clamp_min, clamp_min_ = both("clamp_min", lambda input, min: ("clamp_min", input, min))
clamp_max, clamp_max_ = both("clamp_max", lambda input, max: ("clamp_max", input, max))
lerp, lerp_ = both("lerp", lambda input, end, weight: ("lerp", input, end, weight))
addcmul, addcmul_ = both(
    "addcmul",
    lambda input, tensor1, tensor2, *, value=1: ("addcmul", input, *_promoted(input, tensor1, tensor2), value),
)
addcdiv, addcdiv_ = both(
    "addcdiv",
    lambda input, tensor1, tensor2, *, value=1: ("addcdiv", input, *_promoted(input, tensor1, tensor2), value),
)
abs, abs_ = both("abs")
neg, neg_ = both("neg")
sign, sign_ = both("sign")
reciprocal, reciprocal_ = both("reciprocal")
sqrt, sqrt_ = both("sqrt")
rsqrt, rsqrt_ = both("rsqrt")
exp, exp_ = both("exp")
exp2, exp2_ = both("exp2")
expm1, expm1_ = both("expm1")
log, log_ = both("log")
log1p, log1p_ = both("log1p")
log2, log2_ = both("log2")
log10, log10_ = both("log10")
sin, sin_ = both("sin")
cos, cos_ = both("cos")
tan, tan_ = both("tan")
asin, asin_ = both("asin")
acos, acos_ = both("acos")
atan, atan_ = both("atan")
sinh, sinh_ = both("sinh")
cosh, cosh_ = both("cosh")
tanh, tanh_ = both("tanh")
asinh, asinh_ = both("asinh")
acosh, acosh_ = both("acosh")
atanh, atanh_ = both("atanh")
erf, erf_ = both("erf")
erfc, erfc_ = both("erfc")
sigmoid, sigmoid_ = both("sigmoid")
floor, floor_ = both("floor")
ceil, ceil_ = both("ceil")
trunc, trunc_ = both("trunc")
frac, frac_ = both("frac")
logical_not, logical_not_ = both("logical_not")
bitwise_not, bitwise_not_ = both("bitwise_not")
isnan = function("isnan", out=False)
isinf = function("isinf", out=False)
isfinite = function("isfinite", out=False)
mul, mul_ = both("mul")
floor_divide, floor_divide_ = both("floor_divide")
remainder, remainder_ = both("remainder")
fmod, fmod_ = both("fmod")
atan2, atan2_ = both("atan2")
hypot, hypot_ = both("hypot")
copysign, copysign_ = both("copysign")
xlogy, xlogy_ = both("xlogy")
eq, eq_ = both("eq")
ne, ne_ = both("ne")
lt, lt_ = both("lt")
le, le_ = both("le")
gt, gt_ = both("gt")
ge, ge_ = both("ge")
logical_and, logical_and_ = both("logical_and")
logical_or, logical_or_ = both("logical_or")
logical_xor, logical_xor_ = both("logical_xor")
bitwise_and, bitwise_and_ = both("bitwise_and")
bitwise_or, bitwise_or_ = both("bitwise_or")
bitwise_xor, bitwise_xor_ = both("bitwise_xor")
bitwise_left_shift, bitwise_left_shift_ = both("bitwise_left_shift")
bitwise_right_shift, bitwise_right_shift_ = both("bitwise_right_shift")
maximum = function("maximum")
minimum = function("minimum")
fmax = function("fmax")
fmin = function("fmin")
