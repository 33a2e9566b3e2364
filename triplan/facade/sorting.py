"""Args and plans of sorting. Each Args' fields are the operands of its descriptor, in order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from triplan.descriptors import (
    ArgsortDescriptor,
    KthValueDescriptor,
    SearchSortedDescriptor,
    SortDescriptor,
    TopKDescriptor,
)
from triplan.facade.plan import NamedArgs, Plan

__all__ = [
    "ArgsortArgs",
    "ArgsortPlan",
    "KthValuePlan",
    "SearchSortedArgs",
    "SearchSortedPlan",
    "SortPlan",
    "SortedArgs",
    "TopKPlan",
]


@dataclass(frozen=True, slots=True)
class SortedArgs:
    """Args of topk, kthvalue and sort."""

    x: Tensor
    values: Tensor
    indices: Tensor


class TopKPlan(Plan[TopKDescriptor, SortedArgs]):
    descriptor_type, args_type = TopKDescriptor, SortedArgs


class KthValuePlan(Plan[KthValueDescriptor, SortedArgs]):
    descriptor_type, args_type = KthValueDescriptor, SortedArgs


class SortPlan(Plan[SortDescriptor, SortedArgs]):
    descriptor_type, args_type = SortDescriptor, SortedArgs


@dataclass(frozen=True, slots=True)
class ArgsortArgs:
    x: Tensor
    indices: Tensor


class ArgsortPlan(Plan[ArgsortDescriptor, ArgsortArgs]):
    descriptor_type, args_type = ArgsortDescriptor, ArgsortArgs


class SearchSortedArgs(NamedArgs):
    """sequence, sorter, x, out: those that the descriptor has."""

    __slots__ = ()


class SearchSortedPlan(Plan[SearchSortedDescriptor, SearchSortedArgs]):
    descriptor_type, args_type = SearchSortedDescriptor, SearchSortedArgs
