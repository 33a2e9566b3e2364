"""Optimizer steps in plain torch, from the published rules, and how far rounding may move them; clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from triplan.backends.reference.expressions.evaluate import running, values
from triplan.backends.reference.philox import MASK, philox
from triplan.backends.table import CheckRules, reference
from triplan.backends.triton.optim import clip, pointwise, total
from triplan.backends.triton.optim.update import ELEMENTS, RULES, guarantee
from triplan.descriptors.optim import ClipDescriptor, ListExpressionDescriptor, TotalNormDescriptor, UpdateDescriptor
from triplan.sku import ElementKind, PrecisionGuarantee

U = ElementKind.F32.unit_roundoff
TINY = float(torch.finfo(torch.float32).tiny)
#: From here on a square may overflow f32, in which elements are computed.
LARGEST = float(torch.finfo(torch.float32).max) / 2
#: Typical hyperparameters, by name.
USUAL = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.3}

Values = Mapping[str, Any]
Found = dict[str, Tensor]


def _numbers(desc: UpdateDescriptor, given: Values) -> tuple[dict[str, Tensor], Tensor]:
    """(``hyper`` by name, t of each element): t is the number of this update, in float64."""
    t = given["steps"].double() + 1
    # Of one tensor nothing is copied, so that the bench can capture it in a CUDA graph.
    one = len(desc.sizes) == 1
    each = t.expand(*desc.sizes) if one else t.repeat_interleave(torch.tensor(desc.sizes, dtype=torch.int64))
    return dict(zip(desc.hyper, given["hyper"], strict=True)), each


def _gradient(desc: UpdateDescriptor, given: Values) -> Tensor:
    g: Tensor = given["grad"] / given["grad_scale"] if desc.scaled else given["grad"]
    return -g if desc.maximize else g


def _adam(desc: Any, given: Values) -> Found:
    h, t = _numbers(desc, given)
    p, g = given["param"], _gradient(desc, given)
    if desc.decoupled:
        p = p - h["lr"] * h["weight_decay"] * p
    else:
        g = g + h["weight_decay"] * p
    m = h["beta1"] * given["exp_avg"] + (1 - h["beta1"]) * g
    v = h["beta2"] * given["exp_avg_sq"] + (1 - h["beta2"]) * g * g
    top = torch.maximum(given["max_exp_avg_sq"], v) if desc.amsgrad else v
    root = (top / (1 - h["beta2"] ** t)).sqrt()
    found = {"param": p - h["lr"] * (m / (1 - h["beta1"] ** t)) / (root + h["eps"]), "exp_avg": m, "exp_avg_sq": v}
    return found | ({"max_exp_avg_sq": top} if desc.amsgrad else {})


def _sgd(desc: Any, given: Values) -> Found:
    h, t = _numbers(desc, given)
    p = given["param"]
    g = _gradient(desc, given) + h["weight_decay"] * p
    if not desc.momentum:
        return {"param": p - h["lr"] * g}
    b = torch.where(t == 1, g, h["momentum"] * given["momentum_buffer"] + (1 - h["dampening"]) * g)
    return {"param": p - h["lr"] * (g + h["momentum"] * b if desc.nesterov else b), "momentum_buffer": b}


def _lion(desc: Any, given: Values) -> Found:
    h, _ = _numbers(desc, given)
    p, m, g = given["param"], given["exp_avg"], _gradient(desc, given)
    c = h["beta1"] * m + (1 - h["beta1"]) * g
    sign = torch.where(c.isnan(), c, c.sign())
    return {
        "param": p * (1 - h["lr"] * h["weight_decay"]) - h["lr"] * sign,
        "exp_avg": h["beta2"] * m + (1 - h["beta2"]) * g,
    }


STEPS = {"adam": _adam, "sgd": _sgd, "lion": _lion}


def _step(desc: UpdateDescriptor, given: Values) -> Found:
    skipped = desc.scaled and bool(given["found_inf"] != 0)
    found = {name: given[name] for name in ("param", *desc.kept)} if skipped else STEPS[desc.op](desc, given)
    if desc.copy_element:
        found["copy"] = given["copy"] if skipped else found["param"]
    if desc.stochastic and not skipped:
        found["param"] = _rounded_at_random(desc, found["param"], given)
    return {**found, "steps": given["steps"] if skipped else given["steps"] + 1}


def _rounded_at_random(desc: UpdateDescriptor, p: Tensor, given: Values) -> Tensor:
    """The upper half of f32's bits after 16 random bits are added to the lower one."""
    places = [torch.arange(n) for n in desc.sizes]
    at = torch.cat(places) if places else torch.zeros(0, dtype=torch.int64)
    tensor = torch.arange(len(desc.sizes)).repeat_interleave(torch.tensor(desc.sizes, dtype=torch.int64))
    _, t = _numbers(desc, given)
    seed = given["seed"]
    words = philox([at >> 3 & MASK, at >> 35, t.long(), tensor], (seed & MASK, seed >> 32 & MASK))
    word = torch.stack(words).gather(0, (at >> 1 & 3)[None])[0]
    bits = p.float().view(torch.int32).long() & MASK
    bits = bits + (word >> (at & 1) * 16 & 0xFFFF) & MASK & ~0xFFFF
    upper = torch.where(bits >= 2**31, bits - 2**32, bits).int().view(torch.float32)
    return torch.where(p.isnan(), p, upper.to(p.dtype))


