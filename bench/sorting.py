"""Cases of sorting: the largest elements of rows, sorted rows, and positions in them, against torch's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import triplan.functional as F  # noqa: N812
from bench.copies import CopyCase, Work
from bench.rows import Buffers, Run

BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64
#: (rows, elements of each)
ROWS = ((4096, 32768), (64, 131072), (65536, 256))


def _of(module: Any, name: str, *args: Any) -> Any:
    """The values that a function of ``module`` gives, for both contestants."""

    def call(x: Tensor) -> Tensor:
        found: Tensor = getattr(module, name)(x, *args).values
        return found

    return call


def _case(name: str, shape: tuple[int, int], dtype: torch.dtype, moved: float, *args: Any) -> Work:
    return Work(_of(F, name, *args), _of(torch, name, *args), shape, dtype, moved)


#: By name. ``moved``: bytes read and written, divided by those of one input.
WORKS: dict[str, Work] = {
    **{
        f"topk {k} {str(dtype).removeprefix('torch.')} {rows} rows": _case("topk", (rows, n), dtype, 1.0, k)
        for rows, n in ROWS
        for dtype in (F32, BF16)
        for k in (8, 64)
    },
    "topk 512": _case("topk", ROWS[0], F32, 1.0, 512),
    "kthvalue": _case("kthvalue", ROWS[0], F32, 1.0, 100),
    "sort of one row": _case("sort", (1, 1 << 24), F32, 4.0),
    "sort of one row of integers": _case("sort", (1, 1 << 24), I64, 3.0),
    "sort of rows": _case("sort", ROWS[0], F32, 4.0),
    "sort of short rows": _case("sort", (65536, 1024), F32, 4.0),
    "searchsorted": Work(
        lambda x: F.searchsorted(x[0].sort().values, x),
        lambda x: torch.searchsorted(x[0].sort().values, x),
        (256, 1 << 18),
        F32,
        3.0,
    ),
}


def cases(tiny: bool = False) -> list[SortCase]:
    """Every case; ``tiny`` shrinks them for a smoke test."""
    return [SortCase(name, 600 if tiny else 0, 0, work.dtype) for name, work in WORKS.items()]


@dataclass(frozen=True)
class SortCase(CopyCase):
    """One of ``WORKS``, by functional calls. Which of equal elements torch takes is not compared: their values are."""

    @property
    def work(self) -> Work:
        return WORKS[self.op]

    def peers(self, buffers: list[Buffers], device: torch.device, tiny: bool) -> list[tuple[str, Run]]:
        """torch alone: torch.compile calls the same functions."""
        return super().peers(buffers, device, tiny=True)
