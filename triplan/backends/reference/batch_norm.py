"""Batch and group normalisation in plain torch, from the definitions; statistics are centred twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from triplan.backends.table import CheckRules, reference
from triplan.backends.triton.common import bounds
from triplan.descriptors import (
    BatchNormBackwardDescriptor,
    BatchNormDescriptor,
    GroupNormBackwardDescriptor,
    GroupNormDescriptor,
)
from triplan.descriptors.batch_norm import BatchNormProblem, GroupNormProblem
from triplan.sku import PrecisionGuarantee

FLOATS = ("f16", "bf16", "f32", "f64")
#: Of the statistics that the backward op is checked with.
EPS = 1e-5
Tensors = Mapping[str, Any]


def _mean(v: Tensor) -> Tensor:
    return v.mean((0, 2), keepdim=True)


def _of_channels(x: Tensors, name: str, absent: float) -> Tensor | float:
    """An operand with one number a channel, as it broadcasts against images."""
    return absent if x.get(name) is None else x[name][:, None]


def _centred(v: Tensor) -> tuple[Tensor, Tensor]:
    """(mean of each channel, deviations from it): the rounding of the first mean is taken off."""
    first = _mean(v)
    rest = _mean(v - first)
    return first + rest, v - first - rest


def _normalised(desc: BatchNormDescriptor, x: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, variance, deviations) of each channel, that are used."""
    if desc.training:
        mean, deviations = _centred(x["x"])
        return mean, _mean(deviations**2), deviations
    mean = x["running_mean"][:, None]
    return mean, x["running_var"][:, None], x["x"] - mean


def batch_norm(desc: BatchNormDescriptor, x: Tensors) -> Tensors:
    mean, var, deviations = _normalised(desc, x)
    rstd = 1 / (var + desc.eps).sqrt()
    out = deviations * rstd * _of_channels(x, "weight", 1) + _of_channels(x, "bias", 0)
    if desc.relu:
        out = out + x["residual"] if desc.residual else out
        out = torch.where(out <= 0, 0, out)
    found = {"out": out, "mean": mean.flatten(), "rstd": rstd.flatten()}
    if desc.training and desc.running:
        momentum = 0.1 if x.get("momentum") is None else x["momentum"]
        unbiased = (deviations**2).sum((0, 2)) / (desc.count - 1) if desc.count > 1 else var.flatten() * torch.nan
        found["next_mean"] = (1 - momentum) * x["running_mean"] + momentum * mean.flatten()
        found["next_var"] = (1 - momentum) * x["running_var"] + momentum * unbiased
    return found


def _results(desc: BatchNormBackwardDescriptor, found: Tensors) -> Tensors:
    written = {o.name for o in desc.operands() if o.is_written}
    return {name: t for name, t in found.items() if name in written}


def _passed(desc: BatchNormBackwardDescriptor, x: Tensors) -> Tensor:
    """The gradient of what relu was of."""
    dout: Tensor = x["dout"]
    return torch.where(x["out"] <= 0, 0, dout) if desc.relu else dout


def batch_norm_backward(desc: BatchNormBackwardDescriptor, x: Tensors) -> Tensors:
    dout, rstd = _passed(desc, x), x["rstd"][:, None]
    hat = (x["x"] - x["mean"][:, None]) * rstd
    dx = dout - _mean(dout) - hat * _mean(dout * hat) if desc.training else dout
    dx = dx * rstd * _of_channels(x, "weight", 1)
    found = {"dx": dx, "dweight": (dout * hat).sum((0, 2)), "dbias": dout.sum((0, 2)), "dresidual": dout}
    return _results(desc, found)


# --- what checks must know: statistics, and sum|terms| ---


def _not_negative(desc: BatchNormDescriptor, x: Tensors) -> Tensors:
    return {"running_var": x["running_var"].abs()} if desc.running else {}


def _statistics(desc: BatchNormBackwardDescriptor, x: Tensors) -> Tensors:
    """What the forward op gives of ``x``."""
    mean, deviations = _centred(x["x"].double())
    found = {"mean": mean.flatten(), "rstd": 1 / (_mean(deviations**2).flatten() + EPS).sqrt()}
    if desc.relu:
        found["out"] = torch.where(deviations <= 0, 0, x["out"].double().abs())
    return {name: t.to(desc.operand(name).element.torch) for name, t in found.items()}


def _errors(desc: BatchNormDescriptor, x: Tensors) -> Tensors:
    """A mean is off by roundings of the mean size; a variance by such of itself, and of its root times that size."""
    mean, var, deviations = _normalised(desc, x)
    size = _mean(x["x"].abs()) if desc.training else torch.zeros_like(mean)
    rstd = 1 / (var + desc.eps).sqrt()
    off, spread = 1 + size * rstd, deviations.abs()
    weight, bias = (_of_channels({k: v.abs() for k, v in x.items() if torch.is_tensor(v)}, *of) for of in
                    (("weight", 1), ("bias", 0)))  # fmt: skip
    out = weight * rstd * (spread * (1 + off) + size) + bias
    out = out + x["residual"].abs() if desc.residual else out
    found = {"out": out, "mean": (size + mean.abs()).flatten(), "rstd": (rstd * off).flatten()}
    if desc.training and desc.running:
        momentum = 0.1 if x.get("momentum") is None else x["momentum"]
        part, whole = abs(momentum), abs(momentum) + abs(1 - momentum)
        share = desc.count / max(desc.count - 1, 1)
        found["next_mean"] = whole * x["running_mean"].abs() + part * size.flatten()
        found["next_var"] = whole * x["running_var"].abs() + part * share * (var + 2 * var.sqrt() * size).flatten()
    return found


