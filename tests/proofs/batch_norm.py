"""Normalisation of images for the proofs: contributions are the elements of a channel or of a group."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from proofs import Drawn, Kind, Values, Variant, draw, follows, joins

#: Images, and channels, where an image has many pixels.
IMAGES, CHANNELS = 4, 5


class Batches(Drawn):
    def parts(self) -> Iterator[Variant]:
        n: int = self.desc.batch  # type: ignore[attr-defined]
        for kept in (torch.tensor([n - 1]), torch.arange(n).flip(0)[: n // 3 + 1]):
            yield Variant(self._with(0, kept), joined, partial(joined, axis=0, kept=kept))

    def reordered(self) -> Variant:
        desc: Any = self.desc
        axis = 0 if desc.pixels == 1 else 2
        n = desc.batch if axis == 0 else desc.pixels
        order = torch.randperm(n, generator=torch.Generator().manual_seed(1))
        return Variant(self._with(axis, order), joined, partial(joined, axis=axis, kept=order))

    def _with(self, axis: int, kept: Tensor) -> Batches:
        found = {name: taken(t, axis, kept) for name, t in self.values.items()}
        sizes = {"batch": len(kept)} if axis == 0 else {}
        return Batches(self.desc.replace(**sizes), partial(dict, found))


def taken(t: Any, axis: int, kept: Tensor | None) -> Any:
    """Some of the elements of each channel, or of the images and their groups; numbers of the channels stay."""
    return t.index_select(axis, kept) if kept is not None and isinstance(t, Tensor) and t.dim() > max(axis, 1) else t


def joined(out: Values, axis: int = 0, kept: Tensor | None = None) -> Tensor:
    return torch.cat([taken(t, axis, kept).flatten().double() for t in out.values()])


def images(desc: Any, kind: Kind, g: torch.Generator) -> Tensor:
    """Values whose squares stay within the range of f32."""
    shape, narrow = (desc.batch, desc.channels, desc.pixels), desc.element == "f16"
    if kind == "wide":
        unit = torch.randn(shape, generator=g, dtype=torch.float64)
        return unit * 2.0 ** torch.randint(-8 if narrow else -40, 9 if narrow else 41, shape, generator=g)
    found = draw(shape, desc.element, kind, desc.count, g).double()
    if kind == "huge" and not narrow:
        most = math.sqrt(torch.finfo(desc.element.compute.torch).max / (8 * desc.count))
        found *= most / float(torch.finfo(desc.element.torch).max)
    return found


def values(desc: Any, kind: Kind) -> Values:
    g = torch.Generator().manual_seed(0)
    axis, half = (0, desc.batch // 2) if desc.pixels == 1 else (2, desc.pixels // 2)
    x = images(desc, kind, g)
    numbers = {
        o.name: torch.randn(o.shape, generator=g, dtype=torch.float64).to(o.element.torch)
        for o in desc.operands()
        if not o.is_written and o.is_tensor and len(o.shape) < 3
    }
    if not desc.op.endswith("_backward"):
        found: dict[str, Any] = {"x": x.to(desc.element.torch), **numbers}
        if getattr(desc, "residual", False):
            found["residual"] = images(desc, kind, g).to(desc.element.torch)
        return found | follows(desc, found) | ({"momentum": 0.25} if getattr(desc, "training", False) else {})
    dout = torch.randn(x.shape, generator=g, dtype=torch.float64)
    dout *= 2.0 ** torch.randint(-6, 7, x.shape, generator=g)
    if kind == "cancelling":
        # Equal elements with opposite gradients: of a sum the rounding alone remains.
        first, second = torch.arange(half), torch.arange(half, 2 * half)
        x = x.index_copy(axis, second, x.index_select(axis, first))
        dout = dout.index_copy(axis, second, -dout.index_select(axis, first))
    found = {"dout": dout.to(desc.element.torch), "x": x.to(desc.element.torch), **numbers}
    if getattr(desc, "relu", False):
        found["out"] = found["x"]  # but for its signs: what follows makes some of them 0
    return found | follows(desc, found)


def problem(op: str, n: int, element: tp.ElementKind, kind: Kind, pixels: bool = False, **fields: Any) -> Batches:
    """``pixels``: of images of many pixels."""
    sizes = {"batch": IMAGES, "channels": CHANNELS, "pixels": max(n // IMAGES, 4) | 1}
    if not pixels:
        sizes = {"batch": n, "channels": 24, "pixels": 1}
    desc = tp.descriptor_types()[op](element=element, **sizes, **fields)
    return Batches(desc, partial(values, desc, kind))


for _op in ("batch_norm", "batch_norm_backward"):
    _bare = {"training": False, "weight": False, "bias": False}
    _all: dict[str, Any] = {"relu": True, "residual": True}
    joins(_op, {}, {"pixels": True}, {"training": False}, {**_bare, "pixels": True}, {"relu": True}, _all)(
        partial(problem, _op)
    )


def group_problem(op: str, n: int, element: tp.ElementKind, kind: Kind, long: bool = False, **fields: Any) -> Batches:
    """``long``: of groups that programs share."""
    # An even number of pixels, so that what cancels leaves nothing but rounding, which an order decides.
    sizes = {"batch": IMAGES, "channels": 4, "groups": 2, "pixels": 2 * max(n // 4, 2) + 2}
    sizes |= {"pixels": 6002} if long else {}
    desc = tp.descriptor_types()[op](element=element, **sizes, **fields)
    return Batches(desc, partial(values, desc, kind))


for _op in ("group_norm", "group_norm_backward"):
    joins(_op, {}, {"weight": False, "bias": False}, {"long": True})(partial(group_problem, _op))
