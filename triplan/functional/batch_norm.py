"""Batch and group normalisation as torch has them: by statistics of channels or of groups, or by running ones.

The results of a registered op are the images, the statistics and, of batch_norm, the next running ones, which the
public function copies where they belong: a registered op that writes its arguments cannot be differentiated. It is
differentiated as a function of its statistics too, so that derivatives of every order follow from two formulas. That of
the backward is in plain torch.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from triplan.errors import Unsupported
from triplan.facade import BatchNormBackwardPlan, BatchNormPlan, GroupNormBackwardPlan, GroupNormPlan, Plan
from triplan.functional._autocast import widened
from triplan.functional._ops import Recorded
from triplan.functional._plans import run
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import check_same_device
from triplan.sku import ElementKind

__all__ = ["batch_norm", "batch_norm_relu", "group_norm"]

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


def _of_channels(t: Tensor) -> Tensor:
    """The sum of each channel."""
    return t.sum([0, *range(2, t.dim())])


class _Channels:
    """Statistics of channels; ``how``: whether they are the batch's own, rather than constants."""

    def __init__(self, x: Tensor, how: bool) -> None:
        self.x, self.moves, self.count = x, how, x.numel() // x.size(1)

    def spread(self, s: Tensor) -> Tensor:
        """One number for each statistic, as it broadcasts against ``x``."""
        return _each(s, self.x)

    def total(self, t: Tensor) -> Tensor:
        """The sum of the elements of each statistic."""
        return _of_channels(t)


class _Groups(_Channels):
    """Statistics of ``how`` groups of channels of each image."""

    def __init__(self, x: Tensor, how: int) -> None:
        self.x, self.moves, self.groups = x, True, how
        self.count = x.numel() // (x.size(0) * how)

    def spread(self, s: Tensor) -> Tensor:
        n = self.x.size(0)
        return s.reshape(n, self.groups, 1).expand(n, self.groups, self.count).reshape(self.x.shape)

    def total(self, t: Tensor) -> Tensor:
        return t.reshape(self.x.size(0), self.groups, self.count).sum(2)


def _packed(**vectors: Tensor | None) -> dict[str, Tensor]:
    return {name: t.contiguous() for name, t in vectors.items() if t is not None}


def _where_positive(out: Tensor, g: Tensor) -> Tensor:
    """The gradient of what relu gave ``out`` of."""
    return torch.where(out <= 0, torch.zeros_like(g), g)


# --- gradients ---


