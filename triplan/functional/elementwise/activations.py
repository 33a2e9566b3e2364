"""Activations and gates by torch's names: a line is what torch's arguments mean as a named op."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from triplan.errors import shown
from triplan.functional._autocast import narrowed
from triplan.functional._shapes import axis
from triplan.functional.elementwise.table import Line, function, in_place

# fmt: off
__all__ = [
    "celu", "celu_", "elu", "elu_", "geglu", "gelu", "glu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh",
    "hardtanh_", "leaky_relu", "leaky_relu_", "logsigmoid", "mish", "prelu", "reglu", "relu", "relu6", "relu_",
    "relu_squared", "selu", "selu_", "silu", "softcap_tanh", "softplus", "softshrink", "softsign", "swiglu",
    "tanhshrink", "threshold", "threshold_",
]
# fmt: on

Tensor = torch.Tensor


def _gelu(input: Tensor, approximate: str) -> tuple[Any, ...]:
    ops = {"none": "gelu", "tanh": "gelu_tanh"}
    if approximate not in ops:
        raise RuntimeError(f"approximate argument must be either none or tanh, not {shown(approximate)}")
    return ops[approximate], input


def _typed(op: str, input: Tensor, *numbers: float) -> tuple[Any, ...]:
    """``numbers`` as integers where ``input`` has them, as torch converts them."""
    return (op, input, *(numbers if input.is_floating_point() else map(int, numbers)))


def _prelu(input: Tensor, weight: Tensor) -> tuple[Any, ...]:
    input, weight = narrowed("prelu", input, weight)
    channels = input.shape[1] if input.dim() > 1 else 1
    if weight.numel() != 1 and (weight.dim() != 1 or weight.shape[0] != channels):
        raise RuntimeError(
            "prelu(): Mismatch of parameter numbers and input channel size. Found parameter numbers = "
            f"{weight.numel()} and channel size = {channels}."
        )
    if weight.dtype != input.dtype:
        raise RuntimeError(f"prelu(): input is {input.dtype}, but weight is {weight.dtype}")
    if weight.numel() == 1:
        return "prelu", input, weight.reshape(())
    return "prelu", input, weight.reshape(-1, *[1] * (input.dim() - 2))


def _halves(op: str, input: Tensor, dim: int) -> tuple[Any, ...]:
    if input.dim() == 0:
        raise RuntimeError(f"{op} does not support 0-dimensional tensors")
    at = axis(dim, input.dim())
    n = input.shape[at]
    if n % 2:
        raise RuntimeError(f"Halving dimension must be even, but dimension {dim} is size {n}")
    return op, input.narrow(at, 0, n // 2), input.narrow(at, n // 2, n // 2)


def _gated(op: str, input: Tensor, other: Tensor | None) -> tuple[Any, ...]:
    """``input`` and ``other``, or the halves of the last axis of ``input``."""
    return _halves(op, input, -1) if other is None else (op, input, other)


def _floats(line: Line) -> Line:
    """``line``, which refuses what is no floating-point tensor."""

    @wraps(line)
    def checked(input: Tensor, *args: Any, **options: Any) -> tuple[Any, ...]:
        found = line(input, *args, **options)
        if not input.is_floating_point():
            raise NotImplementedError(f"{found[0]}(): expected a floating-point tensor, but got {input.dtype}")
        return found

    return checked


def _activation(name: str, line: Line) -> Callable[..., Tensor]:
    """With ``inplace=``, as torch.nn.functional has it."""
    return function(name, _floats(line), inplace=True, out=False)


def _pure(name: str, line: Line) -> Callable[..., Tensor]:
    return function(name, _floats(line))


relu = function("relu", lambda input: ("relu", input), inplace=True, out=False)
relu_ = in_place("relu", lambda input: ("relu", input))
relu6 = function("relu6", lambda input: ("relu6", input), inplace=True, out=False)
leaky_relu = _activation("leaky_relu", lambda input, negative_slope=0.01: ("leaky_relu", input, negative_slope))
leaky_relu_ = in_place("leaky_relu", lambda input, negative_slope=0.01: ("leaky_relu", input, negative_slope))
elu = _activation("elu", lambda input, alpha=1.0: ("elu", input, alpha))
elu_ = in_place("elu", lambda input, alpha=1.0: ("elu", input, alpha))
selu = _activation("selu", lambda input: ("selu", input))
selu_ = in_place("selu", lambda input: ("selu", input))
celu = _activation("celu", lambda input, alpha=1.0: ("celu", input, alpha))
celu_ = in_place("celu", lambda input, alpha=1.0: ("celu", input, alpha))
silu = _activation("silu", lambda input: ("silu", input))
mish = _activation("mish", lambda input: ("mish", input))
hardswish = _activation("hardswish", lambda input: ("hardswish", input))
hardsigmoid = _activation("hardsigmoid", lambda input: ("hardsigmoid", input))
hardtanh = function(
    "hardtanh",
    lambda input, min_val=-1.0, max_val=1.0: _typed("hardtanh", input, min_val, max_val),
    inplace=True,
    out=False,
)
hardtanh_ = in_place("hardtanh", lambda input, min_val=-1.0, max_val=1.0: _typed("hardtanh", input, min_val, max_val))
threshold = function(
    "threshold", lambda input, threshold, value: _typed("threshold", input, threshold, value), inplace=True, out=False
)
threshold_ = in_place("threshold", lambda input, threshold, value: _typed("threshold", input, threshold, value))
gelu = _pure("gelu", lambda input, approximate="none": _gelu(input, approximate))
hardshrink = _pure("hardshrink", lambda input, lambd=0.5: ("hardshrink", input, lambd))
softshrink = _pure("softshrink", lambda input, lambd=0.5: ("softshrink", input, lambd))
tanhshrink = function("tanhshrink", lambda input: ("tanhshrink", input), out=False)
softplus = _pure("softplus", lambda input, beta=1.0, threshold=20.0: ("softplus", input, beta, threshold))
softsign = function("softsign", lambda input: ("softsign", input), out=False)
logsigmoid = _pure("logsigmoid", lambda input: ("logsigmoid", input))
prelu = _pure("prelu", lambda input, weight: _prelu(input, weight))
glu = _pure("glu", lambda input, dim=-1: _halves("glu", input, dim))
relu_squared = function("relu_squared", _floats(lambda input: ("relu_squared", input)))
softcap_tanh = function("softcap_tanh", _floats(lambda input, cap=30.0: ("softcap_tanh", input, cap)))
swiglu = function("swiglu", _floats(lambda input, other=None: _gated("swiglu", input, other)))
geglu = function("geglu", _floats(lambda input, other=None: _gated("geglu", input, other)))
reglu = function("reglu", _floats(lambda input, other=None: _gated("reglu", input, other)))
