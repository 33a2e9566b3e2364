"""Args and plans of softmax and log_softmax. Each Args' fields are the operands of its descriptor, in order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from triplan.descriptors import (
    LogSoftmaxBackwardDescriptor,
    LogSoftmaxDescriptor,
    SoftmaxBackwardDescriptor,
    SoftmaxDescriptor,
)
from triplan.facade.plan import Plan

__all__ = ["LogSoftmaxArgs", "LogSoftmaxBackwardArgs", "LogSoftmaxBackwardPlan", "LogSoftmaxPlan"]
__all__ += ["SoftmaxArgs", "SoftmaxBackwardArgs", "SoftmaxBackwardPlan", "SoftmaxPlan"]


@dataclass(frozen=True, slots=True)
class SoftmaxArgs:
    x: Tensor
    out: Tensor


class SoftmaxPlan(Plan[SoftmaxDescriptor, SoftmaxArgs]):
    descriptor_type, args_type = SoftmaxDescriptor, SoftmaxArgs


@dataclass(frozen=True, slots=True)
class SoftmaxBackwardArgs:
    """``out`` is the output of softmax."""

    dout: Tensor
    out: Tensor
    dx: Tensor


class SoftmaxBackwardPlan(Plan[SoftmaxBackwardDescriptor, SoftmaxBackwardArgs]):
    descriptor_type, args_type = SoftmaxBackwardDescriptor, SoftmaxBackwardArgs


@dataclass(frozen=True, slots=True)
class LogSoftmaxArgs:
    x: Tensor
    out: Tensor


class LogSoftmaxPlan(Plan[LogSoftmaxDescriptor, LogSoftmaxArgs]):
    descriptor_type, args_type = LogSoftmaxDescriptor, LogSoftmaxArgs


@dataclass(frozen=True, slots=True)
class LogSoftmaxBackwardArgs:
    """``out`` is the output of log_softmax."""

    dout: Tensor
    out: Tensor
    dx: Tensor


class LogSoftmaxBackwardPlan(Plan[LogSoftmaxBackwardDescriptor, LogSoftmaxBackwardArgs]):
    descriptor_type, args_type = LogSoftmaxBackwardDescriptor, LogSoftmaxBackwardArgs
