"""Convolutions as torch has them: conv2d, and conv1d as the convolution of one row.

conv2d and its two gradients sum products of the same three factors (input, weight, gradient of the result), so the
derivatives of each are the other two: gradients of any order need no further op.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from triplan.errors import Unsupported, shown
from triplan.facade import Conv2dBackwardInputPlan, Conv2dBackwardWeightPlan, Conv2dPlan, Plan
from triplan.functional._autocast import narrowed
from triplan.functional._forward import Linearity
from triplan.functional._ops import Recorded
from triplan.functional._plans import run, tf32_allowed
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import check_same_device, empty_in_order, for_each_axis, require
from triplan.functional._sharding.axes import Rule

__all__ = ["conv1d", "conv2d"]

Tensor = torch.Tensor
Ints = Sequence[int]
#: stride, padding (above, below, left, right), dilation, groups.
How = tuple[Ints, Ints, Ints, int]
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _run(plan: type[Plan[Any, Any]], operands: dict[str, Tensor], how: How) -> None:
    stride, padding, dilation, groups = how
    options: dict[str, Any] = {"stride": tuple(stride), "padding": tuple(padding), "dilation": tuple(dilation)}
    if tf32_allowed(next(iter(operands.values())), "conv"):
        options["math"] = "tf32"
    run(plan, operands, groups=groups, **options)


# --- conv2d ---


def _check(input: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> None:
    """Raises ``RuntimeError`` for what does not fit, and ``Unsupported`` for dtypes."""
    stride, padding, dilation, groups = how
    given = (input, weight, *(() if bias is None else (bias,)))
    check_same_device("conv2d", *given)
    for t in given:
        if t.dtype != input.dtype:
            raise RuntimeError(f"conv2d(): input is {input.dtype}, but weight or bias {t.dtype}: one dtype is expected")
    if input.dtype not in _DTYPES:
        raise Unsupported(f"conv2d(): {input.dtype} is not supported, only f16, bf16, f32 and f64")
    for name, values, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
        require(min(values) >= least, partial("conv2d(): {} {} is below {}".format, name, values, least))
    require(
        groups >= 1 and weight.size(0) % groups == 0 and weight.size(1) * groups == input.size(1),
        lambda: (
            f"conv2d(): given groups={groups} and weight of size {list(weight.shape)}, expected input "
            f"{list(input.shape)} to have {weight.size(1) * groups} channels, but got {input.size(1)} channels instead"
        ),
    )
    if bias is not None:
        require(
            bias.dim() == 1 and bias.size(0) == weight.size(0),
            lambda: f"conv2d(): bias is {list(bias.shape)}; [{weight.size(0)}] is expected",
        )
    for axis in (0, 1):
        padded = input.size(2 + axis) + padding[2 * axis] + padding[2 * axis + 1]
        reach = dilation[axis] * (weight.size(2 + axis) - 1) + 1
        message = "conv2d(): padded input size per channel: {}; the kernel reaches over {}, which can't be more"
        require(padded >= reach, partial(message.format, padded, reach))


def _fake(input: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    _check(input, weight, bias, how)
    stride, padding, dilation, _ = how
    extents = [
        (input.size(2 + a) + padding[2 * a] + padding[2 * a + 1] - dilation[a] * (weight.size(2 + a) - 1) - 1)
        // stride[a]
        + 1
        for a in (0, 1)
    ]
    return empty_in_order((input.size(0), weight.size(0), *extents), input, weight)


def _axes(grouped: str, plain: str) -> Rule:
    return lambda *args: grouped if args[-1] != 1 else plain


def _kernel(input: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    out = _fake(input, weight, bias, *how)
    operands = {"x": input, "weight": weight, "out": out}
    _run(Conv2dPlan, operands if bias is None else {**operands, "bias": bias}, how)
    return out


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    input, weight, _, *ctx.how = inputs
    ctx.save_for_backward(input, weight)


def _grad(ctx: Any, grad: Tensor) -> Any:
    input, weight = ctx.saved_tensors
    to_input, to_weight, to_bias = ctx.needs_input_grad[:3]
    return (
        _backward_input(grad, weight, input.shape[2:], *ctx.how) if to_input else None,
        _backward_weight(input, grad, weight.shape[2:], *ctx.how) if to_weight else None,
        grad.sum((0, 2, 3)) if to_bias else None,
        *(None,) * 4,
    )


_HOW = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups"
_conv2d = Recorded(
    "conv2d",
    f"(Tensor input, Tensor weight, Tensor? bias, {_HOW}) -> Tensor",
    _kernel,
    _fake,
    axes=_axes("n..., ...., . -> n...", "nc.., oc.., o+c -> no..+c"),
    setup=_setup,
    backward=_grad,
    linearity=Linearity(terms=(2,), factors=(0, 1)),
)

# --- its gradients ---


def _input_fake(dout: Tensor, weight: Tensor, size: Ints, *how: Any) -> Tensor:
    return empty_in_order((dout.size(0), weight.size(1) * how[-1], *size), dout, weight)


def _input_kernel(dout: Tensor, weight: Tensor, size: Ints, *how: Any) -> Tensor:
    dx = _input_fake(dout, weight, size, *how)
    _run(Conv2dBackwardInputPlan, {"dout": dout, "weight": weight, "dx": dx}, how)
    return dx


def _of_factors(ctx: Any, inputs: Any, output: Tensor) -> None:
    first, second, _, *ctx.how = inputs
    ctx.save_for_backward(first, second)


def _input_grad(ctx: Any, grad: Tensor) -> Any:
    dout, weight = ctx.saved_tensors
    to_dout, to_weight = ctx.needs_input_grad[:2]
    return (
        _conv2d(grad, weight, None, *ctx.how) if to_dout else None,
        _backward_weight(grad, dout, weight.shape[2:], *ctx.how) if to_weight else None,
        *(None,) * 5,
    )


_backward_input = Recorded(
    "conv2d_backward_input",
    f"(Tensor dout, Tensor weight, SymInt[] size, {_HOW}) -> Tensor",
    _input_kernel,
    _input_fake,
    axes=_axes("n..., .... -> n...", "no.., oc.. -> nc..+o"),
    setup=_of_factors,
    backward=_input_grad,
    linearity=Linearity(factors=(0, 1)),
)


def _weight_fake(input: Tensor, dout: Tensor, kernel: Ints, *how: Any) -> Tensor:
    return empty_in_order((dout.size(1), input.size(1) // how[-1], *kernel), input, dout)


def _weight_kernel(input: Tensor, dout: Tensor, kernel: Ints, *how: Any) -> Tensor:
    dweight = _weight_fake(input, dout, kernel, *how)
    _run(Conv2dBackwardWeightPlan, {"x": input, "dout": dout, "dweight": dweight}, how)
    return dweight


def _weight_grad(ctx: Any, grad: Tensor) -> Any:
    input, dout = ctx.saved_tensors
    to_input, to_dout = ctx.needs_input_grad[:2]
    return (
        _backward_input(dout, grad, input.shape[2:], *ctx.how) if to_input else None,
        _conv2d(input, grad, None, *ctx.how) if to_dout else None,
        *(None,) * 5,
    )


_backward_weight = Recorded(
    "conv2d_backward_weight",
    f"(Tensor input, Tensor dout, SymInt[] kernel, {_HOW}) -> Tensor",
    _weight_kernel,
    _weight_fake,
    axes=_axes("n..., n... -> ....+n", "nc.., no.. -> oc..+n"),
    setup=_of_factors,
    backward=_weight_grad,
    linearity=Linearity(factors=(0, 1)),
)

# --- calls ---


def _sides(name: str, padding: int | str | Ints, kernel: Ints, stride: Ints, dilation: Ints) -> tuple[int, ...]:
    """Padding before and behind each axis. Of an odd number in all, "same" has one more behind, as torch has."""
    if not isinstance(padding, str):
        return tuple(n for n in for_each_axis(name, "padding", padding, len(kernel)) for _ in range(2))
    if padding == "valid":
        return (0,) * (2 * len(kernel))
    if padding != "same":
        raise RuntimeError(f"{name}(): Invalid padding string: {shown(padding)}; 'same' and 'valid' are known")
    if any(s != 1 for s in stride):
        raise RuntimeError(f"{name}(): padding='same' is not supported for strided convolutions")
    whole = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    return tuple(n for total in whole for n in (total // 2, total - total // 2))


def _conv(
    axes: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int | Ints,
    padding: int | str | Ints,
    dilation: int | Ints,
    groups: int,
) -> Tensor:
    name = f"conv{axes}d"
    input, weight = narrowed(name, input, weight)
    (bias,) = narrowed(name, bias)
    if input.dim() not in (axes + 1, axes + 2) or weight.dim() != axes + 2:
        raise RuntimeError(
            f"Expected {axes + 1}D (unbatched) or {axes + 2}D (batched) input and {axes + 2}D weight to {name}, but "
            f"got input of size: {list(input.shape)} and weight of size: {list(weight.shape)}"
        )
    batch = input if input.dim() == axes + 2 else input.unsqueeze(0)
    strides, steps = for_each_axis(name, "stride", stride, axes), for_each_axis(name, "dilation", dilation, axes)
    sides = _sides(name, padding, weight.shape[2:], strides, steps)
    if axes == 1:
        batch, weight = batch.unsqueeze(2), weight.unsqueeze(2)
        strides, steps, sides = (1, *strides), (1, *steps), (0, 0, *sides)
    out: Tensor = _conv2d(batch, weight, bias, strides, sides, steps, groups)
    out = out.squeeze(2) if axes == 1 else out
    return out if input.dim() == axes + 2 else out.squeeze(0)


@replayed
def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Sums of ``weight`` times ``input`` over channels and taps, plus ``bias`` (torch.nn.functional.conv2d).

    ``input`` (batch, channels, height, width) or (channels, height, width), ``weight`` (filters, channels / groups,
    kernel height, kernel width) and ``bias`` (filters,) have one dtype: f16, bf16, f32 or f64. The result is (batch,
    filters, out height, out width), with channels last in memory if they are so in input or weight; this layout is the
    fast one. ``stride``, ``padding`` and ``dilation`` are a number or one for each axis; ``padding`` may be "valid" or,
    with strides of 1, "same".

    f16 and bf16 accumulate in f32. f32 multiplies in tf32 on CUDA where torch.backends.cudnn allows it, as it does by
    default; set ``torch.backends.cudnn.allow_tf32 = False`` for f32. Differentiable in all three, any number of times;
    gradients are always deterministic. Under autocast all are converted to the autocast dtype. Raises ``RuntimeError``
    for shapes, dtypes and devices that do not fit, ``Unsupported`` for other dtypes.
    """
    return _conv(2, input, weight, bias, stride, padding, dilation, groups)


@replayed
def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """``conv2d`` along one axis (torch.nn.functional.conv1d).

    ``input`` (batch, channels, length) or (channels, length), ``weight`` (filters, channels / groups, kernel length);
    all else is as in ``conv2d``.
    """
    return _conv(1, input, weight, bias, stride, padding, dilation, groups)