# --- how far rounding may move results, in units of roundoff: numbers of roundings times absolute terms ---


def _of_adam(desc: Any, given: Values) -> Found:
    h, t = _numbers(desc, given)
    p, g, m0, v0 = (given[name].abs() for name in ("param", "grad", "exp_avg", "exp_avg_sq"))
    g = g / given["grad_scale"].abs() if desc.scaled else g
    g = g if desc.decoupled else g + h["weight_decay"].abs() * p
    m = h["beta1"] * m0 + (1 - h["beta1"]) * g
    v = h["beta2"] * v0 + (1 - h["beta2"]) * g * g
    off_m, off_v = 8 * m + 4 * TINY / U, 12 * v + 4 * TINY / U
    after = _adam(desc, given)
    top = after["max_exp_avg_sq" if desc.amsgrad else "exp_avg_sq"].clamp(min=0)
    second, first = 1 - h["beta2"] ** t, 1 - h["beta1"] ** t
    # |sqrt(v + d) - sqrt(v)| <= min(sqrt(d), d / sqrt(v))
    off_root = torch.minimum((U * off_v).sqrt() / U, off_v / top.sqrt()) / second.sqrt()
    denominator = (top / second).sqrt() + h["eps"]
    moved = (after["exp_avg"].abs() * h["lr"] / first / denominator).nan_to_num(0.0, posinf=0.0)
    off_quotient = h["lr"] / first * off_m / denominator + 2 * moved * (off_root / denominator) + 16 * moved
    off_quotient = torch.where(U * off_root * 2 > denominator, torch.inf, off_quotient).nan_to_num(
        0.0, posinf=torch.inf
    )
    known = torch.where((v > LARGEST) & v.isfinite(), torch.inf, 0.0)
    found = {"param": 6 * p + off_quotient + 4 * TINY / U + known, "exp_avg": off_m, "exp_avg_sq": off_v + known}
    return found | ({"max_exp_avg_sq": off_v + given["max_exp_avg_sq"].abs() + known} if desc.amsgrad else {})


def _of_sgd(desc: Any, given: Values) -> Found:
    h, t = _numbers(desc, given)
    h = {name: x.abs() for name, x in h.items()}
    p, g = given["param"].abs(), given["grad"].abs()
    g = (g / given["grad_scale"].abs() if desc.scaled else g) + h["weight_decay"] * p
    if not desc.momentum:
        return {"param": 4 * p + 8 * h["lr"] * g + 4 * TINY / U}
    b = torch.where(t == 1, g, h["momentum"] * given["momentum_buffer"].abs() + (1 + h["dampening"]) * g)
    d = g + h["momentum"] * b if desc.nesterov else b
    return {"param": 4 * p + 16 * h["lr"] * d + 4 * TINY / U, "momentum_buffer": 10 * b + 4 * TINY / U}


def _of_lion(desc: Any, given: Values) -> Found:
    h, _ = _numbers(desc, given)
    p, m, g = (given[name].abs() for name in ("param", "exp_avg", "grad"))
    g = g / given["grad_scale"].abs() if desc.scaled else g
    raw, signed = _gradient(desc, given), h["beta1"] * given["exp_avg"]
    c, off = signed + (1 - h["beta1"]) * raw, 8 * (h["beta1"] * m + (1 - h["beta1"]) * g) + 4 * TINY / U
    turned = torch.where((c.abs() <= U * off) & (c != 0), 2 * h["lr"] / U, 0.0)  # rounding may flip the sign
    exact = (signed == 0) & (raw == 0)
    turned = torch.where((c == 0) & ~exact, h["lr"] / U, turned)
    return {
        "param": 6 * p + 2 * h["lr"] + turned + 4 * TINY / U,
        "exp_avg": 8 * (h["beta2"] * m + (1 - h["beta2"]) * g) + 4 * TINY / U,
    }


