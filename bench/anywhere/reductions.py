"""Draws of reductions over the last, the first, a middle or every axis, and torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import triplan as tp
from bench.anywhere.drawing import Draw, Peer, Tensors, described


def draw(op: str, d: Draw) -> tp.Descriptor:
    element = d.element(op)
    rows, n = d.matrix(max(d.bytes // element.itemsize, 1))
    shape = (*d.folded(rows), n)
    axes: Any = d.one_of([(len(shape) - 1,), (0,), (len(shape) // 2,), tuple(range(len(shape)))])
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
        "argmax": lambda t: torch.argmax(t["x"], single),
        "argmin": lambda t: torch.argmin(t["x"], single),
        "any": lambda t: torch.any(t["x"], axes),
        "all": lambda t: torch.all(t["x"], axes),
        "count_nonzero": lambda t: torch.count_nonzero(t["x"], axes),
        "var": lambda t: torch.var(t["x"], axes),
        "std": lambda t: torch.std(t["x"], axes),
        "vector_norm": lambda t: torch.linalg.vector_norm(t["x"], desc.order, axes),
        "logsumexp": lambda t: torch.logsumexp(t["x"], axes),
    }
    assert functions.keys() == {*tp.ReduceDescriptor.ops(), *tp.ExtremumDescriptor.ops()}
    call = functions[desc.op]

    def outputs(t: Tensors) -> Any:
        found = call(t)
        return found if isinstance(found, dict) else {"out": found}

    return {"torch": outputs}
