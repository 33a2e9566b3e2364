"""The maths table's functions in plain torch, from their definitions: floats in float64, integers in their own type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _whole(exact: Callable[..., Tensor], real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``exact`` for integers, ``real`` for floats."""
    return lambda *args: real(*args) if args[0].is_floating_point() else exact(*args)


def _divide(mode: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Integers divided by 0 give 0."""
    return lambda x, y: torch.where(y == 0, 0, torch.div(x, torch.where(y == 0, 1, y), rounding_mode=mode))


def _rest(divide: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: x - divide(x, y) * y


def _power(x: Tensor, y: Tensor) -> Tensor:
    small = torch.where(x == 1, 1, torch.where(x == -1, torch.where(y % 2 == 0, 1, -1), 0)).to(x.dtype)
    return torch.where(y < 0, small, torch.pow(x, y.clamp(min=0)))


def _shift(x: Tensor, y: Tensor, left: bool) -> Tensor:
    bits = 8 * x.element_size()
    inside = (y >= 0) & (y < bits)
    if left:
        return torch.where(inside, x << torch.where(inside, y, 0), 0).to(x.dtype)
    return x >> torch.where(inside, y, bits - 1)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "neg": lambda x: -x,
    "abs": torch.abs,
    "sign": torch.sign,
    "reciprocal": lambda x: 1 / x,
    "floor_divide": _whole(_divide("floor"), torch.floor_divide),
    "truncate_divide": _whole(_divide("trunc"), lambda x, y: torch.trunc(x / y)),
    "remainder": _whole(_rest(_divide("floor")), torch.remainder),
    "fmod": _whole(_rest(_divide("trunc")), torch.fmod),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "copysign": torch.copysign,
    "sqrt": torch.sqrt,
    "rsqrt": lambda x: 1 / torch.sqrt(x),
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "log10": torch.log10,
    "pow": _whole(_power, torch.pow),
    "hypot": torch.hypot,
    "xlogy": torch.xlogy,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "asin": torch.asin,
    "acos": torch.acos,
    "atan": torch.atan,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "tanh": torch.tanh,
    "asinh": torch.asinh,
    "acosh": torch.acosh,
    "atanh": torch.atanh,
    "atan2": torch.atan2,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "normal_cdf": lambda x: torch.erfc(x * -(0.5**0.5)) / 2,
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "log1pexp": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    "isfinite": torch.isfinite,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "logical_not": torch.logical_not,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
    "bitwise_not": torch.bitwise_not,
    "bitwise_and": torch.bitwise_and,
    "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor,
    "bitwise_left_shift": lambda x, y: _shift(x, y, True),
    "bitwise_right_shift": lambda x, y: _shift(x, y, False),
    "where": torch.where,
    "clamp": lambda x, y, z: torch.clamp(x, y, z),
}
