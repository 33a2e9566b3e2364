"""Activations and gates as modules: those of torch.nn, whose forward is ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triplan import functional as F  # noqa: N812

# fmt: off
__all__ = [
    "CELU", "ELU", "GELU", "GLU", "SELU", "GeGLU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU",
    "LogSigmoid", "Mish", "PReLU", "ReGLU", "ReLU", "ReLU6", "ReLUSquared", "SiLU", "Sigmoid", "Softplus", "Softshrink",
    "Softsign", "SwiGLU", "Tanh", "Tanhshrink", "Threshold",
]
# fmt: on


def _module(name: str, function: Callable[..., Tensor], *attributes: str) -> type[torch.nn.Module]:
    """torch's module of that name, or one without parameters; ``attributes`` are arguments of ``function``."""

    def forward(self: Any, input: Tensor) -> Tensor:
        return function(input, *[getattr(self, a) for a in attributes])

    base = getattr(torch.nn, name, torch.nn.Module)
    doc = f"``functional.{function.__name__}`` as a module, with the arguments of torch's, if there is one."
    made: type[torch.nn.Module] = type(name, (base,), {"forward": forward, "__doc__": doc, "__module__": __name__})
    return made


CELU = _module("CELU", F.celu, "alpha", "inplace")
ELU = _module("ELU", F.elu, "alpha", "inplace")
GELU = _module("GELU", F.gelu, "approximate")
GLU = _module("GLU", F.glu, "dim")
GeGLU = _module("GeGLU", F.geglu)
Hardshrink = _module("Hardshrink", F.hardshrink, "lambd")
Hardsigmoid = _module("Hardsigmoid", F.hardsigmoid, "inplace")
Hardswish = _module("Hardswish", F.hardswish, "inplace")
Hardtanh = _module("Hardtanh", F.hardtanh, "min_val", "max_val", "inplace")
LeakyReLU = _module("LeakyReLU", F.leaky_relu, "negative_slope", "inplace")
LogSigmoid = _module("LogSigmoid", F.logsigmoid)
Mish = _module("Mish", F.mish, "inplace")
PReLU = _module("PReLU", F.prelu, "weight")
ReGLU = _module("ReGLU", F.reglu)
ReLU = _module("ReLU", F.relu, "inplace")
ReLU6 = _module("ReLU6", F.relu6, "inplace")
ReLUSquared = _module("ReLUSquared", F.relu_squared)
SELU = _module("SELU", F.selu, "inplace")
SiLU = _module("SiLU", F.silu, "inplace")
Sigmoid = _module("Sigmoid", F.sigmoid)
Softplus = _module("Softplus", F.softplus, "beta", "threshold")
Softshrink = _module("Softshrink", F.softshrink, "lambd")
Softsign = _module("Softsign", F.softsign)
SwiGLU = _module("SwiGLU", F.swiglu)
Tanh = _module("Tanh", F.tanh)
Tanhshrink = _module("Tanhshrink", F.tanhshrink)
Threshold = _module("Threshold", F.threshold, "threshold", "value", "inplace")
