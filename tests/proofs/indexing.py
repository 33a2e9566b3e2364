"""The indexing family's problems for the proofs: a table of rows, contributions (n, WIDTH), and where they go."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from samples import ACCUMULATING, SAMPLES, known
from torch import Tensor

import triplan as tp
from proofs import Drawn, Kind, Outputs, Problem, Variant, draw, joins

WIDTH, TABLE = 32, 10
#: Positions g and g + GROUPS belong together: a full index has lanes of one contribution at either.
GROUPS = TABLE // 2

OPS = ("gather", "index_select", "embedding", "scatter", *tp.ScatterReduceDescriptor.ops(), *ACCUMULATING)


def describe(op: str, n: int, **options: Any) -> tp.Descriptor:
    shape = (TABLE if op == "index_put" else n, WIDTH)
    sizes = {"out_shape": shape, "src_shape": shape, "index_shape": (n,), "embedding_dim": WIDTH}
    tables = dict.fromkeys(("src_dim_size", "out_dim_size", "num_embeddings"), TABLE)
    return SAMPLES[op].replace(**known(SAMPLES[op], **sizes, **tables), **options)


class Indexing(Problem):
    """``table`` (TABLE, WIDTH), ``dense`` (n, WIDTH), ``index`` (n,) or (n, WIDTH), ``group`` (n,) of the positions.

    Half of all contributions meet at one hot group, most of them in position 0.
    """

    def __init__(self, op: str, options: dict[str, Any], parts: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        self.op, self.options = op, options
        self.table, self.dense, self.index, self.group = parts
        self.desc = describe(op, len(self.dense), **options)
        self.values: dict[str, Any] = {}
        for o in self.desc.operands():
            if o.index_extents:
                self.values[o.name] = [self.index] if o.kind == "tensor_list" else self.index
            elif o.kind != "host_scalar" and o.role != "output":
                self.values[o.name] = self.table if o.is_written or self._gathers else self.dense

    def parts(self) -> Iterator[Variant]:
        yield self._where(self.group % 2 == 0, shift=0)
        yield self._where(self.group == 0, shift=3)
        yield self._where(self.group == self.group.max(), shift=1)

    def _where(self, kept: Tensor, shift: int) -> Variant:
        """Contributions of some groups only, in their order, with every position moved by ``shift``."""
        at = (self.index[kept].long() + shift) % TABLE
        parts = (self.table.roll(shift, 0), self.dense[kept], at.to(self.index.dtype), self.group[kept])
        part = Indexing(self.op, self.options, parts)
        if self._gathers:
            return Variant(part, self._result, lambda out: self._result(out)[kept])
        groups = self.group[kept].unique()
        positions = torch.cat([groups, groups + GROUPS])
        return Variant(
            part,
            lambda out: self._result(out).roll(-shift, 0)[positions],
            lambda out: self._result(out)[positions],
        )

    def reordered(self) -> Variant:
        order = torch.randperm(len(self.dense), generator=torch.Generator().manual_seed(1))
        parts = (self.table, self.dense[order], self.index[order], self.group[order])
        other = Indexing(self.op, self.options, parts)
        return Variant(
            other, self._result, lambda out: self._result(out)[order] if self._gathers else self._result(out)
        )

    @property
    def _gathers(self) -> bool:
        return self.op in ("gather", "index_select", "embedding")

    def _result(self, out: Outputs) -> Tensor:
        (found,) = out.values()
        return found


def make(op: str, n: int, element: tp.ElementKind, kind: Kind, **options: Any) -> Indexing:
    """``n`` (even) contributions. In ``cancelling`` the second half opposes the first, and all are shuffled."""
    g = torch.Generator().manual_seed(0)
    options = {"element": element, **options}
    (shape,) = (o.shape for o in describe(op, n, **options).operands() if o.index_extents)
    table, dense = draw((TABLE, WIDTH), element, kind, n, g), draw((n, WIDTH), element, kind, n, g)
    group = torch.where(torch.arange(n) % 2 == 0, 0, torch.randint(0, GROUPS, (n,), generator=g))
    far = torch.rand(shape, generator=g) < 0.2
    at = group.reshape(-1, *[1] * (len(shape) - 1)) + GROUPS * far
    if kind == "cancelling":
        half, order = n // 2, torch.randperm(n, generator=g)
        if element.is_floating_point:
            table *= 2.0**-10  # small beside what is rounded off
            if element != "f16":  # which has no room for it
                dense[group % 2 == 1] *= 2.0**40  # a scale that is taken from all the batch shows in a part without
            dense[half:] = -dense[:half]
            group[half:], at[half:] = group[:half], at[:half]
        dense, group, at = dense[order], group[order], at[order]
    return Indexing(op, options, (table, dense, at, group))


for _op in OPS:
    joins(_op, *([{"accumulate": False}, {"accumulate": True}] if _op == "index_put" else []))(partial(make, _op))


class NormedEmbedding(Drawn):
    """Rows of a table and their norms; another order of contributions is one of the columns."""

    def parts(self) -> Iterator[Variant]:
        n = len(self.values["index"])
        for kept in (torch.tensor([n - 1]), torch.arange(0, n, 2), torch.arange(n).flip(0)[: n // 3 + 1]):
            found = {**self.values, "index": self.values["index"][kept]}
            yield Variant(
                NormedEmbedding(self.desc.replace(index_shape=(len(kept),)), lambda found=found: found),
                joined,
                lambda out, kept=kept: joined({name: t[kept] for name, t in out.items()}),
            )

    def reordered(self) -> Variant:
        order = torch.randperm(self.values["norm_weight"].numel(), generator=torch.Generator().manual_seed(1))
        found = {name: t if name == "index" else t[..., order] for name, t in self.values.items()}
        columns = lambda out: joined({n: t if n == "rstd" else t[..., order] for n, t in out.items()})  # noqa: E731
        return Variant(NormedEmbedding(self.desc, lambda: found), joined, columns)


def joined(out: Outputs) -> Tensor:
    return torch.cat([t.flatten().double() for t in out.values()])


@joins("normed_embedding")
def normed(n: int, element: tp.ElementKind, kind: Kind) -> NormedEmbedding:
    desc = SAMPLES["normed_embedding"].replace(index_shape=(n,), embedding_dim=1030, element=element)

    def values() -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(0)
        table = torch.randn(9, 1030, generator=g, dtype=torch.float64)
        table *= 2.0 ** torch.randint(-6, 7, table.shape, generator=g)
        return {
            "weight": table.to(element.torch),
            "index": torch.randint(0, 9, (n,), generator=g),
            "norm_weight": torch.randn(1030, generator=g).to(element.torch),
        }

    return NormedEmbedding(desc, values)
