"""Args and plans of cumulative sums and products. Each Args' fields are the operands of its descriptor, in order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from triplan.descriptors import CumprodBackwardDescriptor, ScanDescriptor
from triplan.facade.plan import Plan

__all__ = ["CumprodBackwardArgs", "CumprodBackwardPlan", "ScanArgs", "ScanPlan"]


@dataclass(frozen=True, slots=True)
class ScanArgs:
    x: Tensor
    out: Tensor


class ScanPlan(Plan[ScanDescriptor, ScanArgs]):
    descriptor_type, args_type = ScanDescriptor, ScanArgs


@dataclass(frozen=True, slots=True)
class CumprodBackwardArgs:
    """``out`` is the output of cumprod."""

    dout: Tensor
    x: Tensor
    out: Tensor
    dx: Tensor


class CumprodBackwardPlan(Plan[CumprodBackwardDescriptor, CumprodBackwardArgs]):
    descriptor_type, args_type = CumprodBackwardDescriptor, CumprodBackwardArgs
