"""Activations and gates as modules: those of torch.nn, whose forward is ours."""

from __future__ import annotations

from triplan import functional as F  # noqa: N812
from triplan.nn._modules import module

# fmt: off
__all__ = [
    "CELU", "ELU", "GELU", "GLU", "SELU", "GeGLU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU",
    "LogSigmoid", "Mish", "PReLU", "ReGLU", "ReLU", "ReLU6", "ReLUSquared", "SiLU", "Sigmoid", "Softplus", "Softshrink",
    "Softsign", "SwiGLU", "Tanh", "Tanhshrink", "Threshold",
]
# fmt: on


CELU = module("CELU", F.celu, "alpha", "inplace")
ELU = module("ELU", F.elu, "alpha", "inplace")
GELU = module("GELU", F.gelu, "approximate")
GLU = module("GLU", F.glu, "dim")
GeGLU = module("GeGLU", F.geglu)
Hardshrink = module("Hardshrink", F.hardshrink, "lambd")
Hardsigmoid = module("Hardsigmoid", F.hardsigmoid, "inplace")
Hardswish = module("Hardswish", F.hardswish, "inplace")
Hardtanh = module("Hardtanh", F.hardtanh, "min_val", "max_val", "inplace")
LeakyReLU = module("LeakyReLU", F.leaky_relu, "negative_slope", "inplace")
LogSigmoid = module("LogSigmoid", F.logsigmoid)
Mish = module("Mish", F.mish, "inplace")
PReLU = module("PReLU", F.prelu, "weight")
ReGLU = module("ReGLU", F.reglu)
ReLU = module("ReLU", F.relu, "inplace")
ReLU6 = module("ReLU6", F.relu6, "inplace")
ReLUSquared = module("ReLUSquared", F.relu_squared)
SELU = module("SELU", F.selu, "inplace")
SiLU = module("SiLU", F.silu, "inplace")
Sigmoid = module("Sigmoid", F.sigmoid)
Softplus = module("Softplus", F.softplus, "beta", "threshold")
Softshrink = module("Softshrink", F.softshrink, "lambd")
Softsign = module("Softsign", F.softsign)
SwiGLU = module("SwiGLU", F.swiglu)
Tanh = module("Tanh", F.tanh)
Tanhshrink = module("Tanhshrink", F.tanhshrink)
Threshold = module("Threshold", F.threshold, "threshold", "value", "inplace")
