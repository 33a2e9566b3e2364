"""Matrix products for the proofs: the contributions are the steps of k, the batch the rows of A and C."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from gemm_cases import magnitude
from proofs import Kind, Problem, Variant, draw, joins
from torch import Tensor

import triplan as tp

ROWS, COLUMNS = 24, 32


class Gemm(Problem):
    """``a`` (rows, k), ``b`` (k, COLUMNS), and ``c0`` (rows, COLUMNS) and ``bias`` where the options ask for them."""

    def __init__(self, options: dict[str, Any], a: Tensor, b: Tensor, c0: Tensor, bias: Tensor) -> None:
        self.options, self.parts_of = options, (a, b, c0, bias)
        self.desc = tp.GemmDescriptor(m=a.shape[0], n=b.shape[1], k=a.shape[1], **options)
        named = {"a": a, "b": b, "c0": c0, "bias": bias}
        self.values = {o.name: named[o.name] for o in self.desc.operands() if o.name in named}

    def parts(self) -> Iterator[Variant]:
        yield self._rows(torch.arange(0, ROWS, 2))
        yield self._rows(torch.tensor([ROWS - 1]))
        yield self._rows(torch.arange(ROWS).roll(5).repeat(3))

    def _rows(self, kept: Tensor) -> Variant:
        a, b, c0, bias = self.parts_of
        part = Gemm(self.options, a[kept], b, c0[kept], bias)
        return Variant(part, lambda out: out["c"], lambda out: out["c"][kept])

    def reordered(self) -> Variant:
        a, b, c0, bias = self.parts_of
        order = torch.randperm(a.shape[1], generator=torch.Generator().manual_seed(1))
        other = Gemm(self.options, a[:, order].contiguous(), b[order].contiguous(), c0, bias)
        return Variant(other, lambda out: out["c"], lambda out: out["c"])


def make(n: int, element: tp.ElementKind, kind: Kind, **options: Any) -> Gemm:
    """k = ``n`` (even). In ``cancelling`` the second half of k opposes the first, and all are shuffled."""
    g = torch.Generator().manual_seed(0)
    a, b = draw((ROWS, n), element, kind, n, g), draw((n, COLUMNS), element, kind, n, g)
    c0, bias = draw((ROWS, COLUMNS), element, kind, n, g), draw((COLUMNS,), element, kind, n, g)
    if kind == "cancelling":
        half, order = n // 2, torch.randperm(n, generator=g)
        a[:, half:], b[half:] = -a[:, :half], b[:half]
        a, b = a[:, order].contiguous(), b[order].contiguous()
        c0, bias = c0 * 2.0**-10, bias * 2.0**-10  # small beside what is rounded off
    return Gemm({"element": element, **options}, a, b, c0, bias)


joins("gemm", {}, {"epilogue": "bias"}, {"epilogue": "bias_relu", "reads_c0": True}, magnitude=magnitude)(make)
