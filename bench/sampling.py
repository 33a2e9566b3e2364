"""Cases of sampling: logits of a large vocabulary, with filters, against torch's sorts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import triplan.functional as F  # noqa: N812
from bench.copies import CopyCase, Work
from bench.rows import Buffers, Run

BF16, F32 = torch.bfloat16, torch.float32
VOCABULARY = 128256
#: What is sampled with, by name.
FILTERS: dict[str, dict[str, float]] = {
    "no filter": {},
    "top-k": {"top_k": 50},
    "top-p": {"top_p": 0.9},
    "top-k, top-p": {"top_k": 50, "top_p": 0.9},
}


def _ours(filters: dict[str, float]) -> Callable[[Tensor], Tensor]:
    return lambda x: F.sample(x, temperature=0.8, seed=1, **filters)  # type: ignore[arg-type]


def _torchs(filters: dict[str, float]) -> Callable[[Tensor], Tensor]:
    """The usual composition: k-th largest value, sort, cumulative sum, a race of exponentials."""

    def sample(x: Tensor) -> Tensor:
        x = x.float() / 0.8
        if "top_k" in filters:
            least = x.topk(min(int(filters["top_k"]), x.shape[1])).values[:, -1:]
            x = x.masked_fill(x < least, -torch.inf)
        if "top_p" in filters:
            values, order = x.sort(1)
            dropped = values.softmax(1).cumsum(1) <= 1 - filters["top_p"]
            dropped[:, -1] = False
            x = x.masked_fill(dropped.scatter(1, order, dropped), -torch.inf)
        return (x.softmax(1) / torch.empty_like(x).exponential_()).argmax(1)

    return sample


WORKS: dict[str, Work] = {
    f"{name} {rows} rows {str(dtype).removeprefix('torch.')}": Work(
        _ours(filters), _torchs(filters), (rows, VOCABULARY), dtype, 1.0
    )
    for rows in (1, 64, 512)
    for dtype in (F32, BF16)
    for name, filters in FILTERS.items()
}


def cases(tiny: bool = False) -> list[SampleCase]:
    """Every case; ``tiny`` shrinks them for a smoke test."""
    return [SampleCase(name, 64 if tiny else 0, 0, work.dtype) for name, work in WORKS.items()]


@dataclass(frozen=True)
class SampleCase(CopyCase):
    """One of ``WORKS``, by functional calls. Results are right if top-k keeps them."""

    @property
    def work(self) -> Work:
        return WORKS[self.op]

    def peers(self, buffers: list[Buffers], device: torch.device, tiny: bool) -> list[tuple[str, Run]]:
        """torch alone: torch.compile takes minutes for these, and calls the same sorts."""
        return super().peers(buffers, device, tiny=True)

    def mismatch(self, b: Buffers) -> str:
        (x,) = self.inputs(b)
        out = b.tensors["out"]
        bad = int(((out < 0) | (out >= x.shape[1])).sum())
        if "top-k" in self.op and not bad:
            least = x.float().topk(min(50, x.shape[1])).values[:, -1]
            bad = int((x.float().gather(1, out[:, None])[:, 0] < least).sum())
        return f"wrong: {bad} of {out.numel()} tokens" if bad else ""
