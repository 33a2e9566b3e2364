"""The registered ops: norms of channels or groups, and their gradients.

The results of a registered op are the images, the statistics and, of batch_norm, the next running ones. It is
differentiated as a function of its statistics too, so that derivatives of every order follow from two formulas. That of
the backward is in plain torch.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from triplan.facade import BatchNormBackwardPlan, BatchNormPlan, GroupNormBackwardPlan, GroupNormPlan, Plan
from triplan.functional._ops import Recorded
from triplan.functional._plans import run
from triplan.functional._sharding.axes import Rule, dots
from triplan.sku import ElementKind

Tensor = torch.Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
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


def each_channel(s: Tensor, x: Tensor) -> Tensor:
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
        return each_channel(s, self.x)

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


def _sides(x: Any) -> str:
    """The axes of an image's pixels, which ranks do not divide."""
    return dots(len(x.shape) - 2)


# --- gradients ---


def _make_backward(
    name: str, axes: Rule, plan: type[Plan[Any, Any]], of: type[_Channels], field: str, kind: str
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
        w = torch.ones_like(r) if weight is None else each_channel(weight.to(rstd.dtype), x)
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
            u = each_channel(of_dweight.to(rstd.dtype), x)
            to_d, to_c, to_r = to_d + u * hat, to_c + u * d * r, to_r + own.total(u * d * c)
            to_weight = _of_channels(to_g * d).to(weight.dtype)
        if ctx.biased:
            to_d = to_d + each_channel(of_dbias.to(rstd.dtype), x)
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
        axes=axes,
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
    mean, rstd = (x.new_empty((x.size(1),), dtype=compute_dtype(x)) for _ in range(2))
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


def _axes(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any) -> str:
    image, running = f"{'.' if training else 'n'}c{_sides(x)}", "c" if mean is not None and training else ""
    return f"{image}, c, c, c, c, {image} -> {image}, c, c, {running}, {running}"


def _backward_axes(
    dout: Any, x: Any, mean: Any, rstd: Any, weight: Any, bias: Any, training: bool, out: Any, residual: bool
) -> str:
    image, rows = f"{'.' if training else 'n'}c{_sides(x)}", "" if training else "+n"
    sums = [f"c{rows}" if p is not None else "" for p in (weight, bias)]
    return f"{image}, {image}, c, c, c, c, {image} -> {image}, {sums[0]}, {sums[1]}, {image * residual}"


_grad, _ = _make_backward("batch_norm", _backward_axes, BatchNormBackwardPlan, _Channels, "training", "bool")
batch_norm_op = Recorded(
    "batch_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, bool training,"
    " float momentum, float eps, bool relu, Tensor? residual)"
    " -> (Tensor out, Tensor mean, Tensor rstd, Tensor next_mean, Tensor next_var)",
    _kernel,
    _fake,
    axes=_axes,
    setup=_setup,
    backward=_gradients,
)


# --- group_norm ---


def _group_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = (x.new_empty((x.size(0), groups), dtype=compute_dtype(x)) for _ in range(2))
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


def _group_axes(x: Any, *_: Any) -> str:
    return f"n.{_sides(x)}, ., . -> n.{_sides(x)}, n., n."


def _group_backward_axes(dout: Any, x: Any, mean: Any, rstd: Any, weight: Any, bias: Any, *_: Any) -> str:
    row, sums = f"n.{_sides(x)}", [".+n" if p is not None else "" for p in (weight, bias)]
    return f"{row}, {row}, n., n., ., . -> {row}, {sums[0]}, {sums[1]}"


_group_grad, _ = _make_backward("group_norm", _group_backward_axes, GroupNormBackwardPlan, _Groups, "groups", "SymInt")
group_norm_op = Recorded(
    "group_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, SymInt groups, float eps) -> (Tensor out, Tensor mean, Tensor rstd)",
    _group_kernel,
    _group_fake,
    axes=_group_axes,
    setup=_group_setup,
    backward=lambda ctx, *grads: (*_group_grad(ctx, *grads), None, None),
)
