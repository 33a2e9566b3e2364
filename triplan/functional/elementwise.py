"""Elementwise ops on torch tensors. A new one is a line of ``SECOND``, a registration and a documented function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from triplan.facade import UnaryBackwardPlan, UnaryPlan
from triplan.functional._ops import Op
from triplan.functional._plans import run
from triplan.functional._replay.replay import replayed

__all__ = ["relu_squared"]

Tensor = torch.Tensor
#: f''(x) of each op, in torch, for second derivatives.
SECOND: dict[str, Callable[[Tensor], Tensor]] = {
    "relu_squared": lambda x: 2 * (x > 0).to(x.dtype),
}


def _unary(name: str) -> Op:
    """``triplan::name`` and ``triplan::name_backward``, which recomputes from the input."""
    second = SECOND[name]

    def shape(input: Tensor) -> Sequence[int]:
        if not input.is_floating_point():
            raise RuntimeError(f"{name}(): expected a floating-point tensor, but got {input.dtype}")
        return input.shape

    def fill(out: Tensor, input: Tensor) -> None:
        run(UnaryPlan, {"x": input, "out": out}, op=name)

    def setup(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def grad(ctx: Any, g: Tensor) -> Any:
        return (backward(g, *ctx.saved_tensors),)

    def backward_shape(grad: Tensor, input: Tensor) -> Sequence[int]:
        if grad.shape != input.shape or grad.dtype != input.dtype or grad.device != input.device:
            raise RuntimeError(f"{name}_backward(): grad and input differ in shape, dtype or device")
        return input.shape

    def backward_fill(out: Tensor, grad: Tensor, input: Tensor) -> None:
        run(UnaryBackwardPlan, {"dout": grad, "x": input, "dx": out}, op=f"{name}_backward")

    def backward_grad(ctx: Any, g: Tensor) -> Any:
        dout, x = ctx.saved_tensors
        return backward(g, x), g * dout * second(x)

    op = Op(name, "Tensor input", shape=shape, fill=fill, setup=setup, backward=grad)
    backward = Op(
        f"{name}_backward",
        "Tensor grad, Tensor input",
        shape=backward_shape,
        fill=backward_fill,
        setup=setup,
        backward=backward_grad,
    )
    return op


_relu_squared = _unary("relu_squared")


@replayed
def relu_squared(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``max(input, 0)**2``, element by element (``torch.relu(input).square()`` in one launch).

    ``input``: f16, bf16, f32 or f64, of any shape and strides. Returns a contiguous tensor of its shape, or ``out``.
    Differentiable, any number of times; NaN stays NaN. Raises ``RuntimeError`` for other dtypes.
    """
    return _relu_squared.into(out, input)
