"""Random numbers in plain torch, in 64-bit integers and float64: shares no computation with the kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from triplan.backends.reference.philox import MASK, philox, product
from triplan.backends.table import CheckRules, reference
from triplan.backends.triton.common import bounds
from triplan.descriptors import RandomDescriptor, packed_strides
from triplan.descriptors.random import INTEGERS
from triplan.sku import ElementKind, PrecisionGuarantee

#: Roundings on the path of a term: torch's functions are within 2 units in the last place, which are 4 roundings.
ROUNDINGS = {"uniform": 3, "normal": 20, "exponential": 8, "dropout": 4}
F64 = torch.float64


def guarantee(desc: RandomDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Batch-invariant: an element depends on its index alone. Not order-invariant: other indices give other numbers."""
    roundings, compute = ROUNDINGS.get(desc.op), desc.element.compute
    if roundings is None:
        return {"out": PrecisionGuarantee.exact(desc.element).replace(order_invariant=False)}
    kept = {"kept": PrecisionGuarantee.exact(ElementKind.I64)} if desc.keeps_state else {}
    return {"out": bounds.rounded(desc.element, compute, roundings, batch=True), **kept}


def _index(desc: RandomDescriptor, x: Mapping[str, Any]) -> Tensor:
    """Each element's index in the stream, modulo 2**64."""
    found = torch.full(desc.out_shape, x.get("first") or 0)
    strides = packed_strides(desc.out_shape if desc.global_shape is None else desc.global_shape)
    for axis, (n, stride) in enumerate(zip(desc.out_shape, strides, strict=True)):
        found += (torch.arange(n) * stride).reshape(-1, *(1,) * (len(desc.out_shape) - 1 - axis))
    return found


