"""Args and plans of batch and group normalisation. Each Args' fields are the operands of its descriptor, in order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from triplan.descriptors import (
    BatchNormBackwardDescriptor,
    BatchNormDescriptor,
    GroupNormBackwardDescriptor,
    GroupNormDescriptor,
)
from triplan.facade.plan import Plan

__all__ = ["BatchNormArgs", "BatchNormBackwardArgs", "BatchNormBackwardPlan", "BatchNormPlan"]
__all__ += ["GroupNormArgs", "GroupNormBackwardArgs", "GroupNormBackwardPlan", "GroupNormPlan"]


@dataclass(frozen=True, slots=True)
class BatchNormArgs:
    """``momentum`` is 0.1 if it is None; ``next_mean`` and ``next_var`` may be ``running_mean`` and ``running_var``."""

    x: Tensor
    out: Tensor
    mean: Tensor
    rstd: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    next_mean: Tensor | None = None
    next_var: Tensor | None = None
    momentum: float | None = None
    residual: Tensor | None = None


class BatchNormPlan(Plan[BatchNormDescriptor, BatchNormArgs]):
    descriptor_type, args_type = BatchNormDescriptor, BatchNormArgs


@dataclass(frozen=True, slots=True)
class GroupNormBackwardArgs:
    """``mean`` and ``rstd`` are those of the forward op."""

    dout: Tensor
    x: Tensor
    mean: Tensor
    rstd: Tensor
    dx: Tensor
    weight: Tensor | None = None
    dweight: Tensor | None = None
    dbias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class BatchNormBackwardArgs(GroupNormBackwardArgs):
    """``mean``, ``rstd`` and ``out`` are those of the forward op."""

    out: Tensor | None = None
    dresidual: Tensor | None = None


class BatchNormBackwardPlan(Plan[BatchNormBackwardDescriptor, BatchNormBackwardArgs]):
    descriptor_type, args_type = BatchNormBackwardDescriptor, BatchNormBackwardArgs


@dataclass(frozen=True, slots=True)
class GroupNormArgs:
    x: Tensor
    out: Tensor
    mean: Tensor
    rstd: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None


class GroupNormPlan(Plan[GroupNormDescriptor, GroupNormArgs]):
    descriptor_type, args_type = GroupNormDescriptor, GroupNormArgs


class GroupNormBackwardPlan(Plan[GroupNormBackwardDescriptor, GroupNormBackwardArgs]):
    descriptor_type, args_type = GroupNormBackwardDescriptor, GroupNormBackwardArgs
