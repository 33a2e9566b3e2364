"""Args and plans of reductions. Each Args' fields are the operands of its descriptor, in order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from triplan.descriptors import ExtremumDescriptor, ReduceDescriptor
from triplan.facade.plan import Plan

__all__ = ["ExtremumArgs", "ExtremumPlan", "ReduceArgs", "ReducePlan"]


@dataclass(frozen=True, slots=True)
class ReduceArgs:
    x: Tensor
    out: Tensor


class ReducePlan(Plan[ReduceDescriptor, ReduceArgs]):
    descriptor_type, args_type = ReduceDescriptor, ReduceArgs


@dataclass(frozen=True, slots=True)
class ExtremumArgs:
    x: Tensor
    out: Tensor
    indices: Tensor


class ExtremumPlan(Plan[ExtremumDescriptor, ExtremumArgs]):
    descriptor_type, args_type = ExtremumDescriptor, ExtremumArgs
