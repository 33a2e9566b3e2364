"""Cases of rotary embedding, one of which fills a paged cache, against the usual formula in torch and torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import triplan as tp
from bench.rows import Buffers, OneOpCase, wrong_elements
from triplan.backends.triton.common.rows_entries import Entry

BATCH = 4
PAGE_SIZE = 16
#: (tokens, elements of a head, heads of q, heads of k): a training step, and current models' fewer heads of k.
SIZES = ((16384, 128, 32, 32), (8192, 128, 32, 8))
TINY = ((8, 8, 2, 1),)
Pairs = Literal["half", "interleaved"]
Angles = Literal["table", "positions", "inverse", "normed", "cached"]
OPS = {"normed": "normed_rotary", "cached": "cached_rotary"}


def turned(x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
    """The usual formula, in f32 (f64 for f64)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if pairs == "interleaved":
        a, b = wide[..., ::2], wide[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype)
    a, b = wide.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def rotated(x: Tensor, _: None, cos: Tensor, sin: Tensor) -> Tensor:
    """The usual formula, with the arguments of ``functional.rotary``."""
    return turned(x, cos, sin, "half")


def cached(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *table: Tensor) -> Tensor:
    """``functional.cached_rotary`` of one sequence: the usual formula, and then a copy of keys and of values."""
    for cache, rows in ((k_cache, rotated(k, None, *table)), (v_cache, v)):
        cache.flatten(0, 1)[slots] = rows.transpose(0, 1)
    return rotated(q, None, *table)


def normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of the last axis, not rounded to x's dtype, and its statistic."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = (wide.square().mean(-1) + eps).rsqrt()
    return wide * rstd.unsqueeze(-1) * weight, rstd


def cases(tiny: bool = False) -> list[RotaryCase]:
    """Both orders of heads and sequence, both kinds of pairs, tables and angles; the backward (``inverse``); with a
    norm before, without and with a cache (``normed``, ``cached``)."""
    ways: tuple[tuple[bool, Pairs, Angles], ...] = (
        (True, "half", "table"),
        (False, "half", "table"),
        (False, "interleaved", "table"),
        (True, "half", "positions"),
        (True, "half", "inverse"),
        (False, "half", "normed"),
        (False, "half", "cached"),
    )
    return [
        RotaryCase(
            OPS.get(angles, "rotary"),
            tokens,
            n,
            torch.bfloat16,
            q_heads,
            k_heads,
            heads_first,
            pairs,
            angles,
        )
        for tokens, n, q_heads, k_heads in (TINY if tiny else SIZES)
        for heads_first, pairs, angles in ways
    ]


