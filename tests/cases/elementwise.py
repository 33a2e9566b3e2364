"""Elementwise ops: their problems by op and element, and torch's way to compute each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

import triplan as tp
from triplan.descriptors.elementwise.problems import NAMED, Named

ELEMENTS = ("f16", "bf16", "f32", "f64", "i8", "u8", "i16", "i32", "i64", "bool")
CLASSES = {1: tp.UnaryDescriptor, 2: tp.BinaryDescriptor, 3: tp.TernaryDescriptor}
INF, NAN = float("inf"), float("nan")
#: torch's function, where it has another name or other arguments.
TORCH: dict[str, Callable[..., Tensor]] = {
    "truncate_divide": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "normal_cdf": torch.special.ndtr,
    "log1pexp": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "relu_squared": lambda x: torch.relu(x).square(),
    "nan_to_num": lambda x: torch.nan_to_num(x, 0.0, INF, -INF),
    "round_decimals": lambda x: torch.round(x, decimals=0),
    "logit_clamped": lambda x: torch.logit(x, eps=1e-6),
    "gelu": lambda x: x * torch.erfc(x * -(0.5**0.5)) / 2,  # torch.nn.functional's is NaN at inf on CPUs
    "gelu_tanh": lambda x: nnf.gelu(x, approximate="tanh"),
    "softcap_tanh": lambda x: 30 * torch.tanh(x / 30),
    "threshold": lambda x: nnf.threshold(x, 0.0, 0.0),
    "add_scaled": lambda x, y: x + y * 1,
    "sub_scaled": lambda x, y: x - y * 1,
    "prelu": lambda x, y: torch.where(x > 0, x, x * y),
    "glu": lambda x, y: x * torch.sigmoid(y),
    "swiglu": lambda x, y: nnf.silu(x) * y,
    "geglu": lambda x, y: x * torch.erfc(x * -(0.5**0.5)) / 2 * y,
    "reglu": lambda x, y: nnf.relu(x) * y,
    "isinf": torch.isinf,
}
#: Values at which functions are singular, kinked or undefined.
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 3.0, -3.0, 6.0, 2.5, -2.5, 0.1, 25.0, -25.0, NAN, 1e-300, 1e300, INF, -INF)
#: Of those, the ones of which products of several neither overflow nor cancel.
TAME = 15


def torchs(op: str) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = TORCH.get(op) or getattr(torch, op, None) or getattr(nnf, op)
    return found


def problem(op: str, element: str, shape: tuple[int, ...] = (7, 9), **fields: Any) -> Any:
    """The problem of ``op`` whose operands are of ``element``. Raises ``InvalidProblem`` if it takes none such."""
    cls: Any = CLASSES[NAMED[op].operands]
    if op == "where":
        return cls(op=op, element="bool", y_element=element, z_element=element, input_shape=shape, **fields)
    return cls(op=op, element=element, input_shape=shape, **fields)


def expression(op: str) -> tuple[tp.expr.Expr, tuple[str, ...]]:
    """The expression of ``op`` with its parameters' defaults, and the names of its operands."""
    named: Named = NAMED[op]
    names = ("x", "y", "z")[: named.operands]
    return named.build(*map(tp.expr.operand, names)), names
