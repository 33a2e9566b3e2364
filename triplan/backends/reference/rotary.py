"""Rotary position embedding in plain torch, from its definition: shares no computation with the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from triplan.backends.table import CheckRules, reference
from triplan.backends.triton.common import bounds
from triplan.descriptors import CachedRotaryDescriptor, RotaryDescriptor
from triplan.descriptors.fields import NO_BAD_INDEX
from triplan.descriptors.rotary import AnyRotaryDescriptor
from triplan.sku import Duplicates, ElementKind, PrecisionGuarantee

FLOATS = ("f16", "bf16", "f32", "f64")
#: Roundings on the path of a term: torch's cos or sin (2 units in the last place are 4 roundings), scale, the product
#: and the sum; twice, as the float64 oracle has as many.
ROUNDINGS = 2 * (4 + 3)

#: The smallest frequency, besides 0, that plans are tested with.
LEAST = 2.0**-100


def _guarantee(desc: AnyRotaryDescriptor) -> Mapping[str, PrecisionGuarantee]:
    normed, cached = desc.normed, isinstance(desc, CachedRotaryDescriptor)
    # A norm adds the squares, their sum in torch's order, and six more; the root halves the error of the sum.
    roundings = ROUNDINGS + (desc.q_shape[3] + 12 if normed else 0)
    found = {}
    for o in desc.operands():
        if o.name == "status":
            found[o.name] = PrecisionGuarantee.exact(ElementKind.I64)
        elif o.name == "v_cache":
            found[o.name] = bounds.stored(o.element, Duplicates.LAST)
        elif o.is_written:
            relative, per_term = (roundings, 0) if o.name.endswith("_rstd") else (0, roundings)
            alone, duplicates = not (normed or cached), Duplicates.LAST if o.name == "k_cache" else None
            found[o.name] = bounds.rounded(
                o.element, desc.element.compute, relative, per_term, batch=alone, order=alone, duplicates=duplicates
            )
    return found


def _angles(desc: AnyRotaryDescriptor, x: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    """(cos, sin, bad): cos and sin (batch, sequence, 1, pairs); bad: the positions outside the tables, or None."""
    batch, sequence = desc.q_shape[:2]
    positions = x["positions"] if desc.positions else torch.arange(sequence).expand(batch, sequence)
    if desc.table_rows is None:
        compute = desc.element.compute.torch
        angle = (positions.to(compute).unsqueeze(-1) * x["inv_freq"].to(compute)).to(x["inv_freq"].dtype)
        scale = 1.0 if x.get("scale") is None else x["scale"]
        return (angle.cos() * scale).unsqueeze(2), (angle.sin() * scale).unsqueeze(2), None
    last = desc.table_rows - 1
    if desc.out_of_bounds == "clamp" and last >= 0:
        positions = positions.clamp(0, last)
    bad = (positions < 0) | (positions > last)
    if last < 0:
        zeros = x["cos"].new_zeros(batch, sequence, 1, desc.half)
        return zeros, zeros, bad
    rows = positions.masked_fill(bad, 0).long()
    tables = (x[name][torch.arange(batch).unsqueeze(1), rows] for name in ("cos", "sin"))
    cos, sin = (t.masked_fill(bad.unsqueeze(-1), 0).unsqueeze(2) for t in tables)
    return cos, sin, bad


def _pairs(desc: AnyRotaryDescriptor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the first and the second element of each pair of ``x``."""
    if desc.pairs == "half":
        return x[..., : desc.half], x[..., desc.half : 2 * desc.half]
    return x[..., 0 : 2 * desc.half : 2], x[..., 1 : 2 * desc.half : 2]


