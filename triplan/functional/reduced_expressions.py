"""Reductions of expressions: their values are reduced where they are computed, and never written.

``triplan::reduced_expression_{N}`` takes N tensors and a formula, as ``triplan::expression_{N}_1`` does, and how its
values are reduced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from triplan.descriptors.expressions.expression import Expr, operand
from triplan.descriptors.reductions import EXTREMA
from triplan.functional._ops import Recorded
from triplan.functional._plans import run_reduced_expression
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import broadcast, check_same_device
from triplan.functional._sharding.axes import reduced
from triplan.functional.elementwise import engine
from triplan.functional.elementwise.expressions import resolved
from triplan.functional.elementwise.table import operands_of
from triplan.functional.reductions.engine import axes_of, dims, fewer_axes, kept_of
from triplan.functional.reductions.gradients import expanded
from triplan.sku.facts import fact

__all__ = ["reduce_expression"]

Tensor = torch.Tensor
Axes = int | Sequence[int] | None
OPS = ("sum", "mean", "amax", "amin")
#: Operands of an expression have this many axes at most.
_MAX_AXES = 8


# --- the registered ops ---


def _compute(n: int, run_it: bool, *args: Any) -> Tensor:
    tensors, (text, numbers, op, dims, keepdim, dtype) = args[:n], args[n:]
    check_same_device("reduce_expression", *tensors)
    shape = broadcast(*(t.shape for t in tensors))
    axes = axes_of(len(shape), dims)
    if op in EXTREMA and 0 in [shape[a] for a in axes] and 0 not in kept_of(shape, axes):
        raise IndexError(f"{op}(): Expected reduction dim {list(dims)} to have non-zero size.")
    (values,) = engine.dtypes(text, tensors, numbers)
    floats = values.is_floating_point
    if op == "mean" and not floats:
        raise RuntimeError(
            f"mean(): could not infer output dtype. Input dtype must be a floating point dtype. Got: {values}"
        )
    if dtype is not None and not (floats and dtype.is_floating_point and op in ("sum", "mean")):
        raise RuntimeError(f"reduce_expression(): {op} of {values} has no result of {dtype}")
    result = torch.int64 if op == "sum" and not floats else values
    kept = [1 if a in axes else size for a, size in enumerate(shape)] if keepdim else kept_of(shape, axes)
    out: Tensor = tensors[0].new_empty(kept, dtype=dtype or result)
    if run_it:
        _fill(out, text, tensors, numbers, op, shape, axes)
    return out


def _fill(
    out: Tensor, text: str, tensors: Sequence[Tensor], numbers: Any, op: str, shape: torch.Size, axes: list[int]
) -> None:
    of = engine.formula(text)
    if len(shape) > _MAX_AXES:
        fewer = [fewer_axes(t.expand(shape), axes) for t in tensors]
        tensors, axes = [t for t, _ in fewer], fewer[0][1]
        shape = tensors[0].shape
    operands = {**dict(zip(of.tensors, tensors, strict=True)), "out": out.view(kept_of(shape, axes))}
    scalars = dict(zip(of.numbers, numbers, strict=True))
    run_reduced_expression(op, operands, axes, of.results[0][1], scalars)


def _setup(n: int, ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:n])
    ctx.text, ctx.numbers, ctx.op, dims, keepdim, _ = inputs[n:]
    ctx.shape = broadcast(*(t.shape for t in inputs[:n]))
    ctx.axes = axes_of(len(ctx.shape), dims)
    ctx.gone = [] if keepdim else ctx.axes
    if not output.is_floating_point():
        ctx.mark_non_differentiable(output)


def _backward(n: int, ctx: Any, grad: Tensor) -> Any:
    saved, text, numbers = ctx.saved_tensors, ctx.text, ctx.numbers
    grad = expanded(grad, ctx.gone)
    if ctx.op == "mean":
        text, numbers = _over_count(text), [*numbers, math.prod([ctx.shape[a] for a in ctx.axes])]
    elif ctx.op in ("amax", "amin") and ctx.axes and 0 not in ctx.shape:
        # Equal values share it, as they do in torch; they are equal after they are rounded to their dtype.
        values = engine.op(n, 1)(*saved, text, numbers)
        chosen = values == getattr(values, ctx.op)(ctx.axes, keepdim=True)
        grad = grad * chosen / chosen.sum(ctx.axes, keepdim=True)
    wanted = [i for i in range(n) if ctx.needs_input_grad[i]]
    likes = [(t.shape, t.dtype) for t in saved]
    found = engine.pulled_back(text, saved, likes, numbers, [grad.expand(ctx.shape)], wanted)
    return (*found, None, None, None, None, None, None)


@fact
def _over_count(text: str) -> str:
    """The formula divided by one more number, the last."""
    of = engine.formula(text)
    name = "count"
    while name in (*of.tensors, *of.numbers):
        name += "_"
    ((result, root, _),) = of.results
    return engine.Formula(of.tensors, (*of.numbers, name), ((result, root / operand(name), None),)).text


#: Those that compiled code finds; others are registered when they are first called.
_OPS: dict[int, Recorded] = {}


def _op(n: int) -> Recorded:
    """The op of ``n`` tensors."""
    return _OPS[n] if n in _OPS else _register(n)


def _axes(*args: Any) -> str:
    *tensors, _, _, op, dims, keepdim, _ = args
    axes, kept, sums = reduced(op, tensors, dims, keepdim)
    return f"{', '.join([axes] * len(tensors))} -> {kept}+{sums}"


def _register(n: int) -> Recorded:
    tensors = ", ".join(f"Tensor t{i}" for i in range(n))
    made = Recorded(
        f"reduced_expression_{n}",
        f"({tensors}, str formula, Scalar[] numbers, str op, int[] dims, bool keepdim, ScalarType? dtype) -> Tensor",
        partial(_compute, n, True),
        partial(_compute, n, False),
        axes=_axes,
        setup=partial(_setup, n),
        backward=partial(_backward, n),
    )
    return _OPS.setdefault(n, made)


for _n in range(1, 9):
    _register(_n)


# --- the call ---


@replayed
def _reduce(
    op: str, tree: Any, names: tuple[str, ...], operands: list[Any], dim: Axes, keepdim: bool, dtype: torch.dtype | None
) -> Tensor:
    kinds, tensors, numbers = operands_of("reduce_expression", operands)
    text, count, _ = resolved(tree, names, kinds)
    if op not in OPS or count > 1:
        raise ValueError(
            f"reduce_expression(): {op!r} of {count} expressions; expected one of {', '.join(OPS)}, of one"
        )
    shape = broadcast(*(t.shape for t in tensors))
    found: Tensor = _op(len(tensors))(*tensors, text, numbers, op, dims(op, len(shape), dim), keepdim, dtype)
    return found


def reduce_expression(
    op: str,
    tree: Expr | Callable[..., Expr],
    *operands: Any,
    dim: Axes = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    **named: Any,
) -> Tensor:
    """The "sum", "mean", "amax" or "amin" (``op``) of an expression over ``dim``, without its values in memory.

    ``tree`` and its operands are those of ``expression``; operands cannot be called op, tree, dim, keepdim or dtype.
    ``dim``: axes of the shape to which they broadcast, None for all. ``reduce_expression("sum", lambda x, y: (x - y) *
    (x - y), x, y, dim=1)`` reads x and y once. f16 and bf16 are computed and accumulated in f32, always in the same
    order; only the result is rounded, to ``dtype`` (of sums and means of floats), by default that of the values, or i64
    for sums of integers and bool. Differentiable, any number of times: the gradients of sums and means are one launch,
    which computes the values again. Of extrema, equal values share the gradient. Raises as ``expression`` and ``sum``,
    ``ValueError`` for another ``op``.
    """
    names = (*(f"x{i}" for i in range(len(operands))), *named)
    return _reduce(op, tree, names, [*operands, *named.values()], dim, keepdim, dtype)


# So that it is forgotten with the others' replays.
reduce_expression.replays = _reduce.replays  # type: ignore[attr-defined]
