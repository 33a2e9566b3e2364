"""Cases of copies: packed, converted, transposed, permuted, joined, padded, flipped and rolled, and fills."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import triplan as tp
import triplan.functional as F  # noqa: N812
from bench.rows import Buffers, OneOpCase, Run
from triplan.backends.triton.common.rows_entries import Entry

BF16, F32 = torch.bfloat16, torch.float32
Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Work:
    """What is done to tensors of ``shape``: ours and torch's function of these, and bytes per element of the first."""

    ours: Function
    torchs: Function
    shape: tuple[int, ...]
    dtype: torch.dtype
    moved: float = 2.0
    count: int = 1


def _turned(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


#: By name. ``moved``: bytes read and written, divided by those of one input.
WORKS: dict[str, Work] = {
    "clone": Work(F.clone, torch.clone, (16384, 16384), BF16),
    "clone odd": Work(F.clone, torch.clone, (16381, 16383), BF16),
    "cast to bf16": Work(lambda x: F.cast(x, BF16), lambda x: x.to(BF16), (16384, 16384), F32, 1.5),
    "cast to f32": Work(lambda x: F.cast(x, F32), lambda x: x.to(F32), (16384, 16384), BF16, 3.0),
    "slice": Work(
        lambda x: F.contiguous(x[:, :8000]), lambda x: x[:, :8000].contiguous(), (16384, 16384), BF16, 0.9766
    ),
    **{
        f"transpose {dtype}".replace("torch.", ""): Work(F.t_copy, lambda x: x.t().contiguous(), (8192, 8192), dtype)
        for dtype in (torch.int8, BF16, F32, torch.float64)
    },
    "transpose odd": Work(F.t_copy, lambda x: x.t().contiguous(), (8191, 8189), BF16),
    "permute 0213": Work(lambda x: F.permute_copy(x, (0, 2, 1, 3)), _turned, (64, 128, 32, 256), BF16),
    "to channels last": Work(
        lambda x: F.contiguous(x, torch.channels_last),
        lambda x: x.contiguous(memory_format=torch.channels_last),
        (256, 64, 112, 112),
        BF16,
    ),
    "image to channels last": Work(
        lambda x: F.contiguous(x, torch.channels_last),
        lambda x: x.contiguous(memory_format=torch.channels_last),
        (256, 3, 512, 512),
        BF16,
    ),
    "fill": Work(lambda x: F.fill_(x, 1.5), lambda x: x.fill_(1.5), (16384, 16384), BF16, 1.0),
    "cat rows": Work(lambda *t: F.cat(t), lambda *t: torch.cat(t), (8192, 8192), BF16, 4.0, 2),
    "cat columns": Work(lambda *t: F.cat(t, 1), lambda *t: torch.cat(t, 1), (65536, 1024), BF16, 8.0, 4),
    "stack last": Work(lambda *t: F.stack(t, -1), lambda *t: torch.stack(t, -1), (8192, 8192), BF16, 4.0, 2),
    "pad images": Work(
        lambda x: F.pad(x, (3, 3, 3, 3)), lambda x: torch.nn.functional.pad(x, (3, 3, 3, 3)), (256, 64, 112, 112), BF16
    ),
    "flip rows": Work(lambda x: F.flip(x, (0,)), lambda x: x.flip(0), (16384, 16384), BF16),
    "flip columns": Work(lambda x: F.flip(x, (1,)), lambda x: x.flip(1), (16384, 16384), BF16),
    "roll": Work(lambda x: F.roll(x, (3, 5), (0, 1)), lambda x: x.roll((3, 5), (0, 1)), (16384, 16384), BF16),
    "tril": Work(F.tril, torch.tril, (16384, 16384), BF16, 1.5),
    "small clone": Work(F.clone, torch.clone, (1000,), F32),
}


def cases(tiny: bool = False) -> list[CopyCase]:
    """Every case; ``tiny`` shrinks them for a smoke test."""
    return [CopyCase(name, 4 if tiny else 0, 0, work.dtype) for name, work in WORKS.items()]


@dataclass(frozen=True)
class CopyCase(OneOpCase):
    """One of ``WORKS``, by functional calls: what a copy allocates counts for both. ``rows``: extents, if not 0."""

    in_sweep = False

    @property
    def work(self) -> Work:
        return WORKS[self.op]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(min(n, self.rows or n) for n in self.work.shape)

    @property
    def name(self) -> str:
        return f"{self.op} {'x'.join(map(str, self.shape))} {tp.ElementKind.of(self.dtype)}"

    @property
    def bytes(self) -> int:
        return max(int(self.work.moved * torch.Size(self.shape).numel() * self.dtype.itemsize), 1)

    def make(self, device: torch.device, generator: torch.Generator) -> Buffers:
        def drawn() -> Tensor:
            if not self.dtype.is_floating_point:
                return torch.randint(-9, 9, self.shape, dtype=self.dtype, device=device, generator=generator)
            return torch.randn(self.shape, dtype=self.dtype, device=device, generator=generator)

        return Buffers({f"x{i}": drawn() for i in range(self.work.count)})

    def functions(self, device: torch.device) -> dict[str, Callable[[Buffers], Any]]:
        return {"torch": lambda b: self.work.torchs(*self.inputs(b))}

    def formula(self) -> Callable[..., Any]:
        return self.work.torchs

    def inputs(self, b: Buffers) -> list[Tensor]:
        return [b.tensors[f"x{i}"] for i in range(self.work.count)]

    def planned(self, buffers: list[Buffers], device: torch.device, kernel: str | None = None) -> tuple[str, Run, int]:
        given = [self.inputs(b) for b in buffers]

        def run(i: int) -> Tensor:
            buffers[i].tensors["out"] = found = self.work.ours(*given[i])
            return found

        return "functional", run, 0

    def outputs(self) -> tuple[str, ...]:
        return ()

    def mismatch(self, b: Buffers) -> str:
        wanted = self.work.torchs(*self.inputs(b))
        bad = int((b.tensors["out"] != wanted).sum())
        return f"wrong: {bad} of {wanted.numel()} elements" if bad else ""

    def descriptor(self) -> tp.Descriptor:
        raise NotImplementedError("a case is a functional call")

    def swept(self) -> Iterator[type[Entry]]:
        return iter(())