def _rotated(desc: AnyRotaryDescriptor, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = x.clone()
    (first, second), (of_first, of_second) = _pairs(desc, x), _pairs(desc, out)
    of_first.copy_(first * cos - second * sin)
    of_second.copy_(second * cos + first * sin)
    return out


def _terms(desc: AnyRotaryDescriptor, x: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """|x * cos| + |y * sin| and |y * cos| + |x * sin|; elements that are only copied are their own terms."""
    cos, sin, _ = _angles(desc, x)
    found = {}
    for name in _rotating(desc):
        values = _normed(desc, x, name)[0]
        t = found[f"{name}_out"] = values.clone()
        (first, second), (of_first, of_second) = _pairs(desc, values), _pairs(desc, t)
        of_first.copy_(first * cos.abs() + second * sin.abs())
        of_second.copy_(second * cos.abs() + first * sin.abs())
    return _cached(desc, x, found)


def _inputs(desc: AnyRotaryDescriptor, x: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Frequencies are 0, or so large that angles, and their sines times ``scale``, are normal numbers."""
    f = x.get("inv_freq")
    return {} if f is None else {"inv_freq": f.masked_fill(f.abs() < LEAST, 0)}


def _rotating(desc: AnyRotaryDescriptor) -> tuple[str, ...]:
    return ("q",) if desc.k_heads is None else ("q", "k")


def _normed(desc: AnyRotaryDescriptor, x: Mapping[str, Any], name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """(the values to rotate, rstd by operand name): normed values if the op has a norm."""
    if isinstance(desc, RotaryDescriptor) or desc.eps is None:
        return x[name], {}
    rstd = 1 / (x[name].square().mean(-1) + desc.eps).sqrt()
    statistics = {} if isinstance(desc, CachedRotaryDescriptor) else {f"{name}_rstd": rstd}
    return x[name] * rstd.unsqueeze(-1) * x[f"{name}_weight"], statistics


def _cached(desc: AnyRotaryDescriptor, x: Mapping[str, Any], found: dict[str, Tensor]) -> dict[str, Tensor]:
    """``found`` with the caches in place of ``k_out``: in each slot the last of its tokens, else what was there."""
    if not isinstance(desc, CachedRotaryDescriptor):
        return found
    slots = x["slots"].reshape(-1).long()
    written = ((slots >= 0) & (slots < desc.slots)).nonzero()[:, 0]
    last = slots.new_full((desc.slots,), -1).scatter_reduce(0, slots[written], written, "amax")
    taken = (last >= 0).nonzero()[:, 0]
    for name, rows in (("k_cache", found.pop("k_out")), ("v_cache", x["v"])):
        cache = x[name].flatten(0, 1).clone()
        cache[taken] = rows.flatten(0, 1)[last[taken]]
        found[name] = cache.reshape(x[name].shape)
    return found


def _rotary(desc: AnyRotaryDescriptor, x: Mapping[str, Any]) -> Mapping[str, Tensor]:
    cos, sin, bad = _angles(desc, x)
    sin = -sin if getattr(desc, "inverse", False) else sin
    found: dict[str, Tensor] = {}
    for name in _rotating(desc):
        values, statistics = _normed(desc, x, name)
        found |= {f"{name}_out": _rotated(desc, values, cos, sin), **statistics}
    if desc.out_of_bounds == "error":
        indices = [x["slots"] >= desc.slots] if isinstance(desc, CachedRotaryDescriptor) else []
        indices += [] if bad is None else [bad]
        wrong = [t.reshape(-1) for t in indices]
        none = torch.tensor([[NO_BAD_INDEX]])
        found["status"] = torch.cat([torch.cat(wrong).nonzero(), none])[0] if wrong else none[0]
    return _cached(desc, x, found)


# A norm is tested with values of unit size: squares of wide ones would leave the range of f32.
for _op, _passes in {"rotary": None, "normed_rotary": ("unit",), "cached_rotary": ("unit",)}.items():
    _rules = CheckRules(terms=_terms, inputs=_inputs, passes=_passes)
    reference(op=_op, elements=FLOATS, index_elements=("i32", "i64"), guarantee=_guarantee, checks=_rules)(_rotary)
