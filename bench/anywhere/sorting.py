"""Draws of sorts, selections of the largest elements, and searches in sorted rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import triplan as tp
from bench.anywhere.drawing import HEADS, Draw, Peer, Tensors, described, placed
from triplan.testing.placing import write

FOLLOWING = ("sorter",)


def draw(op: str, d: Draw) -> tp.Descriptor:
    element = d.element(op)
    each = {"sort": 2 * element.itemsize + 8, "argsort": element.itemsize + 8}.get(op, element.itemsize)
    if op == "searchsorted":
        rows, m = d.matrix(max(d.bytes // (2 * (element.itemsize + 8)), 1))
        n = d.extent(1, max(d.bytes // (2 * rows * element.itemsize), 1))
        fields = {"m": m, "right": d.chance(0.5), "out_int32": d.chance(0.3), "sorter": d.chance(0.2)}
        return described(op, element=element, rows=rows, n=n, **fields)
    rows, n = d.matrix(max(d.bytes // each, 1))
    options: dict[str, Any] = {"descending": d.chance(0.3)}
    if op == "topk":
        options = {"k": d.extent(1, min(n, 1024), HEADS), "largest": d.chance(0.7)}
    elif op == "kthvalue":
        options = {"k": d.extent(1, n)}
    return described(op, element=element, rows=rows, n=n, **options)


def _order(desc: Any, x: Tensor) -> Tensor:
    """torch's stable order of the rows."""
    x = x.to(torch.uint8) if x.dtype is torch.bool else x
    return x.sort(dim=1, descending=getattr(desc, "descending", False), stable=True).indices


def complete(desc: Any, t: Tensors) -> None:
    """Ascending sequences, and what sorts the others."""
    if desc.op != "searchsorted":
        return
    order = _order(desc, t["sequence"])
    if desc.sorter:
        write(t["sorter"], order)
    else:
        write(t["sequence"], t["sequence"].gather(1, order))


def _values(select: Any, x: Tensor, *args: Any) -> Tensor:
    """What a selection of torch's gives, which knows no bool."""
    found: Tensor = select(x.to(torch.uint8) if x.dtype is torch.bool else x, *args).values
    return found.to(x.dtype)


def peers(desc: Any) -> dict[str, Peer]:
    """torch's sorts are stable. Its selections take any of equal elements: only their values are compared."""
    return {"torch": placed(lambda t: _torchs(desc, t))}


def _torchs(desc: Any, t: Tensors) -> Tensors:
    if desc.op == "sort":
        found = torch.sort(t["x"], dim=1, descending=desc.descending, stable=True)
        return {"values": found.values, "indices": found.indices}
    if desc.op == "argsort":
        return {"indices": torch.argsort(t["x"], dim=1, descending=desc.descending, stable=True)}
    if desc.op == "topk":
        return {"values": _values(torch.topk, t["x"], desc.k, 1, desc.largest)}
    if desc.op == "kthvalue":
        return {"values": _values(torch.kthvalue, t["x"], desc.k, 1)}
    sorter, options = t.get("sorter"), {"right": desc.right, "out_int32": desc.out_int32}
    return {"out": torch.searchsorted(t["sequence"], t["x"], sorter=sorter, **options)}
