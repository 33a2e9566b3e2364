"""The backward of matrix products: contributions are the rows that db and dbias sum, or the columns that da does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from proofs import Kind, Problem, Variant, draw, joins

#: Extents other than the one that is summed over.
ROWS, COLUMNS, DEPTH = 24, 32, 40


class GemmBackward(Problem):
    """``dc`` (m, n), ``a`` (m, DEPTH) and ``b`` (DEPTH, n); db or dbias sum over m, da over n."""

    def __init__(self, options: dict[str, Any], dc: Tensor, a: Tensor, b: Tensor) -> None:
        self.options, self.parts_of = options, (dc, a, b)
        (m, n), k = dc.shape, a.shape[1]
        self.desc: tp.GemmBackwardDescriptor = tp.GemmBackwardDescriptor(m=m, n=n, k=k, **options)
        named = {"dc": dc, "a": a, "b": b}
        self.values = {o.name: named[o.name] for o in self.desc.operands() if o.name in named}

    @property
    def _axis(self) -> int:
        return 0 if self.desc.wants_db or self.desc.wants_dbias else 1

    def parts(self) -> Iterator[Variant]:
        """Fewer rows, for da alone: what sums over rows has no batch."""
        dc, a, b = self.parts_of
        for kept in (torch.arange(0, len(dc), 2), torch.tensor([len(dc) - 1])):
            part = GemmBackward({**self.options, "wants_db": False, "wants_dbias": False}, dc[kept], a[kept], b)
            yield Variant(part, lambda out: out["da"], lambda out, kept=kept: out["da"][kept])

    def reordered(self) -> Variant:
        dc, a, b = self.parts_of
        order = torch.randperm(dc.shape[self._axis], generator=torch.Generator().manual_seed(1))
        dc = dc.index_select(self._axis, order)
        a, b = (a[order], b) if self._axis == 0 else (a, b[:, order].contiguous())
        sums = [name for name in ("db", "dbias") if getattr(self.desc, f"wants_{name}")] or ["da"]

        def pick(out: Any) -> Tensor:
            return torch.cat([out[name].flatten() for name in sums])

        return Variant(GemmBackward(self.options, dc, a, b), pick, pick)


@joins(
    "gemm_backward",
    {"wants_dbias": True},
    {"wants_db": False},
    {"wants_da": False, "wants_db": False, "wants_dbias": True},
)
def make(n: int, element: tp.ElementKind, kind: Kind, **options: Any) -> GemmBackward:
    """``n`` (even) contributions. In ``cancelling`` the second half opposes the first, and all are shuffled."""
    g = torch.Generator().manual_seed(0)
    over_rows = options.get("wants_db", True) or options.get("wants_dbias", False)
    rows, columns = (n, COLUMNS) if over_rows else (ROWS, n)
    dc = draw((rows, columns), element, kind, n, g)
    a, b = draw((rows, DEPTH), element, kind, n, g), draw((DEPTH, columns), element, kind, n, g)
    if kind == "huge" and element is tp.ElementKind.F64:
        # The oracle's range is no wider: what overflows in it depends on the order.
        dc, a, b = dc * 2.0**-520, a * 2.0**-520, b * 2.0**-520
    if kind == "cancelling":
        half, order = n // 2, torch.randperm(n, generator=g)
        if over_rows:
            dc[half:], a[half:] = -dc[:half], a[:half]
            dc, a = dc[order].contiguous(), a[order].contiguous()
        else:
            dc[:, half:], b[:, half:] = -dc[:, :half], b[:, :half]
            dc, b = dc[:, order].contiguous(), b[:, order].contiguous()
    return GemmBackward({"element": element, **options}, dc, a, b)
