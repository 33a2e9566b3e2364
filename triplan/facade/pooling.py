"""Args and plans of pooling. Each Args' fields are the operands of its descriptor, in order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from triplan.descriptors import (
    AdaptiveAvgPool2dBackwardDescriptor,
    AdaptiveAvgPool2dDescriptor,
    AvgPool2dBackwardDescriptor,
    AvgPool2dDescriptor,
    MaxPool2dBackwardDescriptor,
    MaxPool2dDescriptor,
    UpsampleBilinear2dBackwardDescriptor,
    UpsampleBilinear2dDescriptor,
    UpsampleNearest2dBackwardDescriptor,
    UpsampleNearest2dDescriptor,
)
from triplan.facade.plan import Plan

__all__ = [
    "AdaptiveAvgPool2dBackwardPlan",
    "AdaptiveAvgPool2dPlan",
    "AvgPool2dBackwardPlan",
    "AvgPool2dPlan",
    "AvgPoolArgs",
    "AvgPoolBackwardArgs",
    "MaxPool2dArgs",
    "MaxPool2dBackwardArgs",
    "MaxPool2dBackwardPlan",
    "MaxPool2dPlan",
    "UpsampleArgs",
    "UpsampleBackwardArgs",
    "UpsampleBilinear2dBackwardPlan",
    "UpsampleBilinear2dPlan",
    "UpsampleNearest2dBackwardPlan",
    "UpsampleNearest2dPlan",
]


@dataclass(frozen=True, slots=True)
class MaxPool2dArgs:
    x: Tensor
    out: Tensor
    indices: Tensor


class MaxPool2dPlan(Plan[MaxPool2dDescriptor, MaxPool2dArgs]):
    descriptor_type, args_type = MaxPool2dDescriptor, MaxPool2dArgs


@dataclass(frozen=True, slots=True)
class MaxPool2dBackwardArgs:
    """``indices`` are those of max_pool2d."""

    dout: Tensor
    indices: Tensor
    dx: Tensor


class MaxPool2dBackwardPlan(Plan[MaxPool2dBackwardDescriptor, MaxPool2dBackwardArgs]):
    descriptor_type, args_type = MaxPool2dBackwardDescriptor, MaxPool2dBackwardArgs


@dataclass(frozen=True, slots=True)
class AvgPoolArgs:
    x: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class AvgPoolBackwardArgs:
    dout: Tensor
    dx: Tensor


class AvgPool2dPlan(Plan[AvgPool2dDescriptor, AvgPoolArgs]):
    descriptor_type, args_type = AvgPool2dDescriptor, AvgPoolArgs


class AvgPool2dBackwardPlan(Plan[AvgPool2dBackwardDescriptor, AvgPoolBackwardArgs]):
    descriptor_type, args_type = AvgPool2dBackwardDescriptor, AvgPoolBackwardArgs


class AdaptiveAvgPool2dPlan(Plan[AdaptiveAvgPool2dDescriptor, AvgPoolArgs]):
    descriptor_type, args_type = AdaptiveAvgPool2dDescriptor, AvgPoolArgs


class AdaptiveAvgPool2dBackwardPlan(Plan[AdaptiveAvgPool2dBackwardDescriptor, AvgPoolBackwardArgs]):
    descriptor_type, args_type = AdaptiveAvgPool2dBackwardDescriptor, AvgPoolBackwardArgs


@dataclass(frozen=True, slots=True)
class UpsampleArgs:
    x: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class UpsampleBackwardArgs:
    dout: Tensor
    dx: Tensor


class UpsampleNearest2dPlan(Plan[UpsampleNearest2dDescriptor, UpsampleArgs]):
    descriptor_type, args_type = UpsampleNearest2dDescriptor, UpsampleArgs


class UpsampleNearest2dBackwardPlan(Plan[UpsampleNearest2dBackwardDescriptor, UpsampleBackwardArgs]):
    descriptor_type, args_type = UpsampleNearest2dBackwardDescriptor, UpsampleBackwardArgs


class UpsampleBilinear2dPlan(Plan[UpsampleBilinear2dDescriptor, UpsampleArgs]):
    descriptor_type, args_type = UpsampleBilinear2dDescriptor, UpsampleArgs


class UpsampleBilinear2dBackwardPlan(Plan[UpsampleBilinear2dBackwardDescriptor, UpsampleBackwardArgs]):
    descriptor_type, args_type = UpsampleBilinear2dBackwardDescriptor, UpsampleBackwardArgs
