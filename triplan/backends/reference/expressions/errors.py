"""How errors propagate through one function: a bound on |computed - exact| from those of its arguments.

Every bound is rigorous at the actual values, not only to first order: arguments may lie anywhere within their errors.
Where there is no bound (a divisor whose error interval contains 0, an intermediate overflow), it is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from triplan.backends.triton.common.accuracy import FLUSHES, JUMPS, function_error, lost
from triplan.descriptors.expressions.expression import FUNCTIONS
from triplan.descriptors.expressions.tree import Typed
from triplan.sku import ElementKind


def propagated(
    name: str,
    call: Callable[..., Tensor],
    args: Sequence[Tensor],
    errors: Sequence[Tensor],
    value: Tensor,
    typed: Typed,
) -> Tensor:
    """The bound on the error of ``value``, which is ``call(*args)``.

    ``errors``: bounds on the errors of the arguments. Arguments wider than the compute element are also rounded to it.
    """
    if name in JUMPS and typed.element.is_floating_point:
        return _jumped(args[0], args[1], errors, value, typed.element.compute.unit_roundoff)
    exact = torch.stack([(e == 0).all() for e in errors]).all()
    if not typed.element.is_floating_point and bool(exact):
        return torch.zeros((), dtype=torch.float64)
    real = [a.to(torch.float64) for a in args]
    if name in FLUSHES and typed.element.compute is ElementKind.F32:
        tiny = torch.finfo(torch.float32).smallest_normal
        errors = [
            torch.maximum(e, torch.where(a.abs() < tiny, a.abs(), 0.0)) for a, e in zip(real, errors, strict=True)
        ]
    found = _moved(name, call, args, real, list(errors), value.to(torch.float64))
    settled = torch.zeros((), dtype=torch.bool)
    for e in errors:
        settled = settled | (e != 0)
    if typed.element.is_floating_point:
        compute = typed.element.compute
        size = value.abs() + found
        own = function_error(name, typed.element)
        if own:
            # The float64 oracle has errors too; they matter only if the kernel computes in f64.
            found = found + own * (2 if compute is ElementKind.F64 else 1) * size + lost(compute)
        if compute is not ElementKind.F64:
            found = torch.where(value.isfinite() & (size > torch.finfo(compute.torch).max), math.inf, found)
    # Exact arguments give exact infinities and NaNs; with inexact arguments there is no bound.
    found = torch.where(
        value.isfinite() if value.is_floating_point() else torch.ones_like(found, dtype=torch.bool),
        found,
        torch.where(settled, math.inf, 0.0),
    )
    return torch.nan_to_num(found, nan=math.inf, posinf=math.inf)


def _jumped(x: Tensor, y: Tensor, errors: Sequence[Tensor], value: Tensor, unit: float) -> Tensor:
    """The error of trunc(x / y), whose quotient is rounded before it is truncated."""
    rest = y.abs() - errors[1]
    quotient = x / y
    error = torch.where(rest > 0, (errors[0] + quotient.abs() * errors[1]) / rest, math.inf) + 2 * unit * quotient.abs()
    ends = [(torch.trunc(quotient + s * error) - value).abs() for s in (-1, 1)]
    found = torch.where(quotient.isfinite(), torch.maximum(*ends) + 2 * unit * value.abs(), error * 0)
    return torch.nan_to_num(found, nan=math.inf, posinf=math.inf)


def _moved(
    name: str, call: Callable[..., Tensor], args: Sequence[Any], real: list[Tensor], errors: list[Tensor], value: Tensor
) -> Tensor:
    """How far errors of the arguments move the result, at most."""
    if not any(bool((e != 0).any()) for e in errors):
        return torch.zeros_like(value)
    if name in ("add", "sub"):
        return errors[0] + errors[1]
    if name == "mul":
        return real[0].abs() * errors[1] + real[1].abs() * errors[0] + errors[0] * errors[1]
    if name == "div":
        rest = real[1].abs() - errors[1]
        return torch.where(rest > 0, (errors[0] + value.abs() * errors[1]) / rest, math.inf)
    if name == "where":
        x, y = (torch.where(args[0], errors[1], errors[2]), (real[1] - real[2]).abs() + errors[1] + errors[2])
        return torch.where(errors[0] != 0, torch.maximum(x, y), x)
    if name in ("reciprocal", "rsqrt", "log", "log2", "log10"):
        real, errors = [real[0]], [torch.where(errors[0] < real[0].abs(), errors[0], math.inf)]
    function = FUNCTIONS[name]
    total = errors[0]
    for e in errors[1:]:
        total = total + e
    if name in ("eq", "ne", "lt", "le", "gt", "ge"):
        near = (real[0] - real[1]).abs() <= total
        return torch.where(near & (total != 0), 1.0, 0.0)
    if function.result in ("truth", "bool") or not args[0].is_floating_point():
        return torch.where(total != 0, 1.0 if value.max() <= 1 and value.min() >= 0 else math.inf, 0.0)
    if function.slope is not None:
        return torch.where(total != 0, function.slope * total, 0.0)
    worst = torch.zeros_like(value)
    for signs in product((-1, 1), repeat=len(real)):
        end = call(*(a + s * e for a, s, e in zip(real, signs, errors, strict=True))).to(torch.float64)
        worst = torch.maximum(worst, (end - value).abs())
    return torch.where(total != 0, worst * (1 + 2.0**-40), 0.0)
