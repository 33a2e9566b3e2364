"""Draws of named elementwise ops, their gradients, and expressions. torch computes them by the functions of ``TORCH``.

An op whose name torch has, with the same arguments, needs no line. One that torch lacks is composed of torch's. Where
torch's function takes the tensor that it writes, it gets ours.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import triplan as tp
from bench.anywhere.drawing import Draw, Peer, Tensors, described, placed
from triplan.descriptors.elementwise.expr import gelu, operand, rsqrt, sigmoid, silu, tanh, where
from triplan.descriptors.elementwise.problems import NAMED
from triplan.descriptors.expressions.expression import FUNCTIONS, number_of

aten = torch.ops.aten
#: Functions that are operators, which take numbers too.
OPERATORS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "pow")},
    **{f"bitwise_{name}": getattr(operator, f"{name}_") for name in ("and", "or")},
    "bitwise_left_shift": operator.lshift,
    "bitwise_right_shift": operator.rshift,
    "bitwise_xor": operator.xor,
    "div": operator.truediv,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "add_scaled": operator.add,
    "sub_scaled": operator.sub,
}
#: Activations of which torch.nn.functional takes no tensor to write, but the operator that it calls does.
ACTIVATIONS = ("celu", "elu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "mish", "relu", "silu")
#: torch's function, where it has another name or other arguments.
TORCH: dict[str, Callable[..., Any]] = {
    **OPERATORS,
    **{name: getattr(aten, name) for name in ACTIVATIONS},
    "geglu": lambda x, y: functional.gelu(x) * y,
    "gelu_tanh": lambda x, **to: aten.gelu(x, approximate="tanh", **to),
    "glu": lambda x, y: x * torch.sigmoid(y),
    "log1pexp": functional.softplus,
    "nan_to_num": lambda x: torch.nan_to_num(x, 0.0, math.inf, -math.inf),
    "normal_cdf": torch.special.ndtr,
    "prelu": lambda x, y: torch.where(x > 0, x, x * y),
    "reglu": lambda x, y: torch.relu(x) * y,
    "relu_squared": lambda x: torch.relu(x).square(),
    "round_decimals": torch.round,
    "softcap_tanh": lambda x: 30.0 * torch.tanh(x / 30.0),
    "sech2": lambda x: 1 - torch.tanh(x).square(),
    "swiglu": lambda x, y: functional.silu(x) * y,
    "tanh_log1pexp": lambda x: torch.tanh(functional.softplus(x)),
    "threshold": lambda x, **to: aten.threshold(x, 0.0, 0.0, **to),
    "truncate_divide": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
}
#: torch's kernels for gradients. Without one, autograd multiplies and adds as ``evaluated`` does.
BACKWARD: dict[str, Callable[..., Any]] = {
    "celu": lambda g, x, **to: aten.elu_backward(g, 1.0, 1.0, 1.0, False, x, **to),
    "elu": lambda g, x, **to: aten.elu_backward(g, 1.0, 1.0, 1.0, False, x, **to),
    "gelu": aten.gelu_backward,
    "gelu_tanh": lambda g, x, **to: aten.gelu_backward(g, x, approximate="tanh", **to),
    "hardshrink": lambda g, x, **to: aten.hardshrink_backward(g, x, 0.5, **to),
    "hardsigmoid": aten.hardsigmoid_backward,
    "hardswish": lambda g, x: aten.hardswish_backward(g, x),
    "hardtanh": lambda g, x, **to: aten.hardtanh_backward(g, x, -1.0, 1.0, **to),
    "leaky_relu": lambda g, x, **to: aten.leaky_relu_backward(g, x, 0.01, False, **to),
    "logit": lambda g, x, **to: aten.logit_backward(g, x, None, **to),
    "mish": lambda g, x: aten.mish_backward(g, x),
    "relu": lambda g, x, **to: aten.threshold_backward(g, x, 0, **to),
    "relu6": lambda g, x, **to: aten.hardtanh_backward(g, x, 0.0, 6.0, **to),
    "silu": aten.silu_backward,
    "softplus": lambda g, x, **to: aten.softplus_backward(g, x, 1.0, 20.0, **to),
    "softshrink": lambda g, x, **to: aten.softshrink_backward(g, x, 0.5, **to),
}
#: Expressions, over as many of six operands as they have arguments.
EXPRESSIONS: tuple[Callable[..., Any], ...] = (
    lambda a, b, c: silu(a) * b + c,
    lambda a, b: gelu(a + b),
    lambda a, b, c: where(a > b, a, b) * c,
    lambda a, b, c, d: (a - b) * rsqrt(c * c + 1e-5) * d,
    lambda a, b, c, d, e, f: tanh(a * b + c) * sigmoid(d) + gelu(e) * silu(f - a) - b,
)


def draw(op: str, d: Draw) -> tp.Descriptor:
    while True:
        element = d.element(op)
        if not (element.is_floating_point or op in FUNCTIONS or op == "expression"):
            continue  # torch's activations take floats
        numel = d.bytes // max(element.itemsize * 3, 4)
        rows, n = d.matrix(max(numel, 1))
        shape = (*d.folded(rows), n)
        try:
            if op == "expression":
                return _expression(d, element, shape)
            return described(op, input_shape=shape, **_fields(op, d, element, shape))
        except tp.InvalidProblem:
            continue  # the function does not take this element


def _broadcast(d: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """``shape``, or at times with extents of 1: a row vector, a column, or between."""
    return shape if d.chance(0.6) else tuple(1 if d.chance(0.5) else n for n in shape)


def _fields(op: str, d: Draw, element: tp.ElementKind, shape: tuple[int, ...]) -> dict[str, Any]:
    others = "" if op.endswith("_backward") else "yz"[: NAMED[op].operands - 1]
    fields: dict[str, Any] = {"element": element}
    if op == "where":
        fields = {"element": "bool", "y_element": element, "z_element": element}
    if others == "y" and op in OPERATORS and d.chance(0.15):
        return {**fields, "numbers": ("y",)}
    return {**fields, **{f"{name}_shape": _broadcast(d, shape) for name in others}}


def _expression(d: Draw, element: tp.ElementKind, shape: tuple[int, ...]) -> tp.Descriptor:
    build = d.one_of(EXPRESSIONS)
    names = "abcdef"[: build.__code__.co_argcount]
    shapes = {name: (element, shape if name == "a" else _broadcast(d, shape)) for name in names}
    return tp.ExpressionDescriptor.of(build(*map(operand, names)), **shapes)


def complete(desc: Any, t: Tensors) -> None:
    """What torch's backward reads of the forward op, in memory of its own."""
    if desc.op in ("sigmoid_backward", "tanh_backward"):
        t["saved"] = getattr(torch, desc.op.removesuffix("_backward"))(t["x"])


