"""The losses' problems for the proofs, and Σ|terms| of each op."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from proofs import Kind, Outputs, draw, joins
from proofs.rows import Rows


def size(n: int, long: bool) -> tuple[int, int]:
    """Rows and classes, where there are to be ``n`` contributions: long rows take several blocks of any kernel."""
    return (max(n // 100, 6), 20_011) if long else (max(n // 8, 16), 1030)


class Loss(Rows):
    """A loss of (n, LENGTH) logits, or its backward."""

    def taken(self, name: str, t: Tensor, rows: Tensor, order: Tensor | None) -> Tensor:
        t = super().taken(name, t, rows, order)
        return torch.where(t >= 0, order.argsort()[t.clamp(min=0)], t) if name == "target" and order is not None else t


def values(desc: Any, kind: Kind) -> dict[str, Tensor]:
    """Targets of which some are ignored, tables of positive numbers; for the backward, what the forward gave."""
    g = torch.Generator().manual_seed(0)
    (n, length), dtype, compute = desc.input_shape, desc.element.torch, desc.element.compute.torch
    # Any order of adding exponentials of different sizes shows; cancelling ones there are none.
    unit = torch.randn(n, length, generator=g, dtype=torch.float64).to(dtype)
    x = unit if kind == "cancelling" else draw((n, length), desc.element, kind, length, g)
    dloss = torch.randn(1 if hasattr(desc, "in_place") or desc.reduced else n, generator=g, dtype=torch.float64)
    if desc.op == "scale_gradient":
        return {"dloss": dloss.to(dtype), "dx" if desc.in_place else "unscaled": x}
    found = {"x": x, "target": torch.randint(0, length, (n,), generator=g)}
    found["target"][torch.rand(n, generator=g) < 0.1] = desc.ignore_index
    found["dloss"] = dloss.to(dtype if desc.reduced else compute)
    found["lse"] = torch.logsumexp(x.double(), 1).to(compute)
    for name in ("weight", "bytes"):
        found[name] = (torch.rand(length, generator=g, dtype=torch.float64) + 0.5).to(compute)
    read = {o.name for o in desc.operands() if o.role != "output"}
    return {name: t for name, t in found.items() if name in read}


def problem(op: str, n: int, element: tp.ElementKind, kind: Kind, long: bool = False, **options: Any) -> Loss:
    desc = tp.descriptor_types()[op](input_shape=size(n, long), element=element, **options)
    return Loss(desc, partial(values, desc, kind))


# --- Σ|terms|, from absolute values ---


def _rows(desc: Any, t: Tensor) -> Tensor:
    rows = math.prod(n for a, n in enumerate(desc.input_shape) if a != desc.class_axis)
    return t.movedim(desc.class_axis, -1).reshape(rows, desc.input_shape[desc.class_axis])


def _whole(desc: Any, t: Tensor) -> Tensor:
    others = [n for a, n in enumerate(desc.input_shape) if a != desc.class_axis]
    return t.reshape(*others, desc.input_shape[desc.class_axis]).movedim(-1, desc.class_axis)


def terms(desc: Any, x: Mapping[str, Any]) -> Outputs:
    """Of a row's loss: the maximum and the target's logit, log n and one rounding of the sum's size, weighted; of a
    gradient: a probability of at most 1, the target's one, and what smoothing takes off."""
    classes, s = desc.input_shape[desc.class_axis], getattr(desc, "label_smoothing", 0.0)
    given = x["target"].reshape(-1).long()
    kept = given != desc.ignore_index
    at = given.clamp(0, max(classes - 1, 0)) if desc.out_of_bounds == "clamp" else given
    kept &= (at >= 0) & (at < classes)
    at = torch.where(kept, at, 0)
    ones = torch.ones(max(classes, 1), dtype=torch.float64)
    w, b = x["weight"] if desc.weight and classes else ones, x.get("bytes") if classes else ones
    w_at, share = w[at] * kept, (ones if b is None else b)[at] * kept
    if desc.reduction in ("mean", "byte_mean"):
        share = (share / (w_at if b is None else share).sum()).nan_to_num(0, 0, 0)
    spread = s / max(classes, 1)
    found: dict[str, Tensor] = {}
    if desc.op == "cross_entropy":
        v = _rows(desc, x["x"])
        size = 1 + math.log(max(classes, 1)) + 2 * (v.max(1).values if classes else torch.zeros(len(v)))
        rows = (1 - s) * w_at * size + spread * (w.sum() * size + (w[:classes] * v).sum(1))
        found = {"losses": rows, "lse": size, "loss": (rows * share).sum().reshape(1)}
    if desc.op == "nll_loss":
        v = _rows(desc, x["x"])
        rows = w_at * (v.gather(1, at[:, None])[:, 0] if classes else 0)
        found = {"losses": rows, "loss": (rows * share).sum().reshape(1)}
    found = {name: t if name == "loss" else t.reshape(x["target"].shape) for name, t in found.items()}
    if desc.op.endswith("_backward"):
        share = share * x["dloss"].reshape(-1)
    hot = (torch.arange(classes) == at[:, None]) * w_at[:, None]
    dx = share[:, None] * ((1 - s) * (hot + w_at[:, None]) + spread * (w.sum() + w[:classes]))
    return {**found, **dict.fromkeys(("x", "dx"), _whole(desc, dx))}


def no_terms(desc: Any, x: Mapping[str, Any]) -> Outputs:
    return {"dx": torch.zeros(desc.input_shape, dtype=torch.float64)}


ALL = {"weight": True, "label_smoothing": 0.1, "reduction": "byte_mean", "gradient": True}
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "cross_entropy": ({"reduction": "none"}, ALL, {"long": True, **ALL}),
    "cross_entropy_backward": ({"reduction": "none"}, {}),
    "nll_loss": ({"reduction": "none", "weight": True},),
    "nll_loss_backward": ({"reduction": "none"}, {}),
    "scale_gradient": ({}, {"in_place": True}),
}
TERMS: dict[str, Callable[[Any, Mapping[str, Any]], Outputs]] = {
    op: no_terms if op == "scale_gradient" else terms for op in OPTIONS
}
for _op, _options in OPTIONS.items():
    joins(_op, *_options, magnitude=TERMS[_op])(partial(problem, _op))
