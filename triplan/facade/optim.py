"""Args and plans of optimizer steps. An Args' fields are the operands of its descriptor; lists or whole vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from triplan.descriptors import (
    AdamDescriptor,
    ClipDescriptor,
    LionDescriptor,
    ListExpressionDescriptor,
    SGDDescriptor,
    TotalNormDescriptor,
)
from triplan.facade.plan import NamedArgs
from triplan.facade.tables import TablePlan

__all__ = [
    "AdamArgs", "AdamPlan", "ClipArgs", "ClipPlan", "LionArgs", "LionPlan", "ListExpressionArgs",
    "ListExpressionPlan", "SGDArgs", "SGDPlan", "TotalNormArgs",
    "TotalNormPlan",
]  # fmt: skip

Tensors: TypeAlias = Tensor | Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class AdamArgs:
    """``steps``: f32, one for each tensor. ``hyper``: f64, lr, beta1, beta2, eps, weight_decay."""

    param: Tensors
    grad: Tensors
    exp_avg: Tensors
    exp_avg_sq: Tensors
    steps: Tensor
    hyper: Tensor
    max_exp_avg_sq: Tensors | None = None
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    copy: Tensors | None = None
    seed: Tensor | None = None


class AdamPlan(TablePlan[AdamDescriptor, AdamArgs]):
    descriptor_type, args_type = AdamDescriptor, AdamArgs


@dataclass(frozen=True, slots=True)
class SGDArgs:
    """``steps``: f32, one for each tensor. ``hyper``: f64, lr, momentum, dampening, weight_decay."""

    param: Tensors
    grad: Tensors
    steps: Tensor
    hyper: Tensor
    momentum_buffer: Tensors | None = None
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    copy: Tensors | None = None
    seed: Tensor | None = None


class SGDPlan(TablePlan[SGDDescriptor, SGDArgs]):
    descriptor_type, args_type = SGDDescriptor, SGDArgs


@dataclass(frozen=True, slots=True)
class LionArgs:
    """``steps``: f32, one for each tensor. ``hyper``: f64, lr, beta1, beta2, weight_decay."""

    param: Tensors
    grad: Tensors
    exp_avg: Tensors
    steps: Tensor
    hyper: Tensor
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    copy: Tensors | None = None
    seed: Tensor | None = None


class LionPlan(TablePlan[LionDescriptor, LionArgs]):
    descriptor_type, args_type = LionDescriptor, LionArgs


@dataclass(frozen=True, slots=True)
class TotalNormArgs:
    """``norm``: f64, of one element."""

    x: Tensors
    norm: Tensor


class TotalNormPlan(TablePlan[TotalNormDescriptor, TotalNormArgs]):
    descriptor_type, args_type = TotalNormDescriptor, TotalNormArgs


@dataclass(frozen=True, slots=True)
class ClipArgs:
    """``norm``: f64, of one element, for clip_norm alone."""

    x: Tensors
    limit: float
    norm: Tensor | None = None


class ClipPlan(TablePlan[ClipDescriptor, ClipArgs]):
    descriptor_type, args_type, joins = ClipDescriptor, ClipArgs, True


class ListExpressionArgs(NamedArgs):
    """The operands and the results of the expressions, lists or whole vectors."""

    __slots__ = ()


class ListExpressionPlan(TablePlan[ListExpressionDescriptor, ListExpressionArgs]):
    descriptor_type, args_type, joins = ListExpressionDescriptor, ListExpressionArgs, True