def _make_backward(
    name: str, plan: type[Plan[Any, Any]], of: type[_Channels], field: str, kind: str
) -> tuple[Any, Recorded]:
    """(``backward`` of the forward op, the op that it calls). ``field`` of the plan has the schema's type ``kind``."""

    def grad(ctx: Any, dout: Tensor | None, dmean: Tensor | None, drstd: Tensor | None, *_: Any) -> Any:
        x, mean, rstd, weight, bias, *out = ctx.saved_tensors
        dout = torch.zeros_like(x) if dout is None else dout
        relu = (*out, *getattr(ctx, "added", ()))
        if relu and relu[0] is not None and not ctx.how:  # the backward op's statistics are the batch's own then
            dout, relu = _where_positive(relu[0], dout), (None, False)
        dx, dweight, dbias, *passed = op(dout, x, mean, rstd, weight, bias, ctx.how, *relu)
        passed = passed if relu and relu[1] else [dout] * len(passed)
        # The statistics are results of the registered op, not of the call: only second derivatives reach them.
        own = of(x, ctx.how)
        if drstd is not None:
            c = x.to(rstd.dtype) - own.spread(mean)
            dx = dx - (c * own.spread(drstd * rstd**3 / own.count)).to(x.dtype)
        if dmean is not None:
            dx = dx + own.spread(dmean / own.count).expand(x.shape).to(x.dtype)
        return dx, None if weight is None else dweight, None if bias is None else dbias, *passed

    def fake(
        dout: Tensor,
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        how: Any,
        *relu: Any,
    ) -> tuple[Tensor, ...]:
        dweight, dbias = (x.new_empty(0) if p is None else p.new_empty((x.size(1),)) for p in (weight, bias))
        dx = _empty(x) if of is _Channels else x.new_empty(x.shape)
        return dx, dweight, dbias, *([_empty(x) if relu[1] else x.new_empty(0)] if relu else [])

    def kernel(
        dout: Tensor,
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        how: Any,
        *relu: Any,
    ) -> tuple[Tensor, ...]:
        dx, dweight, dbias, *passed = found = fake(dout, x, mean, rstd, weight, bias, how, *relu)
        last, images = of is _Channels and _is_last(x), {"dout": dout, "x": x, "dx": dx}
        if relu and relu[0] is not None:
            images |= {"out": relu[0], **({"dresidual": passed[0]} if relu[1] else {})}
        operands = {name: _images(t, last) for name, t in images.items()}
        operands |= _packed(mean=mean, rstd=rstd, weight=weight)
        operands |= {} if weight is None else {"dweight": dweight}
        operands |= {} if bias is None else {"dbias": dbias}
        run(plan, operands, **{field: how})
        return found

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        dout, x, mean, rstd, weight, bias, ctx.how, *relu = inputs
        ctx.biased, ctx.passes_on = bias is not None, bool(relu and relu[1])
        ctx.save_for_backward(dout, x, mean, rstd, weight, *relu[:1])

    def second(ctx: Any, of_dx: Tensor, of_dweight: Tensor, of_dbias: Tensor, *of_passed: Tensor) -> Any:
        dout, x, mean, rstd, weight, *relu = ctx.saved_tensors
        out = relu[0] if relu else None
        dout = dout if out is None else _where_positive(out, dout)
        own = of(x, ctx.how)
        d, v, c = (t.to(rstd.dtype) for t in (dout, of_dx, x))
        r = own.spread(rstd)
        c = c - own.spread(mean)
        hat = c * r
        w = torch.ones_like(r) if weight is None else _each(weight.to(rstd.dtype), x)
        g = d * w
        if own.moves:
            # dx = r * (g - mean(g) - hat * mean(g * hat))
            v_hat, g_hat = (own.total(t) / own.count for t in (v * hat, g * hat))
            centre = own.spread(own.total(v) / own.count)
            to_g = r * (v - centre - hat * own.spread(v_hat))
            to_c = -r * r * (v * own.spread(g_hat) + g * own.spread(v_hat))
            to_r = own.total((v - centre) * g) - 3 * own.count * (v_hat * g_hat)
        else:
            to_g, to_c, to_r = r * v, torch.zeros_like(c), own.total(v * g)
        to_d, to_weight = to_g * w, None
        if weight is not None:
            u = _each(of_dweight.to(rstd.dtype), x)
            to_d, to_c, to_r = to_d + u * hat, to_c + u * d * r, to_r + own.total(u * d * c)
            to_weight = _of_channels(to_g * d).to(weight.dtype)
        if ctx.biased:
            to_d = to_d + _each(of_dbias.to(rstd.dtype), x)
        to_d = to_d.to(dout.dtype)
        if out is not None:
            to_d = _where_positive(out, to_d + of_passed[0] if ctx.passes_on else to_d)
        more = (None,) * (2 * len(relu))
        return to_d, to_c.to(x.dtype), -own.total(to_c), to_r, to_weight, None, None, *more

    relu_given, relu_found = (", Tensor? out, bool residual", ", Tensor dresidual") if of is _Channels else ("", "")
    op = Recorded(
        f"{name}_backward",
        f"(Tensor dout, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, {kind} {field}{relu_given})"
        f" -> (Tensor dx, Tensor dweight, Tensor dbias{relu_found})",
        kernel,
        fake,
        setup=setup,
        backward=second,
    )
    return grad, op


