"""Cumulative sums and products along an axis, as torch has them.

The backward of a cumulative sum is the sum from the other end; that of a product is an op of its own, whose own
derivative is in plain torch: second derivatives are rare.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from triplan.facade import CumprodBackwardPlan, Plan, ScanPlan
from triplan.functional._autocast import widened
from triplan.functional._forward import Linearity
from triplan.functional._ops import Op, composed
from triplan.functional._plans import run
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import axis
from triplan.functional._sharding.axes import along

__all__ = ["cumprod", "cumsum"]

Tensor = torch.Tensor
#: A tensor of more axes is viewed with three: those before the axis, itself, and those behind it.
_MAX_AXES = 8


def _run(plan: type[Plan[Any, Any]], dim: int, operands: dict[str, Tensor], **options: Any) -> None:
    like = next(iter(operands.values()))
    at = axis(dim, like.dim())
    if like.dim() == 0 or like.dim() > _MAX_AXES:
        shape = (like.shape[:at].numel(), *(like.shape[at : at + 1] or (1,)), like.shape[at + 1 :].numel())
        operands, at = {name: t.reshape(shape) for name, t in operands.items()}, 1
    run(plan, operands, scan_axis=at, **options)


def _shape(input: Tensor, dim: int, *others: Any) -> Sequence[int]:
    axis(dim, input.dim())
    return input.shape


def _sum_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, ctx.dim, ctx.reverse = inputs


def _sum_grad(ctx: Any, grad: Tensor) -> Any:
    return _cumsum(grad, ctx.dim, not ctx.reverse), None, None


_cumsum = Op(
    "cumsum",
    "Tensor input, int dim, bool reverse",
    axes=along(1),
    shape=_shape,
    fill=lambda out, x, dim, reverse: _run(ScanPlan, dim, {"x": x, "out": out}, op="cumsum", reverse=reverse),
    setup=_sum_setup,
    backward=_sum_grad,
    linearity=Linearity((0,)),
)


def _product_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    input, ctx.dim = inputs
    ctx.save_for_backward(input, output)


def _product_grad(ctx: Any, grad: Tensor) -> Any:
    return _cumprod_backward(grad, *ctx.saved_tensors, ctx.dim), None


def _backward_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    grad, input, _, ctx.dim = inputs
    ctx.save_for_backward(grad, input)


def _backward_grad(ctx: Any, g: Tensor) -> Any:
    """``output`` follows from ``input``, so that the gradient of the latter holds all."""

    def backward(grad: Tensor, input: Tensor) -> Tensor:
        _, pull = vjp(lambda x: torch.cumprod(x, ctx.dim), input)
        found: Tensor = pull(grad)[0]
        return found

    vjp: Any = torch.func.vjp  # typed as what it returns with has_aux
    _, pull = vjp(backward, *ctx.saved_tensors)
    return *pull(g), None, None


_cumprod = Op(
    "cumprod",
    "Tensor input, int dim",
    axes=along(1),
    shape=_shape,
    fill=lambda out, x, dim: _run(ScanPlan, dim, {"x": x, "out": out}, op="cumprod"),
    setup=_product_setup,
    backward=_product_grad,
)
_cumprod_backward = Op(
    "cumprod_backward",
    "Tensor grad, Tensor input, Tensor output, int dim",
    axes=along(3),
    shape=lambda grad, input, output, dim: _shape(input, dim),
    fill=lambda out, dout, x, y, dim: _run(CumprodBackwardPlan, dim, {"dout": dout, "x": x, "out": y, "dx": out}),
    setup=_backward_setup,
    backward=_backward_grad,
)


def _call(op: Op, input: Tensor, dtype: torch.dtype | None, out: Tensor | None, *args: Any) -> Tensor:
    if dtype is None:
        dtype = out.dtype if out is not None else None
    if dtype is None:
        (input,) = widened(op.name, input)
        dtype = input.dtype if input.is_floating_point() else torch.int64
    if dtype.is_complex or input.is_complex() or dtype is torch.bool:
        raise RuntimeError(f"{op.name}(): expected floats or integers, but got {input.dtype} to be computed in {dtype}")
    # Integers are computed modulo 2**64, whose low bits are right for all narrower ones.
    computed = dtype if dtype.is_floating_point else torch.int64
    input = input.to(dtype).to(computed)
    if out is not None and computed == dtype:
        return op.into(out, input, *args)
    return composed(op.name, out, (input.to(dtype),), lambda: op(input, *args).to(dtype))


@replayed
def cumsum(input: Tensor, dim: int, *, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    """``out[k] = input[0] + ... + input[k]`` along ``dim`` (torch.cumsum).

    ``input``: floats, integers or bool of any shape and strides; ``dtype``: what it is converted to first, by default
    i64 for integers, and f32 under autocast on a GPU. f16 and bf16 are accumulated in f32. Returns a contiguous tensor
    of its shape, or ``out``, which may decide ``dtype``. The order of additions follows from the row's length, element
    and strides: the same bits in every run. Differentiable, any number of times. Raises ``IndexError`` for ``dim``,
    ``RuntimeError`` for complex numbers.
    """
    return _call(_cumsum, input, dtype, out, dim, False)


@replayed
def cumprod(input: Tensor, dim: int, *, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    """``out[k] = input[0] * ... * input[k]`` along ``dim`` (torch.cumprod); else as ``cumsum``.

    The gradient divides by nothing, so that it is right at zeros too.
    """
    return _call(_cumprod, input, dtype, out, dim)
