"""Pooling as torch has it: the largest elements and averages of windows, along two axes, and along one of a row.

Averages are linear, so the gradient of a gradient is the average again. The gradient of the largest elements is linear
in the gradient it is given; its own is torch's gather, for second derivatives are rare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from triplan.errors import Unsupported, shown
from triplan.facade import (
    AdaptiveAvgPool2dBackwardPlan,
    AdaptiveAvgPool2dPlan,
    AvgPool2dBackwardPlan,
    AvgPool2dPlan,
    MaxPool2dBackwardPlan,
    MaxPool2dPlan,
    Plan,
)
from triplan.functional._forward import Linearity
from triplan.functional._ops import Recorded, composed
from triplan.functional._plans import run
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import empty_in_order, for_each_axis, require

__all__ = [
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "avg_pool1d",
    "avg_pool2d",
    "max_pool1d",
    "max_pool2d",
]

Tensor = torch.Tensor
Ints = Sequence[int]
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _extents(size: Ints, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil_mode: bool) -> list[Any]:
    """(height, width) of the result, as torch counts windows."""
    found = []
    for n, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True):
        m = (n + 2 * p - d * (k - 1) - 1 + (s - 1 if ceil_mode else 0)) // s + 1
        found.append(m - 1 if ceil_mode and (m - 1) * s >= n + p else m)
        require(found[-1] >= 1, partial("pooling: no window of {} fits into an input of {}".format, kernel, size))
    return found


def _options(how: Sequence[Any], *names: str) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, (list, tuple)) else v for name, v in zip(names, how, strict=True)}


# --- the largest elements ---

_MAX = ("kernel", "stride", "padding", "dilation", "ceil_mode")
_HOW = "SymInt[] kernel, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool ceil_mode"


def _max_fake(input: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    out = empty_in_order((*input.shape[:2], *_extents(input.shape[2:], *how)), input)
    return out, torch.empty_like(out, dtype=torch.int64)


def _max_kernel(input: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    out, indices = _max_fake(input, *how)
    run(MaxPool2dPlan, {"x": input, "out": out, "indices": indices}, **_options(how, *_MAX))
    return out, indices


def _max_setup(ctx: Any, inputs: Any, output: Any) -> None:
    input, *ctx.how = inputs
    ctx.size = input.shape[2:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _max_grad(ctx: Any, grad: Tensor, _: Any) -> Any:
    return _max_backward(grad, *ctx.saved_tensors, ctx.size, *ctx.how), *(None,) * 5


_max_pool = Recorded(
    "max_pool2d", f"(Tensor input, {_HOW}) -> (Tensor, Tensor)", _max_kernel, _max_fake,
    axes="nc.. -> nc.., nc..", setup=_max_setup, backward=_max_grad,
)  # fmt: skip


def _of_size(dout: Tensor, size: Ints) -> Tensor:
    return empty_in_order((*dout.shape[:2], *size), dout)


def _max_backward_kernel(dout: Tensor, indices: Tensor, size: Ints, *how: Any) -> Tensor:
    dx = _of_size(dout, size)
    run(MaxPool2dBackwardPlan, {"dout": dout, "indices": indices, "dx": dx}, **_options(how, *_MAX))
    return dx


def _indices_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _chosen(ctx: Any, grad: Tensor) -> Any:
    (indices,) = ctx.saved_tensors
    planes = indices.shape[:2]
    at = indices.clamp(min=0).reshape(*planes, indices.size(2) * indices.size(3))
    found = grad.reshape(*planes, grad.size(2) * grad.size(3)).gather(2, at).reshape(indices.shape)
    return torch.where(indices < 0, 0, found), *(None,) * 7


_max_backward = Recorded(
    "max_pool2d_backward",
    f"(Tensor dout, Tensor indices, SymInt[] size, {_HOW}) -> Tensor",
    _max_backward_kernel,
    lambda dout, indices, size, *how: _of_size(dout, size),
    axes="nc.., nc.. -> nc..",
    setup=_indices_setup,
    backward=_chosen,
    linearity=Linearity((0,)),
)

# --- averages ---


def linear_op(
    name: str,
    parameters: str,
    fields: tuple[str, ...],
    plans: tuple[type[Plan[Any, Any]], type[Plan[Any, Any]]],
    shape: Callable[..., Ints],
) -> Recorded:
    """An op that averages, and its gradient, each the derivative of the other."""

    def fake(input: Tensor, *how: Any) -> Tensor:
        return empty_in_order((*input.shape[:2], *shape(input, *how)), input)

    def compute(input: Tensor, *how: Any) -> Tensor:
        out = fake(input, *how)
        run(plans[0], {"x": input, "out": out}, **_options(how, *fields))
        return out

    def compute_backward(dout: Tensor, size: Ints, *how: Any) -> Tensor:
        dx = _of_size(dout, size)
        run(plans[1], {"dout": dout, "dx": dx}, **_options(how, *fields))
        return dx

    def setup(ctx: Any, inputs: Any, output: Tensor) -> None:
        input, *ctx.how = inputs
        ctx.size = input.shape[2:]

    def backward_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, _, *ctx.how = inputs

    def grad(ctx: Any, g: Tensor) -> Any:
        return back(g, ctx.size, *ctx.how), *(None,) * len(fields)

    def backward_grad(ctx: Any, g: Tensor) -> Any:
        return op(g, *ctx.how), *(None,) * (1 + len(fields))

    linear: dict[str, Any] = {"axes": "nc.. -> nc..", "linearity": Linearity((0,))}
    op = Recorded(name, f"(Tensor input, {parameters}) -> Tensor", compute, fake, setup=setup, backward=grad, **linear)
    back = Recorded(
        f"{name}_backward",
        f"(Tensor dout, SymInt[] size, {parameters}) -> Tensor",
        compute_backward,
        lambda dout, size, *how: _of_size(dout, size),
        setup=backward_setup,
        backward=backward_grad,
        **linear,
    )
    return op


_avg_pool = linear_op(
    "avg_pool2d",
    "SymInt[] kernel, SymInt[] stride, SymInt[] padding, bool ceil_mode, bool count_include_pad, SymInt divisor",
    ("kernel", "stride", "padding", "ceil_mode", "count_include_pad", "divisor"),
    (AvgPool2dPlan, AvgPool2dBackwardPlan),
    lambda input, kernel, stride, padding, ceil_mode, *_: _extents(
        input.shape[2:], kernel, stride, padding, (1, 1), ceil_mode
    ),
)
_adaptive = linear_op(
    "adaptive_avg_pool2d",
    "SymInt[] out_size",
    ("out_size",),
    (AdaptiveAvgPool2dPlan, AdaptiveAvgPool2dBackwardPlan),
    lambda input, out_size: out_size,
)

# --- calls ---


def _images(name: str, axes: int, input: Tensor) -> Tensor:
    """``input`` with a batch and two axes of pixels. Raises ``RuntimeError``, and ``Unsupported`` for its dtype."""
    if input.dim() not in (axes + 1, axes + 2) or 0 in input.shape[-axes - 1 :]:
        raise RuntimeError(
            f"{name}(): Expected {axes + 1}D or {axes + 2}D (batch mode) tensor with optional 0 dim batch size for "
            f"input, but got: {list(input.shape)}"
        )
    if input.dtype not in _DTYPES:
        raise Unsupported(f"{name}(): {input.dtype} is not supported, only f16, bf16, f32 and f64")
    input = input if input.dim() == axes + 2 else input.unsqueeze(0)
    return input if axes == 2 else input.unsqueeze(2)


def _result(out: Tensor, axes: int, input: Tensor) -> Tensor:
    out = out if axes == 2 else out.squeeze(2)
    return out if input.dim() == axes + 2 else out.squeeze(0)


def _windows(
    name: str, axes: int, kernel: int | Ints, stride: int | Ints | None, padding: int | Ints, dilation: int | Ints
) -> tuple[tuple[int, ...], ...]:
    """kernel, stride, padding and dilation of two axes. Raises ``RuntimeError``."""
    if stride is None or (isinstance(stride, (list, tuple)) and not stride):
        stride = kernel
    given = {"kernel_size": kernel, "stride": stride}
    given |= {"padding": padding, "dilation": dilation}
    found = {what: for_each_axis(name, what, value, axes) for what, value in given.items()}
    for what, each in found.items():
        least = 0 if what == "padding" else 1
        for n in each:
            require(n >= least, partial("{}(): {} {} is below {}".format, name, what, each, least))
    for k, p, d in zip(*(found[what] for what in ("kernel_size", "padding", "dilation")), strict=True):
        reach = (k - 1) * d + 1
        require(
            2 * p <= reach,
            partial("{}(): pad should be at most half of effective kernel size {}, but got {}".format, name, reach, p),
        )
    whole = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1}
    return tuple(each if axes == 2 else (whole[what], each[0]) for what, each in found.items())


def _max(
    axes: int,
    input: Tensor,
    kernel: int | Ints,
    stride: int | Ints | None,
    padding: int | Ints,
    dilation: int | Ints,
    ceil_mode: bool,
    return_indices: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    name = f"max_pool{axes}d"
    out, indices = _max_pool(
        _images(name, axes, input), *_windows(name, axes, kernel, stride, padding, dilation), ceil_mode
    )
    if return_indices:
        return _result(out, axes, input), _result(indices, axes, input)
    return _result(out, axes, input)


@replayed
def max_pool2d(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The largest element of each window of ``input`` (torch.nn.functional.max_pool2d).

    ``input`` (batch, channels, height, width) or (channels, height, width) of f16, bf16, f32 or f64. ``kernel_size``,
    ``stride`` (by default the kernel's), ``padding`` (at most half of a window) and ``dilation`` are a number or one
    for each axis. With ``ceil_mode`` a last window may reach beyond the padding; with ``return_indices`` the result is
    (values, i64 positions within an image's channel). The last NaN of a window is taken, or the first of equal
    elements. The result has channels last in memory if the input has. Differentiable, any number of times; the gradient
    is deterministic. Raises ``RuntimeError`` for shapes that do not fit, ``Unsupported`` for other dtypes.
    """
    return _max(2, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


@replayed
def max_pool1d(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``max_pool2d`` along one axis of ``input`` (batch, channels, length) or (channels, length)."""
    return _max(1, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def _avg(
    axes: int,
    input: Tensor,
    kernel: int | Ints,
    stride: int | Ints | None,
    padding: int | Ints,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None = None,
) -> Tensor:
    name = f"avg_pool{axes}d"
    if divisor == 0:
        raise RuntimeError(f"{name}(): divisor must be not zero")
    *how, _ = _windows(name, axes, kernel, stride, padding, 1)
    images = _images(name, axes, input)
    out: Tensor = _avg_pool(images, *how, ceil_mode, count_include_pad, abs(divisor or 0))
    return _result(-out if divisor is not None and divisor < 0 else out, axes, input)


@replayed
def avg_pool2d(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The average of each window of ``input`` (torch.nn.functional.avg_pool2d).

    Sums are divided by the elements of a window, of which zeros of the padding count with ``count_include_pad``, or by
    ``divisor_override``. f16 and bf16 are summed in f32, in the order of elements; a sum may overflow where its average
    would not. All else is as in ``max_pool2d``; ``out`` is resized and returned.
    """
    how = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    return composed("avg_pool2d", out, (input,), lambda: _avg(2, input, *how))


@replayed
def avg_pool1d(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """``avg_pool2d`` along one axis of ``input`` (batch, channels, length) or (channels, length)."""
    return _avg(1, input, kernel_size, stride, padding, ceil_mode, count_include_pad)


def adapted(axes: int, input: Tensor, size: int | Sequence[int | None] | None) -> Tensor:
    name = f"adaptive_avg_pool{axes}d"
    images = _images(name, axes, input)
    given = [size] * axes if size is None or isinstance(size, int) else list(size)
    if len(given) == 1:
        given = given * axes  # torch.compile of torch 2.11 traces no `*=` of lists
    if len(given) != axes:
        raise RuntimeError(f"{name}(): output_size must be {axes} numbers, but got {shown(size)}")
    wanted = [images.shape[4 - axes + a] if n is None else n for a, n in enumerate(given)]
    for n in wanted:
        require(n >= 0, partial("{}(): output_size {} is below 0".format, name, wanted))
    if 0 in wanted:
        raise Unsupported(f"{name}(): output_size = {wanted}: a result without elements is not supported")
    return _result(_adaptive(images, wanted if axes == 2 else [1, *wanted]), axes, input)


@replayed
def adaptive_avg_pool2d(input: Tensor, output_size: int | Sequence[int | None] | None) -> Tensor:
    """Averages of as many windows as ``output_size`` says (torch.nn.functional.adaptive_avg_pool2d).

    ``output_size``: (height, width) of the result, or one number for both; None keeps the input's. Window p of P along
    an axis of n elements is from floor(p * n / P) to ceil((p + 1) * n / P) - 1. All else is as in ``avg_pool2d``.
    """
    return adapted(2, input, output_size)


@replayed
def adaptive_avg_pool1d(input: Tensor, output_size: int | Sequence[int]) -> Tensor:
    """``adaptive_avg_pool2d`` along one axis of ``input`` (batch, channels, length) or (channels, length)."""
    return adapted(1, input, output_size)
