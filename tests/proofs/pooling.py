"""Pooling for the proofs: contributions are the elements of one long window, or the results that share one pixel."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from proofs import Drawn, Kind, Values, Variant, draw, joins

IMAGES, CHANNELS = 3, 5


class Pooling(Drawn):
    def parts(self) -> Iterator[Variant]:
        """Other images: one, fewer in another order, more."""
        for kept in (torch.tensor([IMAGES - 1]), torch.tensor([2, 0]), torch.tensor([1, 2, 0, 0, 1])):
            found = {name: t.index_select(0, kept) for name, t in self.values.items()}
            other = Pooling(self.desc.replace(batch=len(kept)), partial(dict, found))
            yield Variant(other, joined, partial(joined, images=kept))

    def reordered(self) -> Variant:
        """Another order within the row that is summed, of which the pixel in the middle has all; else of the images."""
        if self.desc.op.startswith("upsample") and not self.desc.op.endswith("_backward"):
            order = torch.tensor([2, 0, 1])
            found = {name: t.index_select(0, order) for name, t in self.values.items()}
            return Variant(Pooling(self.desc, partial(dict, found)), joined, partial(joined, images=order))
        order = torch.randperm(length(self.desc), generator=torch.Generator().manual_seed(1))
        found = {name: t.index_select(3, order) for name, t in self.values.items()}
        return Variant(Pooling(self.desc, partial(dict, found)), middle, middle)


def joined(out: Values, images: Tensor | None = None) -> Tensor:
    return torch.cat([(t if images is None else t[images]).flatten().double() for t in out.values()])


def middle(out: Values) -> Tensor:
    return torch.cat([t[..., t.shape[-1] // 2].flatten().double() for t in out.values()])


def length(desc: Any) -> int:
    """Elements of the row that is summed."""
    return int(next(o for o in desc.operands() if not o.is_written).shape[3])


def values(desc: Any, kind: Kind, n: int) -> Values:
    g = torch.Generator().manual_seed(0)
    (o, *rest) = (o for o in desc.operands() if not o.is_written)
    found = draw(o.shape, desc.element, kind, n, g)
    if kind == "cancelling":
        half = n // 2
        found[..., half : 2 * half] = -found[..., :half]
        found = found.index_select(3, torch.randperm(n, generator=g))
    # All windows have the pixel in the middle.
    return {o.name: found, **{r.name: torch.full(r.shape, n // 2) for r in rest}}


def problem(op: str, n: int, element: tp.ElementKind, kind: Kind, tall: bool = False) -> Pooling:
    """``tall``: of windows that have two rows, the second of which is padding; of two rows that share a pixel."""
    k = max(n // 4, 4) // 2 * 2 + 1
    cls: Any = tp.descriptor_types()[op]
    sizes: dict[str, Any] = {"batch": IMAGES, "channels": CHANNELS, "height": 1, "width": k}
    back = op.endswith("_backward")
    if back and ("adaptive" in op or "upsample" in op):
        sizes |= {"out_size": (2 if tall else 1, k), "width": 1}
    elif "upsample" in op:
        sizes |= {"out_size": (5 if tall else 3, 2 * k), "height": 3}
    elif "adaptive" in op:
        sizes |= {"out_size": (1, 1)}
    else:
        sizes |= {"kernel": (1, k), "padding": (0, k // 2) if back else (0, 0)}
        if tall:
            sizes |= {"kernel": (2, k), "padding": (1, sizes["padding"][1]), "stride": (2, 1)}
    desc = cls(**sizes, element=element)
    return Pooling(desc, partial(values, desc, kind, k))


NAMES = ("max_pool", "avg_pool", "adaptive_avg_pool", "upsample_nearest", "upsample_bilinear")
for _op in (f"{name}2d{suffix}" for name in NAMES for suffix in ("", "_backward")):
    joins(_op, *({}, {"tall": True})[: 1 if "adaptive" in _op else 2])(partial(problem, _op))
