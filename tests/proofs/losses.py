"""The losses' problems for the proofs."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from proofs import Kind, draw, follows, joins
from proofs.rows import LONG_ROWS, Rows


def size(n: int, long: bool) -> tuple[int, int]:
    """Rows and classes, where there are to be ``n`` contributions: long rows take several blocks of any kernel."""
    return (max(n // 100, LONG_ROWS), 20_011) if long else (max(n // 8, 32), 1030)


class Loss(Rows):
    """A loss of (n, LENGTH) logits, or its backward."""

    def taken(self, name: str, t: Tensor, rows: Tensor, order: Tensor | None) -> Tensor:
        t = super().taken(name, t, rows, order)
        return torch.where(t >= 0, order.argsort()[t.clamp(min=0)], t) if name == "target" and order is not None else t


def values(desc: Any, kind: Kind) -> dict[str, Tensor]:
    """Targets of which some are ignored, tables of positive numbers; for the backward, what the forward gave."""
    g = torch.Generator().manual_seed(0)
    (n, length), dtype, compute = desc.input_shape, desc.element.torch, desc.element.compute.torch
    # Exponentials do not cancel. Another order of adding them shows where lse is near 0, as floats are densest there.
    unit = (torch.randn(n, length, generator=g, dtype=torch.float64) - math.log(length) - 0.5).to(dtype)
    x = unit if kind == "cancelling" else draw((n, length), desc.element, kind, length, g)
    dloss = torch.randn(1 if hasattr(desc, "in_place") or desc.reduced else n, generator=g, dtype=torch.float64)
    if desc.op == "scale_gradient":
        return {"dloss": dloss.to(dtype), "dx" if desc.in_place else "unscaled": x}
    found = {"x": x, "target": torch.randint(0, length, (n,), generator=g)}
    found["target"][torch.rand(n, generator=g) < 0.1] = desc.ignore_index
    found["dloss"] = dloss.to(dtype if desc.reduced else compute)
    for name in ("weight", "bytes"):
        found[name] = (torch.rand(length, generator=g, dtype=torch.float64) + 0.5).to(compute)
    read = {o.name for o in desc.operands() if o.role != "output"}
    found = {name: t for name, t in found.items() if name in read}
    return found | follows(desc, found)


def problem(op: str, n: int, element: tp.ElementKind, kind: Kind, long: bool = False, **options: Any) -> Loss:
    desc = tp.descriptor_types()[op](input_shape=size(n, long), element=element, **options)
    return Loss(desc, partial(values, desc, kind))


ALL = {"weight": True, "label_smoothing": 0.1, "reduction": "byte_mean", "gradient": True}
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "cross_entropy": ({"reduction": "none"}, ALL, {"long": True, **ALL}),
    "cross_entropy_backward": ({"reduction": "none"}, {}),
    "nll_loss": ({"reduction": "none", "weight": True},),
    "nll_loss_backward": ({"reduction": "none"}, {}),
    "scale_gradient": ({}, {"in_place": True}),
}
for _op, _options in OPTIONS.items():
    joins(_op, *_options)(partial(problem, _op))
