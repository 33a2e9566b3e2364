"""Args and plans of copies. An Args' fields are the operands of its descriptor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from triplan.descriptors import ArangeDescriptor, CopyDescriptor, FillDescriptor, JoinDescriptor, PadDescriptor
from triplan.facade.plan import NamedArgs, Plan

__all__ = [
    "ArangeArgs",
    "ArangePlan",
    "CopyArgs",
    "CopyPlan",
    "FillArgs",
    "FillPlan",
    "JoinArgs",
    "JoinPlan",
    "PadArgs",
    "PadPlan",
]


@dataclass(frozen=True, slots=True)
class CopyArgs:
    x: Tensor
    out: Tensor


class CopyPlan(Plan[CopyDescriptor, CopyArgs]):
    descriptor_type, args_type = CopyDescriptor, CopyArgs


@dataclass(frozen=True, slots=True)
class PadArgs:
    """``value``: what is put around x, a Python number."""

    x: Tensor
    value: float | int
    out: Tensor


class PadPlan(Plan[PadDescriptor, PadArgs]):
    descriptor_type, args_type = PadDescriptor, PadArgs


class JoinArgs(NamedArgs):
    """x0, x1 and so on, out."""

    __slots__ = ()


class JoinPlan(Plan[JoinDescriptor, JoinArgs]):
    descriptor_type, args_type = JoinDescriptor, JoinArgs


@dataclass(frozen=True, slots=True)
class FillArgs:
    """``value``: a Python number."""

    out: Tensor
    value: float | int


class FillPlan(Plan[FillDescriptor, FillArgs]):
    descriptor_type, args_type = FillDescriptor, FillArgs


@dataclass(frozen=True, slots=True)
class ArangeArgs:
    """``start``, ``step``: Python numbers."""

    out: Tensor
    start: float | int
    step: float | int


class ArangePlan(Plan[ArangeDescriptor, ArangeArgs]):
    descriptor_type, args_type = ArangeDescriptor, ArangeArgs