def _terms(desc: BatchNormBackwardDescriptor, x: Tensors) -> Tensors:
    dout, rstd = _passed(desc, x), x["rstd"][:, None]
    hat = (x["x"] + x["mean"][:, None]) * rstd
    dx = dout + _mean(dout) + hat * _mean(dout * hat) if desc.training else dout
    dx = dx * rstd * _of_channels(x, "weight", 1)
    found = {"dx": dx, "dweight": (dout * hat).sum((0, 2)), "dbias": dout.sum((0, 2)), "dresidual": dout}
    return _results(desc, found)


def _guarantee(desc: BatchNormProblem) -> Mapping[str, PrecisionGuarantee]:
    """Elements may be added one by one. Never batch-invariant: torch may divide sums as the batch asks."""
    each = 8 * desc.count + 48 + desc.residual
    return {
        o.name: bounds.rounded(o.element, desc.element.compute, 8, each, order=not desc.sums)
        for o in desc.operands()
        if o.is_written
    }


# --- groups: their channels and pixels are those of one channel of as many images ---


def _rows(desc: GroupNormProblem, t: Tensor) -> Tensor:
    """Images as (1, batch * groups, elements of a group)."""
    return t.reshape(1, desc.batch * desc.groups, desc.count)


def _spread(desc: GroupNormProblem, x: Tensors, name: str, absent: float) -> Tensor | float:
    """The weight or bias of each element, in rows."""
    if x.get(name) is None:
        return absent
    return _rows(desc, x[name][:, None].expand(desc.batch, desc.channels, desc.pixels))


def group_norm(desc: GroupNormDescriptor, x: Tensors) -> Tensors:
    mean, deviations = _centred(_rows(desc, x["x"]))
    rstd = 1 / (_mean(deviations**2) + desc.eps).sqrt()
    out = deviations * rstd * _spread(desc, x, "weight", 1) + _spread(desc, x, "bias", 0)
    of = (desc.batch, desc.groups)
    return {"out": out.reshape(x["x"].shape), "mean": mean.reshape(of), "rstd": rstd.reshape(of)}


def _group_statistics(desc: GroupNormBackwardDescriptor, x: Tensors) -> Tensors:
    mean, deviations = _centred(_rows(desc, x["x"].double()))
    found = {"mean": mean, "rstd": 1 / (_mean(deviations**2) + EPS).sqrt()}
    return {name: t.reshape(desc.batch, desc.groups).to(desc.element.compute.torch) for name, t in found.items()}


def _group_errors(desc: GroupNormDescriptor, x: Tensors) -> Tensors:
    """As ``_errors``."""
    v = _rows(desc, x["x"])
    _, deviations = _centred(v)
    size, rstd = _mean(v.abs()), 1 / (_mean(deviations**2) + desc.eps).sqrt()
    off, wide = 1 + size * rstd, {k: t.abs() for k, t in x.items()}
    out = _spread(desc, wide, "weight", 1) * rstd * (deviations.abs() * (1 + off) + size)
    out = out + _spread(desc, wide, "bias", 0)
    of = (desc.batch, desc.groups)
    return {"out": out.reshape(x["x"].shape), "mean": size.reshape(of), "rstd": (rstd * off).reshape(of)}


def _group_backward(desc: GroupNormBackwardDescriptor, x: Tensors, sign: int) -> Tensors:
    """``sign``: -1 for the gradients, 1 for sum|terms| of absolute values."""
    dout, v = (_rows(desc, x[name]) for name in ("dout", "x"))
    mean, rstd = (x[name].reshape(1, desc.batch * desc.groups, 1) for name in ("mean", "rstd"))
    hat, g = (v + sign * mean) * rstd, dout * _spread(desc, x, "weight", 1)

    def mean_of(t: Tensor) -> Tensor:
        return t.mean(2, keepdim=True)

    shape = x["x"].shape
    dx = (g + sign * (mean_of(g) + hat * mean_of(g * hat))) * rstd
    found = {"dx": dx.reshape(shape), "dweight": (dout * hat).reshape(shape).sum((0, 2))}
    written = {o.name for o in desc.operands() if o.is_written}
    return {name: t for name, t in {**found, "dbias": x["dout"].sum((0, 2))}.items() if name in written}


def _group_guarantee(desc: GroupNormProblem) -> Mapping[str, PrecisionGuarantee]:
    """As ``_guarantee``; gradients of weight and bias are sums over the images."""
    terms = {"dweight": desc.batch * desc.pixels, "dbias": desc.batch * desc.pixels}
    return {
        o.name: bounds.rounded(o.element, desc.element.compute, 8, 8 * terms.get(o.name, desc.count) + 48)
        for o in desc.operands()
        if o.is_written
    }


# Squares and products of wide values would leave the range of f32.
reference(
    op="batch_norm",
    elements=FLOATS,
    guarantee=_guarantee,
    checks=CheckRules(_errors, _not_negative, ("unit",), signed=True),
)(batch_norm)
reference(
    op="batch_norm_backward", elements=FLOATS, guarantee=_guarantee, checks=CheckRules(_terms, _statistics, ("unit",))
)(batch_norm_backward)
reference(
    op="group_norm",
    elements=FLOATS,
    guarantee=_group_guarantee,
    checks=CheckRules(_group_errors, None, ("unit",), signed=True),
)(group_norm)
reference(
    op="group_norm_backward",
    elements=FLOATS,
    guarantee=_group_guarantee,
    checks=CheckRules(lambda desc, x: _group_backward(desc, x, 1), _group_statistics, ("unit",)),
)(lambda desc, x: _group_backward(desc, x, -1))