def peers(desc: Any) -> dict[str, Peer]:
    name = desc.op.removesuffix("_backward")
    if desc.op in ("sigmoid_backward", "tanh_backward"):
        saved = aten.sigmoid_backward if name == "sigmoid" else aten.tanh_backward
        return {"torch": lambda t: {"dx": saved(t["dout"], t["saved"], grad_input=t["dx"])}}
    if desc.op.endswith("_backward") and name in BACKWARD:
        into = written(BACKWARD[name], "grad_input")
        return {"torch": placed(lambda t: {"dx": into(t["dx"], t["dout"], t["x"])})}
    if torch_of(desc.op) is None:  # a gradient, an expression
        return {"torch": placed(lambda t: evaluated(desc, t))}
    names = ("x", "y", "z")[: NAMED[desc.op].operands]
    native: Any = getattr(torch, desc.op, None) if desc.op in OPERATORS else None
    function: Any = native or torch_of(desc.op)
    into = written(function, "out")
    return {"torch": placed(lambda t: {"out": into(t["out"], *(t[name] for name in names))})}


def written(function: Callable[..., Any], keyword: str) -> Callable[..., Any]:
    """``function`` of the other arguments, which writes into the first one if it takes ``keyword``."""
    takes = True

    def call(out: Any, *args: Any) -> Any:
        nonlocal takes
        try:
            return function(*args, **({keyword: out} if takes else {}))
        except TypeError:
            if not takes:
                raise
            takes = False  # it allocates its result
            return function(*args)

    return call


def torch_of(name: str) -> Callable[..., Any] | None:
    """torch's function of this name."""
    return TORCH.get(name) or getattr(torch, name, None) or getattr(functional, name, None)


def evaluated(desc: Any, t: Tensors) -> Tensors:
    """The tree, function by function, as autograd and eager code do."""
    defaults = {i.name: i.default for i in desc.inputs_read()}
    values: list[Any] = []
    for name, *args in desc.tree.nodes:
        if name == "operand":
            values.append(defaults[args[0]] if t[args[0]] is None else t[args[0]])
        elif name == "number":
            values.append(number_of(args[0]))
        else:
            function: Any = torch_of(name)
            values.append(function(*(values[a] for a in args)))
    outputs = [o for o in desc.operands() if o.is_written]
    found = {}
    for o, (at, _) in zip(outputs, desc.tree.results, strict=True):
        value = torch.as_tensor(values[at]).to(o.element.torch).expand(o.shape)
        found[o.name] = value.clone() if desc.tree.nodes[at][0] == "operand" else value  # else nothing would be written
    return found
