"""Matrix products for the proofs: the contributions are the steps of k, the batch the rows of A and C."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import triplan as tp
from proofs import Kind, Problem, Variant, draw, joins

ROWS, COLUMNS = 24, 32


def turned(name: str, axis: int) -> dict[str, Any]:
    """Options for a factor whose columns are contiguous."""
    return {"layouts": {name: tp.Layout.strided(unit_axis=axis)}}


class Gemm(Problem):
    """``a`` (rows, k), ``b`` (k, columns), and ``c0`` (rows, columns) and ``bias`` where the options ask for them.

    ``batched``: each row is a product of its own, of one row and the same B.
    """

    def __init__(self, batched: bool, options: dict[str, Any], a: Tensor, b: Tensor, c0: Tensor, bias: Tensor) -> None:
        self.batched, self.options, self.parts_of = batched, options, (a, b, c0, bias)
        (m, k), n = a.shape, b.shape[1]
        self.desc: tp.Descriptor
        if batched:
            self.desc = tp.BatchedGemmDescriptor(batch=m, m=1, n=n, k=k, **options)
            a, b, c0 = a[:, None], b.expand(m, k, n).contiguous(), c0[:, None]
        else:
            self.desc = tp.GemmDescriptor(m=m, n=n, k=k, **options)
        layouts = options.get("layouts", {})
        a, b = (x.mT.contiguous().mT if name in layouts else x for name, x in (("a", a), ("b", b)))
        named = {"a": a, "b": b, "c0": c0, "bias": bias}
        self.values = {o.name: named[o.name] for o in self.desc.operands() if o.name in named}

    def parts(self) -> Iterator[Variant]:
        yield self._rows(torch.arange(0, ROWS, 2))
        yield self._rows(torch.tensor([ROWS - 1]))
        yield self._rows(torch.arange(ROWS).roll(5).repeat(3))

    def _rows(self, kept: Tensor) -> Variant:
        a, b, c0, bias = self.parts_of
        part = Gemm(self.batched, self.options, a[kept], b, c0[kept], bias)
        return Variant(part, lambda out: out["c"], lambda out: out["c"][kept])

    def reordered(self) -> Variant:
        a, b, c0, bias = self.parts_of
        order = torch.randperm(a.shape[1], generator=torch.Generator().manual_seed(1))
        other = Gemm(self.batched, self.options, a[:, order].contiguous(), b[order].contiguous(), c0, bias)
        return Variant(other, lambda out: out["c"], lambda out: out["c"])


def make(
    batched: bool,
    n: int,
    element: tp.ElementKind,
    kind: Kind,
    columns: int = COLUMNS,
    tf32: bool = False,
    **options: Any,
) -> Gemm:
    """k = ``n`` (even). In ``cancelling`` the second half of k opposes the first, and all are shuffled.

    ``tf32``: f32 is multiplied as tf32.
    """
    if tf32 and element is tp.ElementKind.F32:
        options["math"] = "tf32"
    g = torch.Generator().manual_seed(0)
    a, b = draw((ROWS, n), element, kind, n, g), draw((n, columns), element, kind, n, g)
    if kind == "huge" and element is tp.ElementKind.F64:
        a, b = a * 2.0**-520, b * 2.0**-520  # the oracle's range is no wider: what overflows in it depends on the order
    out = element if element.is_floating_point else tp.ElementKind.I32
    c0, bias = draw((ROWS, columns), out, kind, n, g), draw((columns,), out, kind, n, g)
    if kind == "cancelling" and element.is_floating_point:
        half, order = n // 2, torch.randperm(n, generator=g)
        a[:, half:], b[half:] = -a[:, :half], b[:half]
        a, b = a[:, order].contiguous(), b[order].contiguous()
        c0, bias = c0 * 2.0**-10, bias * 2.0**-10  # small beside what is rounded off
    return Gemm(batched, {"element": element, **options}, a, b, c0, bias)


class Symmetric(Problem):
    """``a`` (batch, rows, k) times ``(signs * a).T``, added to a symmetric ``c0``."""

    def __init__(self, a: Tensor, signs: Tensor, c0: Tensor, element: tp.ElementKind) -> None:
        self.drawn = (a, signs, c0, element)
        (batch, rows, k), b = a.shape, (a * signs).mT.contiguous()
        sizes = {"batch": batch, "m": rows, "n": rows, "k": k}
        self.desc: tp.Descriptor = tp.BatchedGemmDescriptor(**sizes, element=element, reads_c0=True, symmetric=True)
        self.values = {"a": a, "b": b, "c0": c0}

    def parts(self) -> Iterator[Variant]:
        a, signs, c0, element = self.drawn
        for kept in ([1], [2, 0]):
            part = Symmetric(a[kept], signs, c0[kept], element)
            yield Variant(part, lambda out: out["c"], lambda out, kept=kept: out["c"][kept])

    def reordered(self) -> Variant:
        a, signs, c0, element = self.drawn
        order = torch.randperm(a.shape[2], generator=torch.Generator().manual_seed(1))
        other = Symmetric(a[..., order].contiguous(), signs[order], c0, element)
        return Variant(other, lambda out: out["c"], lambda out: out["c"])


def symmetric(n: int, element: tp.ElementKind, kind: Kind) -> Symmetric:
    """As ``make``, of matrices that are symmetric."""
    g = torch.Generator().manual_seed(0)
    a, signs = draw((3, ROWS, n), element, kind, n, g), torch.ones(n, dtype=element.torch)
    if kind == "huge" and element is tp.ElementKind.F64:
        a = a * 2.0**-520
    out = element if element.is_floating_point else tp.ElementKind.I32
    c0 = draw((3, ROWS, ROWS), out, kind, n, g)
    if kind == "cancelling" and element.is_floating_point:
        half, order = n // 2, torch.randperm(n, generator=g)
        a[..., half:], signs[half:] = a[..., :half], -1
        a, signs, c0 = a[..., order].contiguous(), signs[order], c0 * 2.0**-10
    return Symmetric(a, signs, c0.tril() + c0.tril(-1).mT, element)


def make_any(batched: bool, n: int, element: tp.ElementKind, kind: Kind, **options: Any) -> Problem:
    return (
        symmetric(n, element, kind) if options.pop("symmetric", False) else make(batched, n, element, kind, **options)
    )


_OPTIONS: tuple[dict[str, Any], ...] = ({}, {"epilogue": "bias"}, {"epilogue": "bias_relu", "reads_c0": True})
joins("gemm", *_OPTIONS, turned("b", 0), {**turned("a", 0), "tf32": True}, {"columns": 1})(partial(make, False))
joins("batched_gemm", *_OPTIONS, turned("b", 1), {**turned("a", 1), "tf32": True}, {"symmetric": True})(
    partial(make_any, True)
)