TERMS = {"adam": _of_adam, "sgd": _of_sgd, "lion": _of_lion}


def _terms(desc: UpdateDescriptor, given: Values) -> Found:
    if desc.scaled and bool(given["found_inf"] != 0):
        return {name: torch.zeros_like(given[name]) for name in desc.streams if name != "grad"}
    found = {name: x.nan_to_num(0.0, posinf=torch.inf) for name, x in TERMS[desc.op](desc, given).items()}
    return found | ({"copy": found["param"]} if desc.copy_element else {})


def _usual(desc: UpdateDescriptor, given: Values) -> Found:
    """Typical hyperparameters, and averages of squares that are not negative."""
    count = len(desc.sizes)
    found = {
        "hyper": torch.tensor([USUAL[name] for name in desc.hyper], dtype=torch.float64),
        # A count that takes most bits of an f32, and the first and the second update.
        "steps": torch.tensor([2.0**22 + 1, 0.0, 1.0])[torch.arange(count) % 3],
        **{name: given[name].abs() for name in desc.kept if name.endswith("_sq")},
    }
    return found | ({"grad_scale": torch.tensor([4.0]), "found_inf": torch.zeros(1)} if desc.scaled else {})


for _op in RULES:
    reference(
        op=_op,
        elements=ELEMENTS,
        guarantee=guarantee,
        checks=CheckRules(terms=_terms, inputs=_usual, signed=True),
    )(_step)


# --- clipping ---


def _total_guarantee(desc: TotalNormDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Elements may be added one by one."""
    return total.guarantee(desc) if math.isinf(desc.order) else {"norm": total.of_order(desc.order, sum(desc.sizes))}


@reference(op="total_norm", elements=ELEMENTS, guarantee=_total_guarantee, checks=CheckRules(CheckRules.no_terms))
def _total_norm(desc: TotalNormDescriptor, given: Values) -> Found:
    parts = given["x"].split(list(desc.sizes)) if desc.each else [given["x"]]
    found = [_norm(x.double().abs(), desc.order) for x in parts]
    return {"norm": torch.cat(found) if found else torch.empty(0, dtype=torch.float64)}


def _norm(x: Tensor, order: float) -> Tensor:
    if math.isinf(order):
        # torch has no extremum of no elements.
        x = torch.cat((x, torch.tensor([0.0 if order > 0 else math.inf])))
        found = x.amax() if order > 0 else x.amin()
    else:
        x = torch.cat((torch.zeros(1, dtype=torch.float64), x.pow(order)))
        # In rows: how torch sums many elements of one row depends on its number of threads.
        while x.numel() > 1:
            x = torch.cat((x, x.new_zeros(-x.numel() % 1024))).view(-1, 1024).sum(1)
        found = x.pow(1 / order)
    return found.reshape(1)


def _clipped(desc: ClipDescriptor, given: Values) -> Found:
    x, limit = given["x"].double(), given["limit"]
    if desc.op == "clip_value":
        return {"x": x.clamp_min(-limit).clamp_max(limit)}
    return {"x": x * (limit / (given["norm"].double() + 1e-6)).clamp_max(1.0)}


for _op in ClipDescriptor.ops():
    reference(
        op=_op,
        elements=ELEMENTS,
        guarantee=clip.guarantee,
        checks=CheckRules(
            CheckRules.no_terms, lambda desc, x: {"norm": x["norm"].abs()} if desc.op == "clip_norm" else {}
        ),
    )(_clipped)


# --- expressions ---


def _names(desc: ListExpressionDescriptor) -> list[str]:
    return [name for name, _, _ in desc.results]


@reference(
    op="list_expression",
    elements=pointwise.ELEMENTS,
    guarantee=pointwise.guarantee,
    checks=CheckRules(terms=lambda desc, given: running(desc, given, _names(desc)), signed=True),
)
def _expressions(desc: ListExpressionDescriptor, given: Values) -> Found:
    return values(desc, given, _names(desc))
