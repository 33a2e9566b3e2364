"""Random values for operands, by kind of pass, all drawn on the CPU from one generator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch

from triplan.descriptors import Operand
from triplan.sku import ElementKind

#: Kinds of values.
#: ``unit``: normally distributed floats of variance 1.
#: ``wide``: exponents over the element's whole range, zeros of both signs, subnormals.
#: ``special``: ``wide`` with infinities and NaNs.
#: ``bits``: any bit pattern, for ops that only move elements.
#: ``integers``: small integers, whose products and sums are exact.
Values = Literal["unit", "wide", "special", "bits", "integers"]
#: Kinds of indices. ``valid``: within their extents, with repeats. ``hostile``: valid ones and any others.
#: ``distinct``: no two have the same destination.
Indices = Literal["valid", "hostile", "distinct"]


def draw(shape: Sequence[int], element: ElementKind, kind: Values, terms: int, g: torch.Generator) -> torch.Tensor:
    """A CPU tensor of ``element``. In ``wide``, the sum of ``terms`` of its values does not overflow."""
    shape = tuple(shape)
    if element is ElementKind.BOOL:
        return torch.randint(0, 2, shape, generator=g).to(torch.bool)
    if kind == "bits":
        return _random_bits(shape, element, g)
    if not element.is_floating_point:
        return _integers(shape, element, kind, g)
    if kind == "integers":
        return torch.randint(-4, 5, shape, generator=g).to(element.torch)
    unit = torch.randn(shape, generator=g, dtype=torch.float64)
    if kind == "unit":
        return unit.to(element.torch)
    info = torch.finfo(element.torch)
    # Leaves a factor of 4 * terms below the largest value: only ``special`` is to overflow.
    high = max(math.frexp(info.max)[1] - 4 - max(terms, 1).bit_length(), math.frexp(info.tiny)[1] + 1)
    low = math.frexp(info.tiny)[1] + math.frexp(info.eps)[1]
    exponent = torch.randint(low, high + 1, shape, generator=g)
    # Two factors, because 2.0**exponent may overflow or underflow in float64.
    half = exponent // 2
    out = (unit.clamp(-2, 2) * 2.0**half * 2.0 ** (exponent - half)).to(element.torch)
    dice = torch.rand(shape, generator=g)
    out = torch.where(dice < 0.06, torch.zeros((), dtype=out.dtype), out)
    out = torch.where(dice < 0.03, -torch.zeros((), dtype=out.dtype), out)
    if kind == "special":
        out = torch.where(dice > 0.94, torch.full((), math.inf, dtype=torch.float64).to(out.dtype), out)
        out = torch.where(dice > 0.96, torch.full((), -math.inf, dtype=torch.float64).to(out.dtype), out)
        out = torch.where(dice > 0.98, torch.full((), math.nan, dtype=torch.float64).to(out.dtype), out)
    return out


def _random_bits(shape: tuple[int, ...], element: ElementKind, g: torch.Generator) -> torch.Tensor:
    raw = torch.randint(0, 256, (*shape, element.itemsize), generator=g, dtype=torch.uint8)
    if element.is_floating_point:
        # Some exponents of all ones: infinities, and NaNs with payloads, including signalling ones.
        special = torch.rand(shape, generator=g) < 0.1
        if element.itemsize > 1:
            raw[..., -1] = torch.where(special, raw[..., -1] | 0x7F, raw[..., -1])
            raw[..., -2] = torch.where(special, raw[..., -2] | 0xF0, raw[..., -2])
        zero = torch.rand(shape, generator=g) < 0.15
        raw[zero] = 0
        raw[..., -1] |= (zero & (torch.rand(shape, generator=g) < 0.5)).to(torch.uint8) << 7  # of either sign
    return raw.view(element.torch).reshape(shape)


def _integers(shape: tuple[int, ...], element: ElementKind, kind: Values, g: torch.Generator) -> torch.Tensor:
    info = torch.iinfo(element.torch)
    if kind in ("integers", "unit"):
        return torch.randint(max(-4, info.min), 5, shape, generator=g).to(element.torch)
    out = _random_bits(shape, element, g)
    dice = torch.rand(shape, generator=g)
    for share, edge in ((0.1, info.min), (0.07, info.max), (0.04, 0)):
        out = torch.where(dice < share, torch.full((), edge, dtype=out.dtype), out)
    return out


def draw_scalar(o: Operand, kind: Values, g: torch.Generator) -> Any:
    """A host scalar: a Python number that ``o.element`` represents exactly; sometimes None if ``o`` is optional."""
    choices: list[float | int | None] = [0, 1, -1, 2, 3]
    if kind != "integers" and o.element.is_floating_point:
        choices += [0.5, -2.5, float(torch.tensor(0.1, dtype=o.element.torch).item())]
    elif kind != "integers":
        info = torch.iinfo(o.element.torch)
        choices += [7, info.min, info.max]
    if o.optional:
        choices.append(None)
    return choices[int(torch.randint(len(choices), (), generator=g))]


def draw_indices(o: Operand, how: Indices, wrap: bool, g: torch.Generator) -> list[torch.Tensor]:
    """One CPU tensor for each of ``o.index_extents``. An extent of 0 has no valid index, so all are out of bounds."""
    if how == "distinct":
        return _distinct(o, wrap, g)
    found = []
    info = torch.iinfo(o.element.torch)
    for n in o.index_extents:
        # Half of the indices are among three, so that many repeat.
        at = torch.randint(0, max(n, 1), o.shape, generator=g)
        hot = torch.randint(0, max(n, 1), (3,), generator=g)[torch.randint(0, 3, o.shape, generator=g)]
        at = torch.where(torch.rand(o.shape, generator=g) < 0.5, hot, at)
        if wrap:
            at = torch.where(torch.rand(o.shape, generator=g) < 0.4, at - n, at)
        if how == "hostile" or n == 0:
            bad = torch.tensor([-1, n, -n, -n - 1, n + 1, info.min, info.max, info.min + 1, 2**31 - 1, -(2**31)])
            pick = bad[torch.randint(0, len(bad), o.shape, generator=g)].clamp(info.min, info.max)
            at = torch.where(torch.rand(o.shape, generator=g) < (1.0 if n == 0 else 0.25), pick, at)
        found.append(at.to(o.element.torch))
    return found


def _distinct(o: Operand, wrap: bool, g: torch.Generator) -> list[torch.Tensor]:
    """Indices without repeats along the axes that are not batch axes; those in excess lie outside the extents."""
    meeting = [a for a in range(len(o.shape)) if a not in o.batch_axes] or list(range(len(o.shape)))
    lanes = [a for a in range(len(o.shape)) if a not in meeting]
    count, rows = math.prod(o.shape[a] for a in meeting), math.prod(o.shape[a] for a in lanes)
    slots = math.prod(o.index_extents)
    flat = torch.full((rows, count), slots)
    for row in range(rows):
        order = torch.randperm(max(slots, count), generator=g)[:count]
        flat[row] = torch.where(order < slots, order, slots)
    order_of_axes = [*lanes, *meeting]
    flat = flat.reshape([o.shape[a] for a in order_of_axes]).permute(
        [order_of_axes.index(a) for a in range(len(o.shape))]
    )
    outside = flat == slots
    found: list[torch.Tensor] = []
    for n in reversed(o.index_extents):
        at = torch.where(outside, n, flat % max(n, 1))
        if wrap:
            at = torch.where((torch.rand(o.shape, generator=g) < 0.4) & ~outside, at - n, at)
        found.insert(0, at.to(o.element.torch))
        flat = flat // max(n, 1)
    return found
