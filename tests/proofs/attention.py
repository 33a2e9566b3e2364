"""Attention for the proofs: the contributions are the keys, the batch the sequences and their last queries."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from proofs import Drawn, Kind, Outputs, Pick, Problem, Variant, draw, follows, joins

BATCH, QUERIES, HEADS, GROUP, WIDTH = 3, 5, 4, 2, 32
#: A sum of so many values is in the range of an element, if each is so much smaller than the largest.
ROOM = 2.0**-14


class Attention(Drawn):
    def parts(self) -> Iterator[Variant]:
        backward = self.desc.op == "attention_backward"
        for kept, queries in ((torch.tensor([2]), QUERIES), (torch.arange(3).repeat(2), QUERIES), (torch.arange(2), 2)):
            if not (backward and queries < QUERIES):  # gradients of keys are sums over queries
                yield Variant(self._with(kept, queries), picked, partial(picked, kept=kept, queries=queries))

    def reordered(self) -> Variant:
        """Other keys change places than the last ones, which a causal query may not see."""
        keys = self.desc.keys  # type: ignore[attr-defined]
        order = torch.arange(keys)
        moved = keys - QUERIES
        order[:moved] = torch.randperm(moved, generator=torch.Generator().manual_seed(1))
        name = "dq" if self.desc.op == "attention_backward" else "out"
        return Variant(self._with(torch.arange(BATCH), QUERIES, order), lambda o: o[name], lambda o: o[name])

    def _with(self, kept: Tensor, queries: int, order: Tensor | None = None) -> Attention:
        found = {}
        for name, t in self.values.items():
            if name in ("state", "dropout_p"):
                found[name] = t
                continue
            t = t if name == "slopes" else t[kept]
            if name in ("k", "v", "mask") and order is not None:
                t = t[:, order] if name != "mask" else t[..., order]
            axis = {"q": 1, "dout": 1, "out": 1, "lse": 2, "mask": 2}.get(name)
            found[name] = t if axis is None else t.narrow(axis, QUERIES - queries, queries)
            found[name] = found[name].contiguous()
        desc = self.desc.replace(batch=len(kept), queries=queries)  # type: ignore[call-arg]
        return Attention(desc, lambda: found)


class Packed(Problem):
    """The sequences of a batch one after the other, which is what ``padded`` has behind one another."""

    def __init__(self, padded: Attention) -> None:
        self.padded, old = padded, padded.desc
        b, m, n = (getattr(old, name) for name in ("batch", "queries", "keys"))
        self.desc = old.replace(sequences=b, batch=1, queries=b * m, keys=b * n)  # type: ignore[call-arg]

    @property
    def values(self) -> dict[str, Tensor]:  # type: ignore[override]
        desc: Any = self.desc
        found = {name: t.flatten(0, 1)[None] for name, t in self.padded.values.items() if t.dim() == 4}
        found |= {name: t.transpose(0, 1).flatten(1)[None] for name, t in self.padded.values.items() if t.dim() == 3}
        found |= {name: t for name, t in self.padded.values.items() if t.dim() == 1}
        rows = {"query_starts": desc.queries, "key_starts": desc.keys}
        return found | {k: torch.linspace(0, n, desc.sequences + 1).round().int() for k, n in rows.items()}

    def unpacked(self, pick: Pick, out: Outputs) -> Tensor:
        b = self.padded.desc.batch  # type: ignore[attr-defined]
        return pick(
            {
                name: t[0].unflatten(1, (b, -1)).transpose(0, 1) if name == "lse" else t[0].unflatten(0, (b, -1))
                for name, t in out.items()
            }
        )

    def parts(self) -> Iterator[Variant]:
        yield from map(self._variant, self.padded.parts())

    def reordered(self) -> Variant:
        return self._variant(self.padded.reordered())

    def _variant(self, of: Variant) -> Variant:
        other = Packed(of.problem)  # type: ignore[arg-type]
        return Variant(other, partial(other.unpacked, of.own), partial(self.unpacked, of.whole))


def picked(out: Outputs, kept: Tensor | None = None, queries: int = QUERIES) -> Tensor:
    """All results of the sequences ``kept``, or the last ``queries`` of them."""
    found = []
    for name, t in out.items():
        t = t if kept is None else t[kept]
        if kept is not None and name in ("out", "lse"):
            t = t.narrow(1 if name == "out" else 2, QUERIES - queries, queries)
        found.append(t.flatten().double())
    return torch.cat(found)


def values(desc: Any, kind: Kind) -> dict[str, Any]:
    """``cancelling``: keys in pairs of equal scores and opposite values. ``wide``: steep scores, so that one key
    dominates. The others are of the values; ``equal`` of all."""
    g = torch.Generator().manual_seed(0)
    (b, m, h, d), n, dtype = desc.operand("q").shape, desc.keys, desc.element.torch

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    steep = 8 if kind == "wide" else 1
    q, k, v = steep * normal(b, m, h, d), steep * normal(b, n, h // GROUP, d), normal(b, n, h // GROUP, d)
    mask = torch.rand(b, h, m, n, generator=g) < 0.8
    if kind == "equal":
        q, k, v = (torch.full_like(t, 0.1) for t in (q, k, v))
    elif kind != "wide":
        v = draw(tuple(v.shape), desc.element, kind, n, g).double()
    if kind == "huge":
        v *= ROOM
    elif kind == "cancelling":
        half = (n - QUERIES) // 2
        order = torch.cat([torch.randperm(2 * half, generator=g), torch.arange(2 * half, n)])
        k[:, half : 2 * half], v[:, half : 2 * half] = k[:, :half], -v[:, :half]
        v[:, 2 * half :] = 0
        mask[..., half : 2 * half] = mask[..., :half]
        k, v, mask = k[:, order], v[:, order], mask[..., order]
    found: dict[str, Any] = {"dout": normal(b, m, h, d), "q": q, "k": k, "v": v}
    found = {name: t.to(dtype) for name, t in found.items()} | {
        "mask": mask,
        "slopes": torch.linspace(-1, 1, h, dtype=desc.element.compute.torch),
    }
    found |= {"out": found["q"], "lse": torch.zeros(b, h, m, dtype=desc.element.compute.torch)}
    found |= {"state": torch.tensor([-(2**62) - 5, 2**40 + 8]), "dropout_p": 0.3}
    read = [o.name for o in desc.operands() if o.role != "output" and o.name != "scale"]
    found = {name: found[name] for name in read}
    return found | follows(desc, found)


def problem(
    op: str, n: int, element: tp.ElementKind, kind: Kind, packed: bool = False, x3: bool = False, **options: Any
) -> Problem:
    """``x3``: f32 is multiplied in tf32x3."""
    if x3 and element is tp.ElementKind.F32:
        options["math"] = "tf32x3"
    sizes = {"batch": BATCH, "queries": QUERIES, "keys": n, "heads": HEADS, "key_heads": HEADS // GROUP}
    desc = tp.descriptor_types()[op](**{**sizes, "head_dim": WIDTH, **options}, element=element)
    found = Attention(desc, partial(values, desc, kind))
    return Packed(found) if packed else found


for _op in ("attention", "attention_backward"):
    joins(
        _op,
        {},
        {"causal": True, "x3": True},
        {"mask": "bool", "softcap": 3.0},
        {"packed": True, "causal": True, "slopes": True},
        {"dropout": True},
        {"head_dim": 36},  # rows of heads that TMA cannot map
        {"head_dim": 136, "causal": True},
        {"head_dim": 200},
        {"head_dim": 140},
    )(partial(problem, _op))
