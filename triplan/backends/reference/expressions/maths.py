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
    """Division with rounding ``mode``; integers divided by 0 give 0."""
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


#: Functions that torch has under the same name.
SAME = (
    "abs sign maximum minimum fmax fmin copysign sqrt exp exp2 expm1 log log1p log2 log10 hypot xlogy sin cos "
    "tan asin acos atan sinh cosh tanh asinh acosh atanh atan2 erf erfc floor ceil round trunc isnan isinf "
    "isfinite eq ne lt le gt ge logical_not logical_and logical_or logical_xor bitwise_not bitwise_and "
    "bitwise_or bitwise_xor where clamp"
)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in SAME.split()},
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "neg": lambda x: -x,
    "reciprocal": lambda x: 1 / x,
    "floor_divide": _whole(_divide("floor"), torch.floor_divide),
    "truncate_divide": _whole(_divide("trunc"), lambda x, y: torch.trunc(x / y)),
    "remainder": _whole(_rest(_divide("floor")), torch.remainder),
    "fmod": _whole(_rest(_divide("trunc")), torch.fmod),
    "rsqrt": lambda x: 1 / torch.sqrt(x),
    "pow": _whole(_power, torch.pow),
    "normal_cdf": lambda x: torch.erfc(x * -(0.5**0.5)) / 2,
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "sech2": lambda x: (1 / torch.cosh(x)) ** 2,
    "tanh_log1pexp": lambda x: torch.tanh(torch.logaddexp(x, torch.zeros_like(x))),
    "log1pexp": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "bitwise_left_shift": lambda x, y: _shift(x, y, True),
    "bitwise_right_shift": lambda x, y: _shift(x, y, False),
}