def _words(desc: RandomDescriptor, x: Mapping[str, Any], index: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of each element's number; a number of 32 bits is the upper half."""
    seed, offset = (int(n) for n in x["state"]) if desc.state == "device" else (x["seed"], 0)
    offset += x.get("offset") or 0  # of 64 bits, of which the masks below take each half
    each = 2 if desc.is_wide else 4
    counter = (index >> each // 2) & ((1 << (64 - each // 2)) - 1)
    rest = [torch.full_like(index, n & MASK) for n in (offset, offset >> 32)]
    words = torch.stack(philox([counter & MASK, counter >> 32 & MASK, *rest], (seed & MASK, seed >> 32 & MASK)))
    at = (index % each * (4 // each)).unsqueeze(0)
    if desc.is_wide:
        return words.gather(0, at + 1)[0], words.gather(0, at)[0]
    return words.gather(0, at)[0], torch.zeros_like(index)


def _log(desc: RandomDescriptor, words: tuple[Tensor, Tensor]) -> Tensor:
    """-log(u), u in (0, 1): the middle of an interval of 2**-32, or 2**-52."""
    high, low = words
    u = ((high << 20 | low >> 12).to(F64) + 0.5) * 2.0**-52 if desc.is_wide else (high.to(F64) + 0.5) * 2.0**-32
    return -u.log()


def _cosine(words: tuple[Tensor, Tensor], quarters: Tensor) -> Tensor:
    """cos(2 * pi * word / 2**64 - quarters * pi / 2), reduced to an angle near 0 where the result is near 0."""
    word = words[0] << 32 | words[1]
    quadrant = (word + 2**61) >> 62  # the nearest
    angle = (word - (quadrant << 62)).to(F64) * (2 * math.pi * 2.0**-64)
    turned = (quadrant - quarters) % 4
    found = torch.where(turned % 2 == 0, angle.cos(), angle.sin())
    return torch.where((turned == 1) | (turned == 2), -found, found)


def _unit(desc: RandomDescriptor, x: Mapping[str, Any]) -> Tensor:
    """Uniform in [0, 1), exponential of rate 1, or normal of standard deviation 1."""
    index = _index(desc, x)
    if desc.op == "normal":
        of_log, of_angle = (_words(desc, x, index & ~1 | i) for i in (0, 1))
        return (2 * _log(desc, of_log)).sqrt() * _cosine(of_angle, index % 2)
    words = _words(desc, x, index)
    if desc.op == "exponential":
        return _log(desc, words)
    return (words[0] << 21 | words[1] >> 11).to(F64) * 2.0**-53 if desc.is_wide else (words[0] >> 8).to(F64) * 2.0**-24


def _down(v: Tensor, element: ElementKind) -> Tensor:
    """``v`` rounded down to f16 or bf16."""
    digits, least = (11, -24) if element is ElementKind.F16 else (8, -133)
    unit = torch.ldexp(torch.ones_like(v), (torch.frexp(v)[1] - digits).clamp_min(least))
    return (v / unit).floor() * unit


def _random(desc: RandomDescriptor, x: Mapping[str, Any]) -> Mapping[str, Tensor]:
    if desc.op in ("uniform", "exponential", "normal"):
        unit = _unit(desc, x)
        if desc.op == "normal":
            return {"out": unit * x["std"] + x["mean"]}
        if desc.op == "exponential":
            return {"out": unit * (1 / torch.tensor(x["lambd"], dtype=F64))}
        compute = desc.element.compute.torch
        below = torch.nextafter(torch.tensor(x["high"], dtype=compute), torch.tensor(-math.inf, dtype=compute))
        v = (unit * (x["high"] - x["low"]) + x["low"]).clamp(max=max(float(below), x["low"]))
        return {"out": _down(v, desc.element) if desc.element.itemsize == 2 else v}
    high, low = _words(desc, x, _index(desc, x))
    if desc.op == "randint":
        span = x["high"] - x["low"]
        s0, s1 = (torch.full_like(high, s) for s in (span & MASK, span >> 32 & MASK))
        (carry, _), (a1, a0), (b1, b0), (c1, c0) = (product(a, b) for a in (low, high) for b in (s0, s1))
        found = (c1 << 32) + c0 + a1 + b1 + ((carry + a0 + b0) >> 32) + x["low"]
        found = found.float() if desc.element.itemsize == 2 and desc.element.is_floating_point else found
        return {"out": found.to(desc.element.torch)}
    threshold = x["x"].to(F64) if desc.op == "bernoulli" else torch.tensor(x["p"], dtype=F64)
    chosen = high.to(F64) < threshold * 2.0**32
    if desc.op != "dropout":
        return {"out": chosen.to(desc.element.torch)}
    kept = {"kept": torch.tensor([x["seed"], x["offset"]])} if desc.keeps_state else {}
    return {"out": (x["x"] * (1 / (1 - threshold)).to(x["x"].dtype)).masked_fill(chosen, 0), **kept}


def _inputs(desc: RandomDescriptor, x: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parameters that torch accepts and that do not make all elements equal."""
    if "p" in x:
        return {"p": abs(x["p"]) % 1 or 0.75}
    if desc.op == "randint":
        low = 0 if desc.element is ElementKind.BOOL else x["low"] % 5
        return {"low": low, "high": low + 2 + (0 if desc.element is ElementKind.BOOL else x["high"] % 7)}
    named = {"uniform": "high", "normal": "std", "exponential": "lambd"}.get(desc.op)
    return {} if named is None else {named: x.get("low", 0) + abs(x[named]) + 0.5}


def _terms(desc: RandomDescriptor, x: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """|mean| + |std * z|, or |low| + |u * (high - low)|. If that f32 sum is then rounded down to 16 bits, tolerances
    are in 16-bit roundoffs: the terms are scaled to these, and |out| is added for the rounding."""
    if desc.op == "normal":
        return {"out": (_unit(desc, x) * x["std"]).abs() + abs(x["mean"])}
    if desc.op == "uniform":
        terms = (_unit(desc, x) * (x["high"] - x["low"])).abs() + abs(x["low"])
        if desc.element.itemsize > 2:
            return {"out": terms}
        return {"out": terms * 2.0**-23 / desc.element.unit_roundoff + _random(desc, x)["out"].abs()}
    return {}


for _op in RandomDescriptor.ops():
    reference(
        op=_op,
        elements=[e for e in ElementKind if not e.value.startswith("fp8") and (e.is_floating_point or _op in INTEGERS)],
        guarantee=guarantee,
        checks=CheckRules(terms=_terms, inputs=_inputs, signed=True),
    )(_random)
