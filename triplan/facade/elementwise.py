"""Args and plans of elementwise ops. An Args' fields are the operands of its descriptor, in order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from triplan.descriptors import UnaryBackwardDescriptor, UnaryDescriptor
from triplan.facade.plan import Plan

__all__ = ["UnaryArgs", "UnaryBackwardArgs", "UnaryBackwardPlan", "UnaryPlan"]


@dataclass(frozen=True, slots=True)
class UnaryArgs:
    x: Tensor
    out: Tensor


class UnaryPlan(Plan[UnaryDescriptor, UnaryArgs]):
    descriptor_type, args_type = UnaryDescriptor, UnaryArgs


@dataclass(frozen=True, slots=True)
class UnaryBackwardArgs:
    dout: Tensor
    x: Tensor
    dx: Tensor


class UnaryBackwardPlan(Plan[UnaryBackwardDescriptor, UnaryBackwardArgs]):
    descriptor_type, args_type = UnaryBackwardDescriptor, UnaryBackwardArgs
