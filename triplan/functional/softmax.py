"""softmax and log_softmax along any axis, as torch has them.

Their backwards are separate registered ops, whose own derivatives are in plain torch: second derivatives are rare.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from triplan.facade import LogSoftmaxBackwardPlan, LogSoftmaxPlan, Plan, SoftmaxBackwardPlan, SoftmaxPlan
from triplan.functional._autocast import widened
from triplan.functional._ops import Op
from triplan.functional._plans import run
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import axis
from triplan.functional._sharding.axes import along

__all__ = ["log_softmax", "softmax"]

Tensor = torch.Tensor
#: A tensor of more axes is viewed with three: those before the axis, itself, and those behind it.
_MAX_AXES = 8


def _run(plan: type[Plan[Any, Any]], dim: int, **operands: Tensor) -> None:
    out = operands["out"]
    at = axis(dim, out.dim())
    if out.dim() == 0 or out.dim() > _MAX_AXES:
        shape = (out.shape[:at].numel(), *(out.shape[at : at + 1] or (1,)), out.shape[at + 1 :].numel())
        operands, at = {name: t.reshape(shape) for name, t in operands.items()}, 1
    run(plan, operands, softmax_axis=at)


def _make(name: str, forward_plan: type[Plan[Any, Any]], backward_plan: type[Plan[Any, Any]]) -> tuple[Op, Op]:
    log = name.startswith("log_")

    def shape(input: Tensor, dim: int) -> Sequence[int]:
        if not input.is_floating_point():
            raise RuntimeError(f"{name}(): expected a floating-point tensor, but got {input.dtype}")
        axis(dim, input.dim())
        return input.shape

    def fill(out: Tensor, input: Tensor, dim: int) -> None:
        _run(forward_plan, dim, x=input, out=out)

    def setup(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, ctx.dim = inputs
        ctx.save_for_backward(output)

    def grad(ctx: Any, grad: Tensor) -> Any:
        (output,) = ctx.saved_tensors
        return backward(grad, output, ctx.dim), None

    def backward_shape(grad: Tensor, output: Tensor, dim: int) -> Sequence[int]:
        axis(dim, output.dim())
        if grad.shape != output.shape or grad.dtype != output.dtype or grad.device != output.device:
            raise RuntimeError(f"{name}_backward(): grad and output differ in shape, dtype or device")
        return output.shape

    def backward_fill(out: Tensor, grad: Tensor, output: Tensor, dim: int) -> None:
        # The plan's names: ``out`` is the forward's result, ``dx`` is written.
        _run(backward_plan, dim, dout=grad, out=output, dx=out)

    def backward_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
        grad, result, ctx.dim = inputs
        ctx.save_for_backward(grad, result)

    def backward_grad(ctx: Any, g: Tensor) -> Any:
        dy, y = ctx.saved_tensors
        if log:
            e = y.exp()
            return g - (g * e).sum(ctx.dim, keepdim=True), -g * e * dy.sum(ctx.dim, keepdim=True), None
        to_dy = y * (g - (g * y).sum(ctx.dim, keepdim=True))
        to_y = g * (dy - (dy * y).sum(ctx.dim, keepdim=True)) - dy * (g * y).sum(ctx.dim, keepdim=True)
        return to_dy, to_y, None

    op = Op(name, "Tensor input, int dim", axes=along(1), shape=shape, fill=fill, setup=setup, backward=grad)
    backward = Op(
        f"{name}_backward",
        "Tensor grad, Tensor output, int dim",
        axes=along(2),
        shape=backward_shape,
        fill=backward_fill,
        setup=backward_setup,
        backward=backward_grad,
    )
    return op, backward


_softmax, _softmax_backward = _make("softmax", SoftmaxPlan, SoftmaxBackwardPlan)
_log_softmax, _log_softmax_backward = _make("log_softmax", LogSoftmaxPlan, LogSoftmaxBackwardPlan)


def _call(
    op: Op, input: Tensor, dim: int | None, dtype: torch.dtype | None, axis: int | None, out: Tensor | None
) -> Tensor:
    dim = axis if dim is None else dim
    if dim is None:
        raise TypeError(
            f"{op.name}(): dim is None: the axis must be given (torch.nn.functional guesses one, deprecated)"
        )
    input = input if dtype is None else input.to(dtype)
    if out is not None:
        return op.into(out, input, dim)
    return op(widened(op.name, input)[0] if dtype is None else input, dim)


@replayed
def softmax(
    input: Tensor,
    dim: int | None = None,
    dtype: torch.dtype | None = None,
    *,
    axis: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``exp(input) / sum(exp(input))`` along ``dim`` or ``axis`` (torch.softmax), safe from overflow.

    ``input``: f16, bf16, f32 or f64, of any shape and strides; ``dtype``: what it is converted to first, f32 under
    autocast on a GPU. Returns a contiguous tensor of its shape, or ``out``. Differentiable, any number of times. Raises
    ``IndexError`` for ``dim``, ``RuntimeError`` for other dtypes.
    """
    return _call(_softmax, input, dim, dtype, axis, out)


@replayed
def log_softmax(
    input: Tensor,
    dim: int | None = None,
    dtype: torch.dtype | None = None,
    *,
    axis: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The logarithm of ``softmax`` along ``dim`` (torch.log_softmax), without its underflow; else as ``softmax``."""
    return _call(_log_softmax, input, dim, dtype, axis, out)