@dataclass(frozen=True)
class RotaryCase(OneOpCase):
    """``rows``: tokens; ``n``: elements of a head."""

    q_heads: int
    k_heads: int
    heads_first: bool
    pairs: Pairs
    angles: Angles

    @property
    def name(self) -> str:
        order = "heads, tokens" if self.heads_first else "tokens, heads"
        heads = f"{self.q_heads}+{self.k_heads}"
        return f"rotary {self.rows}x{heads}x{self.n} {order}, {self.pairs}, {self.angles}"

    @property
    def bytes(self) -> int:
        heads = self.q_heads + self.k_heads * (2 if self.angles == "cached" else 1)
        return 2 * self.rows * heads * self.n * self.dtype.itemsize

    def make(self, device: torch.device, generator: torch.Generator) -> Buffers:
        sequence, found = self.rows // BATCH, {}
        for name, heads in {"q": self.q_heads, "k": self.k_heads, "q_out": self.q_heads, "k_out": self.k_heads}.items():
            shape = (BATCH, heads, sequence, self.n) if self.heads_first else (BATCH, sequence, heads, self.n)
            t = torch.randn(shape, dtype=self.dtype, device=device, generator=generator)
            found[name] = t.transpose(1, 2) if self.heads_first else t
        frequencies = 10000.0 ** (-torch.arange(0, self.n, 2, device=device) / self.n)
        at = torch.arange(sequence, device=device)
        if self.angles == "cached":
            del found["k_out"]
            pages, tokens = max(2 * self.rows // PAGE_SIZE, 1), (BATCH, sequence, self.k_heads, self.n)
            found["v"] = torch.randn(tokens, dtype=self.dtype, device=device, generator=generator)
            for name in ("k_cache", "v_cache"):
                shape = (pages, PAGE_SIZE, self.k_heads, self.n)
                found[name] = torch.empty(shape, dtype=self.dtype, device=device)
            order = torch.randperm(pages, device=device, generator=generator)[:, None] * PAGE_SIZE
            slots = (order + torch.arange(PAGE_SIZE, device=device)).flatten()[: self.rows]
            found["slots"] = slots.view(BATCH, sequence)
        if self.angles in OPS:
            for name, heads in {"q": self.q_heads, "k": self.k_heads}.items():
                found[f"{name}_weight"] = torch.randn(self.n, dtype=self.dtype, device=device, generator=generator)
                if self.angles == "normed":
                    found[f"{name}_rstd"] = torch.empty(BATCH, sequence, heads, device=device)
        if self.angles == "positions":
            return Buffers({**found, "inv_freq": frequencies, "positions": at.expand(BATCH, sequence)})
        angle = (at.float()[:, None] * frequencies).expand(BATCH, sequence, self.n // 2)
        return Buffers({**found, "cos": angle[0].cos().expand(angle.shape), "sin": angle[0].sin().expand(angle.shape)})

    def descriptor(self) -> tp.Descriptor:
        layouts: dict[str, tp.Layout] = {}
        if self.heads_first:
            strided = tp.Layout.strided(alignment=16, unit_axis=3, stride_multiple=8)
            layouts = dict.fromkeys(("q", "q_out", "k", "k_out"), strided)
        fields: dict[str, Any] = {"positions": True}
        if self.angles == "positions":
            layouts["positions"] = tp.Layout.strided(alignment=16, unit_axis=1, zero_axes=(0,))
        else:
            fields = {"table_rows": self.rows // BATCH, **({"inverse": True} if self.angles == "inverse" else {})}
            shared = tp.Layout.strided(alignment=16, unit_axis=2, zero_axes=(0,), stride_multiple=4)
            layouts |= {"cos": shared, "sin": shared}
        if self.angles == "cached":
            fields |= {"pages": max(2 * self.rows // PAGE_SIZE, 1), "page_size": PAGE_SIZE, "eps": 1e-6}
        shape = (BATCH, self.rows // BATCH, self.q_heads, self.n)
        cls: Any = tp.descriptor_types()[self.op]
        found: tp.Descriptor = cls(
            q_shape=shape, k_heads=self.k_heads, element=self.dtype, pairs=self.pairs, layouts=layouts, **fields
        )
        return found

    def functions(self, device: torch.device) -> dict[str, Callable[[Buffers], Any]]:
        return {"torch": lambda b: self.formula()(*self.inputs(b))}

    def formula(self) -> Callable[..., Any]:
        rotate = self._rotation()

        def cached(*given: Tensor) -> Tensor:
            *heads, v, k_cache, v_cache, slots = given
            q, k = rotate(*heads)
            for cache, rows in ((k_cache, k), (v_cache, v)):
                cache.view(-1, *cache.shape[2:])[slots] = rows
            return q

        return cached if self.angles == "cached" else rotate

    def _rotation(self) -> Callable[..., tuple[Tensor, Tensor]]:
        sign = -1 if self.angles == "inverse" else 1

        def rotate(q: Tensor, k: Tensor, first: Tensor, second: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
            out = q.dtype
            if weights:
                q, k = (normed(x, weight, 1e-6)[0] for x, weight in zip((q, k), weights, strict=True))
            if self.angles == "positions":
                angle = second.unsqueeze(-1).float() * first
                first, second = angle.cos(), angle.sin()
            cos, sin = first.unsqueeze(2), sign * second.unsqueeze(2)
            return turned(q, cos, sin, self.pairs).to(out), turned(k, cos, sin, self.pairs).to(out)

        return rotate

    def inputs(self, b: Buffers) -> list[Tensor]:
        angles = ("inv_freq", "positions") if self.angles == "positions" else ("cos", "sin")
        weights = ("q_weight", "k_weight") if self.angles in OPS else ()
        cache = ("v", "k_cache", "v_cache", "slots") if self.angles == "cached" else ()
        return [b.tensors[name] for name in ("q", "k", *angles, *weights, *cache)]

    def mismatch(self, b: Buffers) -> str:
        q, k, first, second, *others = self.inputs(b)
        weights = others[:2]
        eps, size = torch.finfo(self.dtype).eps, torch.ones((), dtype=torch.float64, device=q.device)
        at = slice(0, 64)
        angles = (first, second[:, at]) if self.angles == "positions" else (first[:, at], second[:, at])
        wanted = list(self._rotation()(q[:, at].float(), k[:, at].float(), *angles, *weights))
        got: dict[str, Tensor] = {name: b.tensors[name][:, at] for name in ("q_out", "k_out") if name in b.tensors}
        if self.angles == "cached":
            got |= {name: b.tensors[name].flatten(0, 1)[b.slots[:, at]] for name in ("k_cache", "v_cache")}
            wanted.append(b.v[:, at])
        pairs = zip(got.items(), wanted, strict=True)
        wrong = (wrong_elements(name, t.double(), ref.double(), eps, size) for (name, t), ref in pairs)
        return next((text for text in wrong if text), "")

    def swept(self) -> Iterator[type[Entry]]:
        return iter(())
