"""Batch normalisation as torch has it: by a batch's own statistics, which update running ones, or by those.

The results of the registered op are the normalised images, the statistics and the next running ones, which the public
function copies where they belong: a registered op that writes its arguments cannot be differentiated. It is
differentiated as a function of its statistics too, so that derivatives of every order follow from two formulas. That of
the backward is in plain torch.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from triplan.errors import Unsupported
from triplan.facade import BatchNormBackwardPlan, BatchNormPlan
from triplan.functional._ops import Recorded
from triplan.functional._plans import run
from triplan.functional._replay.replay import replayed
from triplan.sku import ElementKind

__all__ = ["batch_norm"]

Tensor = torch.Tensor
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _compute(x: Tensor) -> torch.dtype:
    return ElementKind.of(x.dtype).compute.torch


def _is_last(x: Tensor) -> bool:
    """Whether channels are last in memory."""
    return x.dim() > 2 and x.size(1) > 1 and x.stride(1) == 1 and not x.is_contiguous()


def _empty(x: Tensor) -> Tensor:
    """Memory for a result of the shape of ``x``, with channels last where they are."""
    if not _is_last(x):
        return x.new_empty(x.shape)
    sides = x.shape[2:]
    steps = [x.size(1) * math.prod(sides[d + 1 :]) for d in range(len(sides))]
    return x.new_empty_strided(x.shape, (x.size(1) * math.prod(sides), 1, *steps))


def _images(t: Tensor, last: bool) -> Tensor:
    """``t`` as (batch, channels, pixels), packed; with channels ``last``, a batch of pixels. Copied if it has gaps."""
    n, channels, *sides = t.shape
    if last:
        return t.movedim(1, -1).reshape(n * math.prod(sides), channels, 1)
    return t.reshape(n, channels, math.prod(sides)).contiguous()


def _each(s: Tensor, x: Tensor) -> Tensor:
    """One number a channel, as it broadcasts against ``x``."""
    return s.reshape(1, s.numel(), *(1,) * (x.dim() - 2))


def _total(t: Tensor) -> Tensor:
    """The sum of each channel."""
    return t.sum([0, *range(2, t.dim())])


def _packed(**vectors: Tensor | None) -> dict[str, Tensor]:
    return {name: t.contiguous() for name, t in vectors.items() if t is not None}


# --- the op ---


def _fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    *_: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    mean, rstd = (x.new_empty((x.size(1),), dtype=_compute(x)) for _ in range(2))
    if not training or running_mean is None or running_var is None:
        return _empty(x), mean, rstd, x.new_empty(0), x.new_empty(0)
    return _empty(x), mean, rstd, running_mean.new_empty((x.size(1),)), running_var.new_empty((x.size(1),))


def _kernel(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    found = _fake(x, weight, bias, running_mean, running_var, training)
    last, names = _is_last(x), ("out", "mean", "rstd", "next_mean", "next_var")
    operands = {"x": _images(x, last), **dict(zip(names, found, strict=True))}
    operands["out"] = _images(found[0], last)
    scalars = {"momentum": momentum}
    if not training or running_mean is None:
        scalars = {}
        del operands["next_mean"], operands["next_var"]
    operands |= _packed(weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    run(BatchNormPlan, operands, scalars=scalars, training=training, eps=eps)
    return found


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, _, _, ctx.training, _, _ = inputs
    _, mean, rstd, *updated = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*updated, *(() if ctx.training else (mean, rstd)))
    ctx.save_for_backward(x, mean, rstd, weight, bias)


def _grad(ctx: Any, dout: Tensor | None, dmean: Tensor | None, drstd: Tensor | None, *_: Any) -> Any:
    x, mean, rstd, weight, bias = ctx.saved_tensors
    dout = torch.zeros_like(x) if dout is None else dout
    dx, dweight, dbias = _backward(dout, x, mean, rstd, weight, bias, ctx.training)
    # The statistics are results of the registered op, not of the call: only second derivatives reach them.
    count = x.numel() // x.size(1)
    if drstd is not None:
        c = x.to(rstd.dtype) - _each(mean, x)
        dx = dx - (c * _each(drstd * rstd**3 / count, x)).to(x.dtype)
    if dmean is not None:
        dx = dx + _each(dmean / count, x).expand(x.shape).to(x.dtype)
    return dx, None if weight is None else dweight, None if bias is None else dbias, *(None,) * 5


def _backward_fake(
    dout: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dweight, dbias = (x.new_empty(0) if p is None else p.new_empty((x.size(1),)) for p in (weight, bias))
    return _empty(x), dweight, dbias


def _backward_kernel(
    dout: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = found = _backward_fake(dout, x, mean, rstd, weight, bias, training)
    last = _is_last(x)
    operands = {name: _images(t, last) for name, t in (("dout", dout), ("x", x), ("dx", dx))}
    operands |= _packed(mean=mean, rstd=rstd, weight=weight)
    operands |= {} if weight is None else {"dweight": dweight}
    operands |= {} if bias is None else {"dbias": dbias}
    run(BatchNormBackwardPlan, operands, training=training)
    return found


def _backward_setup(ctx: Any, inputs: Any, output: Any) -> None:
    dout, x, mean, rstd, weight, bias, ctx.training = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(dout, x, mean, rstd, weight)


def _backward_grad(ctx: Any, of_dx: Tensor, of_dweight: Tensor, of_dbias: Tensor) -> Any:
    dout, x, mean, rstd, weight = ctx.saved_tensors
    d, v, c = (t.to(rstd.dtype) for t in (dout, of_dx, x))
    count, r = x.numel() // x.size(1), _each(rstd, x)
    c = c - _each(mean, x)
    hat = c * r
    w = torch.ones_like(r) if weight is None else _each(weight.to(rstd.dtype), x)
    g = d * w
    if ctx.training:
        # dx = r * (g - mean(g) - hat * mean(g * hat))
        centre, v_hat, g_hat = (_each(_total(t) / count, x) for t in (v, v * hat, g * hat))
        to_g = r * (v - centre - hat * v_hat)
        to_c = -r * r * (v * g_hat + g * v_hat)
        to_r = _total((v - centre) * g) - 3 * count * (v_hat * g_hat).reshape(rstd.shape)
    else:
        to_g, to_c, to_r = r * v, torch.zeros_like(c), _total(v * g)
    to_d, to_weight = to_g * w, None
    if weight is not None:
        u = _each(of_dweight.to(rstd.dtype), x)
        to_d, to_c, to_r = to_d + u * hat, to_c + u * d * r, to_r + _total(u * d * c)
        to_weight = _total(to_g * d).to(weight.dtype)
    if ctx.biased:
        to_d = to_d + _each(of_dbias.to(rstd.dtype), x)
    return to_d.to(dout.dtype), to_c.to(x.dtype), -_total(to_c), to_r, to_weight, None, None


_batch_norm = Recorded(
    "batch_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, bool training,"
    " float momentum, float eps) -> (Tensor out, Tensor mean, Tensor rstd, Tensor next_mean, Tensor next_var)",
    _kernel,
    _fake,
    setup=_setup,
    backward=_grad,
)
_backward = Recorded(
    "batch_norm_backward",
    "(Tensor dout, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, bool training)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _backward_kernel,
    _backward_fake,
    setup=_backward_setup,
    backward=_backward_grad,
)

# --- the call ---


def _check(input: Tensor, training: bool, **parameters: Tensor | None) -> None:
    if input.dim() < 2 and input.numel():
        raise RuntimeError(f"batch_norm(): expected an input of 2 axes or more, but got {list(input.shape)}")
    if input.dtype not in _DTYPES:
        raise Unsupported(f"batch_norm(): {input.dtype} is not supported, only f16, bf16, f32 and f64")
    absent = [name for name in ("running_mean", "running_var") if parameters[name] is None]
    if absent and (len(absent) == 1 or not training):
        raise RuntimeError(f"batch_norm(): Expected {absent[0]} to be defined when training={training}")
    dtypes = {p.dtype for p in parameters.values() if p is not None}
    if len(dtypes) > 1 or not dtypes <= {input.dtype, _compute(input)}:
        raise RuntimeError(
            f"batch_norm(): expected weight, bias and running statistics of {input.dtype}, or all of "
            f"{_compute(input)}, but got {', '.join(sorted(map(str, dtypes)))}"
        )
    channels = input.size(1) if input.dim() > 1 else 0
    for name, p in parameters.items():
        if p is None:
            continue
        if p.dim() != 1 or p.size(0) != channels:
            raise RuntimeError(
                f"batch_norm(): {name} should contain {channels} elements, but has shape {list(p.shape)}"
            )
        if p.device != input.device:
            raise RuntimeError(f"batch_norm(): {name} is on {p.device}, but input on {input.device}")


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
) -> tuple[Tensor, Tensor, Tensor]:
    """The result and the next running statistics. (A recorded call that writes in place is not replayed.)"""
    out, _, _, next_mean, next_var = _batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, eps
    )
    return out, next_mean, next_var


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
    _check(input, training, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    if input.numel() == 0:
        scale, shift = (None if p is None else _each(p.to(input.dtype), input) for p in (weight, bias))
        out = input.clone() if scale is None else input * scale
        return out if shift is None else out + shift
    if training and input.numel() == input.size(1):
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
    out, next_mean, next_var = _normalised(
        input, weight, bias, running_mean, running_var, bool(training), momentum, eps
    )
    if training and running_mean is not None and running_var is not None:
        running_mean.copy_(next_mean)
        running_var.copy_(next_var)
    return out
