"""Args and plans of reductions. Each Args' fields are the operands of its descriptor, in order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from triplan.descriptors import (
    ExpressionReductionDescriptor,
    ExtremumDescriptor,
    ReduceDescriptor,
    ReducePairDescriptor,
)
from triplan.facade.plan import NamedArgs, Plan

__all__ = [
    "ExpressionReductionArgs",
    "ExpressionReductionPlan",
    "ExtremumArgs",
    "ExtremumPlan",
    "ReduceArgs",
    "ReducePairArgs",
    "ReducePairPlan",
    "ReducePlan",
]


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


@dataclass(frozen=True, slots=True)
class ReducePairArgs:
    x: Tensor
    out: Tensor
    second: Tensor


class ReducePairPlan(Plan[ReducePairDescriptor, ReducePairArgs]):
    descriptor_type, args_type = ReducePairDescriptor, ReducePairArgs


class ExpressionReductionArgs(NamedArgs):
    """The operands of the expression, and ``out``."""

    __slots__ = ()


class ExpressionReductionPlan(Plan[ExpressionReductionDescriptor, ExpressionReductionArgs]):
    descriptor_type, args_type = ExpressionReductionDescriptor, ExpressionReductionArgs