# --- batch_norm ---


def _fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    *_: Any,
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
    relu: bool,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    found = _fake(x, weight, bias, running_mean, running_var, training)
    last, names = _is_last(x), ("out", "mean", "rstd", "next_mean", "next_var")
    operands = {"x": _images(x, last), **dict(zip(names, found, strict=True))}
    operands["out"] = _images(found[0], last)
    if residual is not None:
        operands["residual"] = _images(residual, last)
    scalars = {"momentum": momentum}
    if not training or running_mean is None:
        scalars = {}
        del operands["next_mean"], operands["next_var"]
    operands |= _packed(weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    run(BatchNormPlan, operands, scalars=scalars, training=training, eps=eps, relu=relu)
    return found


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, _, _, ctx.how, _, _, relu, residual = inputs
    out, mean, rstd, *updated = output
    ctx.added = (residual is not None,)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*updated, *(() if ctx.how else (mean, rstd)))
    ctx.save_for_backward(x, mean, rstd, weight, bias, out if relu else None)


def _gradients(ctx: Any, *grads: Tensor | None) -> Any:
    dx, dweight, dbias, dresidual = _grad(ctx, *grads)
    return dx, dweight, dbias, *(None,) * 6, dresidual if ctx.added[0] else None


_grad, _ = _make_backward("batch_norm", BatchNormBackwardPlan, _Channels, "training", "bool")
_batch_norm = Recorded(
    "batch_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, bool training,"
    " float momentum, float eps, bool relu, Tensor? residual)"
    " -> (Tensor out, Tensor mean, Tensor rstd, Tensor next_mean, Tensor next_var)",
    _kernel,
    _fake,
    setup=_setup,
    backward=_gradients,
)


# --- group_norm ---


def _group_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = (x.new_empty((x.size(0), groups), dtype=_compute(x)) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


def _group_kernel(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    out, mean, rstd = found = _group_fake(x, weight, bias, groups, eps)
    operands = {"x": _images(x, False), "out": _images(out, False), "mean": mean, "rstd": rstd}
    run(GroupNormPlan, operands | _packed(weight=weight, bias=bias), groups=groups, eps=eps)
    return found


def _group_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, ctx.how, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, *output[1:], weight, bias)


_group_grad, _ = _make_backward("group_norm", GroupNormBackwardPlan, _Groups, "groups", "SymInt")
_group_norm = Recorded(
    "group_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, SymInt groups, float eps) -> (Tensor out, Tensor mean, Tensor rstd)",
    _group_kernel,
    _group_fake,
    setup=_group_setup,
    backward=lambda ctx, *grads: (*_group_grad(ctx, *grads), None, None),
)

# --- calls ---


def _check(name: str, input: Tensor, **parameters: Tensor | None) -> None:
    """Raise ``RuntimeError`` unless there is one number a channel in each of ``parameters``, of the right dtype."""
    if input.dim() < 2 and input.numel():
        raise RuntimeError(f"{name}(): expected an input of 2 axes or more, but got {list(input.shape)}")
    if input.dtype not in _DTYPES:
        raise Unsupported(f"{name}(): {input.dtype} is not supported, only f16, bf16, f32 and f64")
    dtypes = {p.dtype for p in parameters.values() if p is not None}
    if len(dtypes) > 1 or not dtypes <= {input.dtype, _compute(input)}:
        raise RuntimeError(
            f"{name}(): expected weight, bias and running statistics of {input.dtype}, or all of "
            f"{_compute(input)}, but got {', '.join(sorted(map(str, dtypes)))}"
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
    scale, shift = (None if p is None else _each(p.to(input.dtype), input) for p in (weight, bias))
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
    out, _, _, next_mean, next_var = _batch_norm(
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
    out: Tensor = _group_norm(input, weight, bias, num_groups, eps)[0]
    return out
