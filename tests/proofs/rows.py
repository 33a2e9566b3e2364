"""Problems whose contributions are rows, or the elements of rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from proofs import Drawn, Outputs, Variant
from triplan.sku import interpreting

#: No multiples of a block. With so many elements some rounding of a sum shows in narrow results too; the longer rows
#: take several blocks of every kernel that has such. There is more of them where a GPU does it.
LENGTH, LONG, LONG_ROWS = 1030, *((40_000, 24) if torch.cuda.is_available() and not interpreting() else (17_000, 12))
#: Operands with one value a column, shared by all rows.
COLUMNS = ("weight", "bias", "bytes")
#: Outputs with one value a column, summed over rows.
SUMS = ("dweight", "dbias")


def size(n: int, long: bool, element: tp.ElementKind | None = None) -> tuple[int, int]:
    """Rows and their length, for a problem that is to have ``n`` contributions: fewer rows, as each is long.

    Long rows of a 16-bit ``element`` are no whole vectors, as other kernels read such; those of others are.
    """
    odd = element is not None and element.itemsize == 2
    return (max(n // 64, LONG_ROWS), LONG + odd) if long else (max(n // 8, 16), LENGTH)


class Rows(Drawn):
    """Operands of whole rows, of one value a row, of one value a column, or one number."""

    #: Whether another order is one of the rows too, or of what they hold alone.
    moves_rows = True

    def parts(self) -> Iterator[Variant]:
        n = self._shape[0]
        for kept in (torch.tensor([n - 1]), torch.arange(0, n, 2), torch.arange(n).flip(0)[: n // 3 + 1]):
            yield Variant(self._with(kept), picked, partial(picked, rows=kept))

    def reordered(self) -> Variant:
        n, *length = self._shape
        g = torch.Generator().manual_seed(1)
        rows = torch.randperm(n, generator=g) if self.moves_rows else torch.arange(n)
        order = torch.randperm(*length, generator=g) if length else None
        whole = partial(picked, rows=rows, order=order, sums=True)
        return Variant(self._with(rows, order), partial(picked, sums=True), whole)

    @property
    def _shape(self) -> tuple[int, ...]:
        desc: Any = self.desc
        return desc.shape if isinstance(desc, tp.ExpressionDescriptor) else desc.input_shape

    def _with(self, rows: Tensor, order: Tensor | None = None) -> Rows:
        found = {name: self.taken(name, t, rows, order).clone() for name, t in self.values.items()}
        shape = (len(rows), *self.desc.input_shape[1:])  # type: ignore[attr-defined]
        return type(self)(self.desc.replace(input_shape=shape), lambda: found)

    def taken(self, name: str, t: Tensor, rows: Tensor, order: Tensor | None) -> Tensor:
        """What an operand is where only some ``rows`` are left, and columns are in another ``order``."""
        t = t if name in COLUMNS or t.shape == (1,) else t[rows]
        return t[..., order] if order is not None and (t.dim() == 2 or name in COLUMNS) else t


def picked(out: Outputs, rows: Tensor | None = None, order: Tensor | None = None, sums: bool = False) -> Tensor:
    """What belongs to ``rows``, and the sums over them, as one tensor.

    Reduced losses are left out: other orders of rows leave one number alone too often to prove anything.
    """
    found = []
    for name, t in out.items():
        if name not in (*SUMS, "loss"):
            t = t if rows is None else t[rows]
            t = t[:, order] if order is not None and t.dim() == 2 else t
            found.append(t.flatten().double())
        elif name in SUMS and sums:
            found.append((t if order is None else t[order]).double())
    return torch.cat(found)
