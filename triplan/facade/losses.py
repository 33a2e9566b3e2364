"""Args and plans of losses over classes. Each Args' fields are the operands of its descriptor, in order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from triplan.descriptors import (
    CrossEntropyBackwardDescriptor,
    CrossEntropyDescriptor,
    NllLossBackwardDescriptor,
    NllLossDescriptor,
    ScaleGradientDescriptor,
)
from triplan.facade.plan import Plan

__all__ = ["CrossEntropyArgs", "CrossEntropyBackwardArgs", "CrossEntropyBackwardPlan", "CrossEntropyPlan"]
__all__ += ["NllLossArgs", "NllLossBackwardArgs", "NllLossBackwardPlan", "NllLossPlan"]
__all__ += ["ScaleGradientArgs", "ScaleGradientPlan"]


@dataclass(frozen=True, slots=True)
class CrossEntropyArgs:
    """Pass ``loss`` unless the reduction is none, ``dx`` for a gradient that is not written over ``x``, and, here and
    below, ``weight``, ``bytes`` and ``status`` if the descriptor has them; else None."""

    x: Tensor
    target: Tensor
    losses: Tensor
    lse: Tensor
    loss: Tensor | None = None
    dx: Tensor | None = None
    weight: Tensor | None = None
    bytes: Tensor | None = None
    status: Tensor | None = None


class CrossEntropyPlan(Plan[CrossEntropyDescriptor, CrossEntropyArgs]):
    descriptor_type, args_type = CrossEntropyDescriptor, CrossEntropyArgs


@dataclass(frozen=True, slots=True)
class CrossEntropyBackwardArgs:
    """``lse`` is the output of cross_entropy."""

    dloss: Tensor
    x: Tensor
    target: Tensor
    lse: Tensor
    dx: Tensor
    weight: Tensor | None = None
    bytes: Tensor | None = None
    status: Tensor | None = None


class CrossEntropyBackwardPlan(Plan[CrossEntropyBackwardDescriptor, CrossEntropyBackwardArgs]):
    descriptor_type, args_type = CrossEntropyBackwardDescriptor, CrossEntropyBackwardArgs


@dataclass(frozen=True, slots=True)
class NllLossArgs:
    x: Tensor
    target: Tensor
    losses: Tensor
    loss: Tensor | None = None
    weight: Tensor | None = None
    bytes: Tensor | None = None
    status: Tensor | None = None


class NllLossPlan(Plan[NllLossDescriptor, NllLossArgs]):
    descriptor_type, args_type = NllLossDescriptor, NllLossArgs


@dataclass(frozen=True, slots=True)
class NllLossBackwardArgs:
    dloss: Tensor
    target: Tensor
    dx: Tensor
    weight: Tensor | None = None
    bytes: Tensor | None = None
    status: Tensor | None = None


class NllLossBackwardPlan(Plan[NllLossBackwardDescriptor, NllLossBackwardArgs]):
    descriptor_type, args_type = NllLossBackwardDescriptor, NllLossBackwardArgs


@dataclass(frozen=True, slots=True)
class ScaleGradientArgs:
    """Pass ``unscaled`` unless ``dx`` itself is scaled in place."""

    dloss: Tensor
    dx: Tensor
    unscaled: Tensor | None = None


class ScaleGradientPlan(Plan[ScaleGradientDescriptor, ScaleGradientArgs]):
    descriptor_type, args_type = ScaleGradientDescriptor, ScaleGradientArgs
