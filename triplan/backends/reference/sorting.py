"""Sorting in plain torch, from the definitions: shares no computation with the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from triplan.backends.table import CheckRules, Compute, reference
from triplan.backends.triton.sorting.shared import ELEMENTS, guarantee
from triplan.descriptors import (
    ArgsortDescriptor,
    KthValueDescriptor,
    SearchSortedDescriptor,
    SortDescriptor,
    TopKDescriptor,
)
from triplan.sku import ElementKind

Tensors = Mapping[str, Tensor]


def _ascending(desc: SearchSortedDescriptor, x: Tensors) -> Tensors:
    """Ascending rows; or what sorts them."""
    if desc.sorter:
        return {"sorter": _stable(x["sequence"])}
    return {"sequence": _at(x["sequence"], _stable(x["sequence"]))}


def _declared(op: str) -> Callable[[Compute], Compute]:
    inputs = _ascending if op == "searchsorted" else None
    return reference(op=op, elements=ELEMENTS, guarantee=guarantee, checks=CheckRules(CheckRules.no_terms, inputs))


def _stable(x: Tensor, descending: bool = False) -> Tensor:
    """The positions of the elements of each row in order."""
    # (By torch's stable sort, which has no bool on all devices; NaN is largest, and -0.0 equals 0.0, as here.)
    return (x.to(torch.uint8) if x.dtype is torch.bool else x).sort(dim=1, descending=descending, stable=True).indices


def _at(x: Tensor, indices: Tensor) -> Tensor:
    """Elements of each row, with the bits of a NaN, which torch's gather changes in f16."""
    return x[torch.arange(x.shape[0])[:, None], indices]


@_declared("topk")
def topk(desc: TopKDescriptor, x: Tensors) -> Tensors:
    indices = _stable(x["x"], desc.largest)[:, : desc.k]
    return {"values": _at(x["x"], indices), "indices": indices}


@_declared("kthvalue")
def kthvalue(desc: KthValueDescriptor, x: Tensors) -> Tensors:
    indices = _stable(x["x"])[:, desc.k - 1 : desc.k]
    return {"values": _at(x["x"], indices)[:, 0], "indices": indices[:, 0]}


@_declared("sort")
def sort(desc: SortDescriptor, x: Tensors) -> Tensors:
    indices = _stable(x["x"], desc.descending)
    return {"values": _at(x["x"], indices), "indices": indices}


@_declared("argsort")
def argsort(desc: ArgsortDescriptor, x: Tensors) -> Tensors:
    return {"indices": _stable(x["x"], desc.descending)}


@_declared("searchsorted")
def searchsorted(desc: SearchSortedDescriptor, x: Tensors) -> Tensors:
    out = torch.int32 if desc.out_int32 else ElementKind.I64.torch
    sequence, values = (
        x[name].to(torch.uint8) if desc.element is ElementKind.BOOL else x[name] for name in ("sequence", "x")
    )
    found = torch.searchsorted(
        sequence.contiguous(), values.contiguous(), sorter=x.get("sorter"), right=desc.right, out_int32=desc.out_int32
    )
    return {"out": found.to(out)}
