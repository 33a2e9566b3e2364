"""Rotary embedding for the proofs: tokens of two sequences, with three heads of q and two of k; four tokens a slot."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from proofs import Drawn, Kind, Outputs, Values, Variant, draw, joins

BATCH, HEADS, LENGTH, ROTATED = 2, (3, 2), 20, 12
#: Axes of (heads, tokens) of each operand; tables that positions look up are not of tokens.
AXES = {f"{name}{suffix}": (2, 1) for name in ("q", "k") for suffix in ("", "_out", "_rstd")} | {"v": (2, 1)}
AXES |= {"positions": (None, 1), "slots": (None, 1), "k_cache": (2, None), "v_cache": (2, None)}


class Tokens(Drawn):
    def parts(self) -> Iterator[Variant]:
        n, head = self.desc.q_shape[1], torch.arange(2)  # type: ignore[attr-defined]
        for kept in (torch.tensor([n - 1]), torch.arange(0, n, 2), torch.arange(n).flip(0)[: n // 3 + 1]):
            if self.desc.op == "cached_rotary":  # the last of a slot stays
                kept = kept.sort().values
            yield self._variant(kept, head[:1] if len(kept) == 1 else head)

    def reordered(self) -> Variant:
        """Other tokens and heads; with a norm, which sums a head, its pairs in another order instead."""
        n, g = self.desc.q_shape[1], torch.Generator().manual_seed(1)  # type: ignore[attr-defined]
        if self.desc.op == "cached_rotary":  # whose last token of a slot stays: then the first
            return self._variant(torch.arange(n).flip(0), torch.tensor([1, 0]))
        if self.desc.op == "rotary":
            return self._variant(torch.randperm(n, generator=g), torch.tensor([1, 0]))
        order = torch.randperm(ROTATED // 2, generator=g)
        elements = torch.cat((order, order + ROTATED // 2, torch.arange(ROTATED, LENGTH)))
        if self.desc.pairs == "interleaved":  # type: ignore[attr-defined]
            elements[:ROTATED] = torch.stack((2 * order, 2 * order + 1), 1).flatten()
        orders = {**dict.fromkeys(("cos", "sin", "inv_freq"), order), "q": elements, "k": elements}
        orders |= dict.fromkeys(("q_weight", "k_weight", "q_out", "k_out"), elements)

        def permuted(values: Any) -> dict[str, Any]:
            return {name: t[..., orders[name]] if name in orders else t for name, t in values.items()}

        return Variant(Tokens(self.desc, lambda: permuted(self.values)), joined, lambda out: joined(permuted(out)))

    def _variant(self, tokens: Tensor, heads: Tensor) -> Variant:
        desc: Any = self.desc
        table = desc.table_rows if desc.positions or desc.table_rows is None else len(tokens)
        fewer = desc.replace(q_shape=(BATCH, len(tokens), len(heads), LENGTH), k_heads=len(heads), table_rows=table)
        take = partial(taken, tokens=tokens, heads=heads, tables=not desc.positions)
        found = {name: take(name, t) for name, t in self.values.items()}

        def alike(out: Outputs) -> Outputs:
            """Without the rows of the caches that other tokens write last."""
            rows = ~self._rows_of_others(tokens)
            return {name: t[rows] if name.endswith("_cache") else t for name, t in out.items()}

        def whole(out: Outputs) -> Tensor:
            return joined(alike({name: take(name, t) for name, t in out.items()}))

        return Variant(Tokens(fewer, lambda: found), lambda out: joined(alike(out)), whole)

    def _rows_of_others(self, tokens: Tensor) -> Tensor:
        """The rows (pages, page_size) of caches whose last token is none of ``tokens``."""
        desc: Any = self.desc
        found = torch.zeros(0, 0, dtype=torch.bool)
        if desc.op == "cached_rotary":
            found = torch.zeros(desc.pages, desc.page_size, dtype=torch.bool)
            kept = set(tokens.tolist())
            for row in self.values["slots"].tolist():
                for token, slot in enumerate(row):
                    if slot >= 0:
                        found[slot // desc.page_size, slot % desc.page_size] = token not in kept
        return found


def taken(name: str, t: Any, tokens: Tensor, heads: Tensor, tables: bool) -> Any:
    """What an operand is where only some ``tokens`` and ``heads`` are left."""
    of_heads, of_tokens = AXES.get(name, (None, 1 if tables and name in ("cos", "sin") else None))
    t = t if of_heads is None else t.index_select(of_heads, heads)
    return t if of_tokens is None else t.index_select(of_tokens, tokens)


def joined(out: Outputs) -> Tensor:
    return torch.cat([t.flatten().double() for t in out.values()])


def values(desc: Any, kind: Kind) -> Values:
    """Pairs of numbers of a kind; of cancelling ones equal pairs, half of which meet a cos that is equal to sin."""
    g, half = torch.Generator().manual_seed(0), desc.half
    found: dict[str, Any] = {}
    for o in desc.operands():
        if o.name in ("q", "k"):
            if desc.normed:  # squares must stay within the range
                drawn = torch.randn(o.shape, generator=g, dtype=torch.float64)
                drawn *= 2.0 ** torch.randint(-6, 7, o.shape, generator=g)
                found[o.name] = drawn.to(o.element.torch)
                continue
            x = found[o.name] = draw(o.shape, o.element, kind, 1, g)
            if kind == "cancelling":
                x[..., half : 2 * half] = x[..., :half]
        elif o.name.endswith("_weight"):
            found[o.name] = torch.randn(o.shape, generator=g).to(o.element.torch)
        elif o.name in ("cos", "sin"):
            angle = torch.rand(o.shape, generator=g.manual_seed(2), dtype=torch.float64) * 6
            angle[..., ::2] = torch.pi / 4
            found[o.name] = getattr(angle, o.name)().to(o.element.torch)
        elif o.name == "inv_freq":
            found[o.name] = (10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)).to(o.element.torch)
        elif o.name in ("v", "k_cache", "v_cache"):
            found[o.name] = draw(o.shape, o.element, kind, 1, g)
        elif o.name == "slots":
            found[o.name] = torch.randint(-1, desc.slots // 2, o.shape, generator=g).to(o.element.torch)
        elif o.name == "positions":
            found[o.name] = torch.randint(0, desc.table_rows or 2**20, o.shape, generator=g)
    return found | ({} if desc.table_rows else {"scale": 1.25})


def problem(op: str, n: int, element: tp.ElementKind, kind: Kind, **fields: Any) -> Tokens:
    tokens = max(n // 8, 4)
    if fields.get("table_rows") == 0:  # a row for each token
        fields["table_rows"] = tokens
    if op == "normed_rotary":
        fields.pop("inverse", None)
    shape = (BATCH, tokens, HEADS[0], LENGTH)
    cls: Any = tp.descriptor_types()[op]
    desc = cls(q_shape=shape, k_heads=HEADS[1], rotary_dim=ROTATED, element=element, **fields)
    return Tokens(desc, partial(values, desc, kind))


@joins(
    "cached_rotary",
    {"table_rows": 50, "positions": True, "eps": 1e-6, "slot_element": "i32"},
    {"positions": True, "pairs": "interleaved", "v_dim": 9},
    {"table_rows": 0},
)
def cached(n: int, element: tp.ElementKind, kind: Kind, **fields: Any) -> Tokens:
    page_size = 4
    return problem("cached_rotary", n, element, kind, pages=max(n // 8, 4) // page_size, page_size=page_size, **fields)


for _op in ("rotary", "normed_rotary"):
    joins(
        _op,
        {"table_rows": 50, "positions": True},
        {"positions": True, "pairs": "interleaved", "inverse": True},
        {"table_rows": 0},
    )(partial(problem, _op))
