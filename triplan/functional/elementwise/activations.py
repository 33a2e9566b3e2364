"""Activations and gates by torch's names: a line is what torch's arguments mean as a named op."""

from __future__ import annotations

from typing import Any

import torch

from triplan.errors import shown
from triplan.functional._autocast import narrowed
from triplan.functional._shapes import axis
from triplan.functional._watching import needs_grad, transformed
from triplan.functional.elementwise.packed import PACKED, halves
from triplan.functional.elementwise.table import function, in_place

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
    """``numbers`` as integers where ``input`` has them, as torch converts them; it refuses bools."""
    if input.dtype is torch.bool:
        raise NotImplementedError(f"{op}(): {op} does not take bool")
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


def _halves(op: str, input: Tensor, dim: int) -> tuple[Any, ...] | Tensor:
    if input.dim() == 0:
        raise RuntimeError(f"{op} does not support 0-dimensional tensors")
    at = axis(dim, input.dim())
    n = input.shape[at]
    if n % 2:
        raise RuntimeError(f"Halving dimension must be even, but dimension {dim} is size {n}")
    if input.is_floating_point() and needs_grad((input,)) and not transformed():
        found: Tensor = PACKED(input, at, f"{op} tt")
        return found
    return (op, *halves(input, at))


def _gated(op: str, input: Tensor, other: Tensor | None) -> tuple[Any, ...] | Tensor:
    """``input`` and ``other``, or the halves of the last axis of ``input``."""
    return _halves(op, input, -1) if other is None else (op, input, other)


relu = function("relu", lambda input: _typed("relu", input), inplace=True)
relu_ = in_place("relu", lambda input: _typed("relu", input))
relu6 = function("relu6", lambda input: _typed("relu6", input), inplace=True)
leaky_relu = function("leaky_relu", floats=True, inplace=True)
leaky_relu_ = in_place("leaky_relu")
elu = function("elu", lambda input, alpha=1.0: ("elu", input, alpha), floats=True, inplace=True)
elu_ = in_place("elu", lambda input, alpha=1.0: ("elu", input, alpha))
selu = function("selu", floats=True, inplace=True)
selu_ = in_place("selu")
celu = function("celu", floats=True, inplace=True)
celu_ = in_place("celu")
silu = function("silu", floats=True, inplace=True)
mish = function("mish", floats=True, inplace=True)
hardswish = function("hardswish", floats=True, inplace=True)
hardsigmoid = function("hardsigmoid", floats=True, inplace=True)
hardtanh = function(
    "hardtanh",
    lambda input, min_val=-1.0, max_val=1.0: _typed("hardtanh", input, min_val, max_val),
    inplace=True,
)
hardtanh_ = in_place("hardtanh", lambda input, min_val=-1.0, max_val=1.0: _typed("hardtanh", input, min_val, max_val))
threshold = function(
    "threshold", lambda input, threshold, value: _typed("threshold", input, threshold, value), inplace=True
)
threshold_ = in_place("threshold", lambda input, threshold, value: _typed("threshold", input, threshold, value))
gelu = function("gelu", lambda input, approximate="none": _gelu(input, approximate), floats=True)
hardshrink = function("hardshrink", floats=True)
softshrink = function("softshrink", floats=True)
tanhshrink = function("tanhshrink", lambda input: _typed("tanhshrink", input), out=False)
softplus = function("softplus", floats=True)
softsign = function("softsign", out=False)
logsigmoid = function("logsigmoid", floats=True)
prelu = function("prelu", lambda input, weight: _prelu(input, weight), floats=True)
glu = function("glu", lambda input, dim=-1: _halves("glu", input, dim), floats=True)
relu_squared = function("relu_squared", floats=True)
softcap_tanh = function("softcap_tanh", floats=True)
swiglu = function("swiglu", lambda input, other=None: _gated("swiglu", input, other), floats=True)
geglu = function("geglu", lambda input, other=None: _gated("geglu", input, other), floats=True)
reglu = function("reglu", lambda input, other=None: _gated("reglu", input, other), floats=True)
