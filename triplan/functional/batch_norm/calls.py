"""Batch and group normalisation as torch has them: by statistics of channels or of groups, or by running ones.

The next running statistics are results of the registered op, which the public functions copy where they belong: a
registered op that writes its arguments cannot be differentiated.
"""

from __future__ import annotations

import torch

from triplan.errors import Unsupported
from triplan.functional._autocast import widened
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import check_same_device
from triplan.functional.batch_norm.ops import batch_norm_op, compute_dtype, each_channel, group_norm_op

__all__ = ["batch_norm", "batch_norm_relu", "group_norm"]

Tensor = torch.Tensor
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check(name: str, input: Tensor, **parameters: Tensor | None) -> None:
    """Raise ``RuntimeError`` unless there is one number a channel in each of ``parameters``, of the right dtype."""
    if input.dim() < 2 and input.numel():
        raise RuntimeError(f"{name}(): expected an input of 2 axes or more, but got {list(input.shape)}")
    if input.dtype not in _DTYPES:
        raise Unsupported(f"{name}(): {input.dtype} is not supported, only f16, bf16, f32 and f64")
    dtypes = {p.dtype for p in parameters.values() if p is not None}
    if len(dtypes) > 1 or not dtypes <= {input.dtype, compute_dtype(input)}:
        raise RuntimeError(
            f"{name}(): expected weight, bias and running statistics of {input.dtype}, or all of "
            f"{compute_dtype(input)}, but got {', '.join(sorted(map(str, dtypes)))}"
        )
    channels = input.size(1) if input.dim() > 1 else 0
    for what, p in parameters.items():
        if p is None:
            continue
        if p.dim() != 1 or p.size(0) != channels:
            raise RuntimeError(f"{name}(): {what} should contain {channels} elements, but has shape {list(p.shape)}")
        if p.device != input.device:
            raise RuntimeError(f"{name}(): {what} is on {p.device}, but input on {input.device}")


def _of_nothing(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The result where there are no elements."""
    scale, shift = (None if p is None else each_channel(p.to(input.dtype), input) for p in (weight, bias))
    out = input.clone() if scale is None else input * scale
    return out if shift is None else out + shift


@replayed
def _normalised(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    relu: bool,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result and the next running statistics. (A recorded call that writes in place is not replayed.)"""
    out, _, _, next_mean, next_var = batch_norm_op(
        input, weight, bias, running_mean, running_var, training, momentum, eps, relu, residual
    )
    return out, next_mean, next_var


def _called(
    name: str,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    relu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    absent = [n for n, t in (("running_mean", running_mean), ("running_var", running_var)) if t is None]
    if absent and (len(absent) == 1 or not training):
        raise RuntimeError(f"{name}(): Expected {absent[0]} to be defined when training={training}")
    _check(name, input, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    if residual is not None:
        check_same_device(name, input, residual)
        if (residual.shape, residual.dtype) != (input.shape, input.dtype):
            raise RuntimeError(
                f"{name}(): input is {input.dtype} of {list(input.shape)}, but residual {residual.dtype} of "
                f"{list(residual.shape)}"
            )
    if input.numel() == 0:
        nothing = _of_nothing(input, weight, bias)
        return nothing if residual is None else nothing + residual
    if training and input.numel() == input.size(1):
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
    out, next_mean, next_var = _normalised(
        input, weight, bias, running_mean, running_var, bool(training), momentum, eps, relu, residual
    )
    if training and running_mean is not None and running_var is not None:
        running_mean.copy_(next_mean)
        running_var.copy_(next_var)
    return out


@replayed
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``(input - mean) / sqrt(var + eps) * weight + bias`` of each channel (torch.nn.functional.batch_norm).

    ``input`` (batch, channels, ...) of f16, bf16, f32 or f64; all others (channels,), of its dtype or all of the one in
    which it is computed (f32; f64 for f64). In ``training``, mean and variance are those of ``input``, and update
    ``running_mean`` and ``running_var``, if they are given: ``running = (1 - momentum) * running + momentum * new``,
    with the variance divided by one less than the elements. Otherwise they are ``running_mean`` and ``running_var``.

    The result has channels last in memory if the input has, which is the fast layout; an input with gaps is copied.
    Differentiable in ``input``, ``weight`` and ``bias``, any number of times; all sums are deterministic. Raises
    ``ValueError`` for training with one element a channel, ``RuntimeError`` for shapes, dtypes and devices that do not
    fit, ``Unsupported`` for other dtypes.
    """
    return _called("batch_norm", input, running_mean, running_var, weight, bias, training, momentum, eps)


@replayed
def batch_norm_relu(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    residual: Tensor | None = None,
) -> Tensor:
    """``relu(batch_norm(input, ...) + residual)``, without a pass for the sum and one for relu.

    ``residual``, which may be absent, has the shape, dtype and device of ``input``, and gets a gradient; all else is as
    in ``batch_norm``. Of the three, nothing is rounded between.
    """
    name = "batch_norm_relu"
    return _called(
        name, input, running_mean, running_var, weight, bias, training, momentum, eps, relu=True, residual=residual
    )


@replayed
def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """``(input - mean) / sqrt(var + eps) * weight + bias``, with mean and variance of each of ``num_groups`` groups of
    adjacent channels of each image, weight and bias of each channel (torch.nn.functional.group_norm).

    ``input`` (batch, channels, ...), ``weight`` and ``bias`` as in ``batch_norm``; under autocast all are converted to
    f32 where torch does so. The result is contiguous; an input that is not is copied. Differentiable, any number of
    times. Raises ``RuntimeError`` for shapes, groups, dtypes and devices that do not fit, ``ValueError`` for a single
    image with groups of one element, as torch does, ``Unsupported`` for other dtypes.
    """
    (input,), (weight, bias) = widened("group_norm", input), widened("group_norm", weight, bias)
    _check("group_norm", input, weight=weight, bias=bias)
    if input.dim() < 2:
        raise RuntimeError(f"group_norm(): expected an input of 2 axes or more, but got {list(input.shape)}")
    if num_groups < 1 or input.size(1) % num_groups:
        raise RuntimeError(
            f"group_norm(): Expected number of channels in input to be divisible by num_groups, but got input of shape "
            f"{list(input.shape)} and num_groups={num_groups}"
        )
    if input.numel() == 0:
        return _of_nothing(input, weight, bias)
    if input.numel() == num_groups:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
    out: Tensor = group_norm_op(input, weight, bias, num_groups, eps)[0]
    return out
