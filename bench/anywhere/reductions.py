"""Draws of reductions over the last, the first, a middle or every axis, also of expressions, and torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import triplan as tp
from bench.anywhere.drawing import Draw, Peer, Tensors, described
from triplan.descriptors.reductions import DEVIATIONS

X, Y = tp.expr.operand("x"), tp.expr.operand("y")


def draw(op: str, d: Draw) -> tp.Descriptor:
    element, count = d.element(op), 2 if op in tp.ExpressionReductionDescriptor.ops() else 1
    rows, n = d.matrix(max(d.bytes // (count * element.itemsize), 1))
    shape = (*d.folded(rows), n)
    axes: Any = d.one_of([(len(shape) - 1,), (0,), (len(shape) // 2,), tuple(range(len(shape)))])
    if op in DEVIATIONS and all(shape[a] == 1 for a in axes):  # NaN, whatever is computed
        axes = (len(shape) - 1,)
    if count > 1:
        other = shape if d.chance(0.6) else tuple(1 if d.chance(0.5) else n for n in shape)
        root = X * Y if element == "bool" else (X - Y) * (X - Y)
        return tp.ExpressionReductionDescriptor.of(op, root, axes, x=(element, shape), y=(element, other))
    return described(op, element=element, input_shape=shape, reduce_axes=axes)


def peers(desc: Any) -> dict[str, Peer]:
    axes = desc.reduce_axes
    single = axes[0] if len(axes) == 1 else None
    dtype = desc.result.torch

    def both(function: Callable[..., Any]) -> Callable[[Tensors], Any]:
        def call(t: Tensors) -> Any:
            values, indices = function(t["x"] if single is not None else t["x"].flatten(), single or 0)
            return {"out": values, "indices": indices}

        return call

    def pair(function: Callable[..., Any]) -> Callable[[Tensors], Any]:
        return lambda t: dict(zip(("out", "second"), function(t), strict=True))

    functions: dict[str, Callable[[Tensors], Any]] = {
        "sum": lambda t: torch.sum(t["x"], axes, dtype=dtype),
        "mean": lambda t: torch.mean(t["x"], axes, dtype=dtype),
        "prod": lambda t: (
            torch.prod(t["x"], single, dtype=dtype) if single is not None else torch.prod(t["x"], dtype=dtype)
        ),
        "amax": lambda t: torch.amax(t["x"], axes),
        "amin": lambda t: torch.amin(t["x"], axes),
        "max": both(torch.max),
        "min": both(torch.min),
        "argmax": lambda t: torch.argmax(_ordered(t["x"]), single),
        "argmin": lambda t: torch.argmin(_ordered(t["x"]), single),
        "any": lambda t: torch.any(t["x"], axes),
        "all": lambda t: torch.all(t["x"], axes),
        "count_nonzero": lambda t: torch.count_nonzero(t["x"], axes),
        "var": lambda t: torch.var(t["x"], axes),
        "std": lambda t: torch.std(t["x"], axes),
        "var_mean": pair(lambda t: torch.var_mean(t["x"], axes)),
        "std_mean": pair(lambda t: torch.std_mean(t["x"], axes)),
        "aminmax": pair(
            lambda t: torch.aminmax(t["x"], dim=single) if single is not None else torch.aminmax(t["x"].flatten())
        ),
        "vector_norm": lambda t: torch.linalg.vector_norm(t["x"], desc.order, axes),
        "logsumexp": lambda t: torch.logsumexp(t["x"], axes),
    }
    classes = (tp.ReduceDescriptor, tp.ExtremumDescriptor, tp.ReducePairDescriptor)
    assert functions.keys() == {op for cls in classes for op in cls.ops()}
    call, is_expression = functions[desc.reduction], isinstance(desc, tp.ExpressionReductionDescriptor)

    def outputs(t: Tensors) -> Any:
        if is_expression:
            apart = t["x"] * t["y"] if desc.element == "bool" else t["x"] - t["y"]
            t = {"x": apart if desc.element == "bool" else apart * apart}
        found = call(t)
        return found if isinstance(found, dict) else {"out": found}

    return {"torch": outputs}


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """torch's argmax takes no bool."""
    return x.view(torch.uint8) if x.dtype is torch.bool else x
