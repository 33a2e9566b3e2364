"""Cases of reductions: rows, columns, middle axes and all of a tensor, at round and at odd extents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import triplan.functional as F  # noqa: N812
from bench.copies import CopyCase, Work
from bench.rows import Buffers, wrong_elements

BF16, F32 = torch.bfloat16, torch.float32
SQUARE, ODD = (16384, 16384), (16381, 16383)


def _of(function: str, dim: Any) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    def call(module: Any) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            found: Tensor = getattr(module, function)(x, dim)
            return found

        return run

    return call(F), call(torch)


def _work(function: str, shape: tuple[int, ...], dim: Any, dtype: torch.dtype) -> Work:
    return Work(*_of(function, dim), shape, dtype, 1.0)


#: By name. ``moved``: what is written is little beside what is read.
WORKS: dict[str, Work] = {
    f"sum of {name} {dtype}".replace("torch.", ""): _work("sum", shape, dim, dtype)
    for dtype in (BF16, F32)
    for name, shape, dim in (
        ("rows", SQUARE, 1),
        ("columns", SQUARE, 0),
        ("all", SQUARE, (0, 1)),
        ("odd rows", ODD, 1),
        ("odd columns", ODD, 0),
        ("odd all", ODD, (0, 1)),
        ("one row", (1, 2**28), 1),
        ("single elements", (2**28, 1), 1),
        ("a middle axis", (3, 5, 7_000_000), 1),
        ("outer axes", (64, 256, 64, 64), (0, 2, 3)),
    )
}
WORKS |= {
    f"{function} of {name}": _work(function, (8192, 8192), dim, BF16)
    for function in ("argmax", "amax", "var", "logsumexp", "mean")
    for name, dim in (("rows", 1), ("columns", 0))
}


def _difference(x: Any, y: Any) -> Any:
    return (x - y) * (x - y)


def _distances(dim: int) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def ours(x: Tensor, y: Tensor) -> Tensor:
        return F.reduce_expression("sum", _difference, x, y, dim=dim)

    return ours, lambda x, y: (x - y).square().sum(dim)


#: Reductions of expressions, whose values are not written. ``moved``: two operands, read once.
WORKS |= {
    f"mse {dtype}".replace("torch.", ""): Work(F.mse_loss, torch.nn.functional.mse_loss, SQUARE, dtype, 2.0, 2)
    for dtype in (BF16, F32)
}
WORKS["odd mse"] = Work(F.mse_loss, torch.nn.functional.mse_loss, ODD, BF16, 2.0, 2)
WORKS |= {
    f"squared distances of {name}": Work(*_distances(dim), SQUARE, BF16, 2.0, 2)
    for name, dim in (("rows", 1), ("columns", 0))
}
WORKS["small sum"] = _work("sum", (1000,), 0, F32)


def cases(tiny: bool = False) -> list[ReductionCase]:
    """Every case; ``tiny`` shrinks them for a smoke test."""
    return [ReductionCase(name, 4 if tiny else 0, 0, work.dtype) for name, work in WORKS.items()]


@dataclass(frozen=True)
class ReductionCase(CopyCase):
    """One of ``WORKS``, by functional calls."""

    @property
    def work(self) -> Work:
        return WORKS[self.op]

    def mismatch(self, b: Buffers) -> str:
        out, wanted = b.tensors["out"], self.work.torchs(*(x.double() for x in self.inputs(b)))
        if self.op.startswith("argmax"):
            bad = int((out != wanted).sum())
            return f"wrong: {bad} of {wanted.numel()} elements" if bad else ""
        return wrong_elements("out", out.double(), wanted, torch.finfo(self.dtype).eps, wanted.square().mean().sqrt())
