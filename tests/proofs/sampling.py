"""Sampling for the proofs: rows of logits, with every filter and with none."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import triplan as tp
from proofs import Drawn, Kind, Values, Variant, draw, joins

#: Tokens of a row: no multiple of a vector.
TOKENS = 37


class Rows(Drawn):
    def parts(self) -> Iterator[Variant]:
        """Fewer rows, from other places."""
        n = self.desc.rows  # type: ignore[attr-defined]
        for rows in (slice(n - 1, n), slice(0, n // 2), slice(n // 3, n)):
            yield Variant(self._of(rows), lambda out: out["out"], lambda out, rows=rows: out["out"][rows].contiguous())

    def reordered(self) -> Variant:
        """The tokens from the last to the first: what is drawn is another one."""
        values = {**self.values, "logits": self.values["logits"].flip(1).contiguous()}
        return Variant(Rows(self.desc, lambda: values), lambda out: TOKENS - 1 - out["out"], lambda out: out["out"])

    def _of(self, rows: slice) -> Rows:
        values = {name: t[rows].contiguous() for name, t in self.values.items()}
        return Rows(self.desc.replace(rows=rows.stop - rows.start), lambda: values)


def values(desc: Any, kind: Kind) -> Values:
    g = torch.Generator().manual_seed(0)
    rows = desc.rows
    # Of logits of many sizes one takes all: no proof of an order would see the others.
    mild = (2 * torch.randn(rows, desc.vocabulary, generator=g)).to(desc.element.torch)
    found = {
        "logits": draw((rows, desc.vocabulary), desc.element, kind, 1, g) if kind != "cancelling" else mild,
        "temperature": torch.rand(rows, generator=g) * 3 - 0.2,
        "top_k": torch.randint(0, desc.vocabulary + 3, (rows,), generator=g),
        "top_p": torch.rand(rows, generator=g) * 1.2,
        "min_p": torch.rand(rows, generator=g) * 0.2,
        "seed": torch.randint(-(2**62), 2**62, (rows,), generator=g),
        "position": torch.randint(0, 2**40, (rows,), generator=g),
    }
    return {o.name: found[o.name] for o in desc.operands() if o.name in found}


@joins("sample", {"filtered": False}, {"filtered": True})
def problem(n: int, element: tp.ElementKind, kind: Kind, filtered: bool = False) -> Rows:
    given = dict.fromkeys(("top_k", "top_p", "min_p"), filtered)
    desc = tp.SampleDescriptor(element=element, rows=max(n // 40, 4), vocabulary=TOKENS, **given)
    return Rows(desc, partial(values, desc, kind))
