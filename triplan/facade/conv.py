"""Args and plans of convolution. An Args' fields are the operands of its descriptor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from triplan.descriptors import (
    Conv2dBackwardInputDescriptor,
    Conv2dBackwardWeightDescriptor,
    Conv2dDescriptor,
)
from triplan.facade.plan import Plan

__all__ = [
    "Conv2dArgs",
    "Conv2dBackwardInputArgs",
    "Conv2dBackwardInputPlan",
    "Conv2dBackwardWeightArgs",
    "Conv2dBackwardWeightPlan",
    "Conv2dPlan",
]


@dataclass(frozen=True, slots=True)
class Conv2dArgs:
    """``bias``: if the descriptor has one, else None."""

    x: Tensor
    weight: Tensor
    out: Tensor
    bias: Tensor | None = None


class Conv2dPlan(Plan[Conv2dDescriptor, Conv2dArgs]):
    descriptor_type, args_type = Conv2dDescriptor, Conv2dArgs


@dataclass(frozen=True, slots=True)
class Conv2dBackwardInputArgs:
    dout: Tensor
    weight: Tensor
    dx: Tensor


class Conv2dBackwardInputPlan(Plan[Conv2dBackwardInputDescriptor, Conv2dBackwardInputArgs]):
    descriptor_type, args_type = Conv2dBackwardInputDescriptor, Conv2dBackwardInputArgs


@dataclass(frozen=True, slots=True)
class Conv2dBackwardWeightArgs:
    x: Tensor
    dout: Tensor
    dweight: Tensor


class Conv2dBackwardWeightPlan(Plan[Conv2dBackwardWeightDescriptor, Conv2dBackwardWeightArgs]):
    descriptor_type, args_type = Conv2dBackwardWeightDescriptor, Conv2dBackwardWeightArgs
