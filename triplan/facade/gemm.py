"""Args and plans of matrix products. Each Args' fields are the operands of its descriptor, in order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from triplan.descriptors import BatchedGemmDescriptor, GemmBackwardDescriptor, GemmDescriptor
from triplan.facade.plan import Plan

__all__ = ["BatchedGemmArgs", "BatchedGemmPlan"]
__all__ += ["GemmArgs", "GemmBackwardArgs", "GemmBackwardPlan", "GemmPlan"]


@dataclass(frozen=True, slots=True)
class GemmArgs:
    """``c0`` and ``beta`` only with ``reads_c0``, ``bias`` only where the epilogue adds one, ``pre`` only with
    ``saves_pre``; None scalars are 1."""

    a: Tensor
    b: Tensor
    c: Tensor
    c0: Tensor | None = None
    bias: Tensor | None = None
    alpha: float | int | None = None
    beta: float | int | None = None
    pre: Tensor | None = None


class GemmPlan(Plan[GemmDescriptor, GemmArgs]):
    descriptor_type, args_type = GemmDescriptor, GemmArgs


@dataclass(frozen=True, slots=True)
class BatchedGemmArgs:
    """As ``GemmArgs``, with the batch's axis first in all matrices."""

    a: Tensor
    b: Tensor
    c: Tensor
    c0: Tensor | None = None
    bias: Tensor | None = None
    alpha: float | int | None = None
    beta: float | int | None = None
    pre: Tensor | None = None


class BatchedGemmPlan(Plan[BatchedGemmDescriptor, BatchedGemmArgs]):
    descriptor_type, args_type = BatchedGemmDescriptor, BatchedGemmArgs


@dataclass(frozen=True, slots=True)
class GemmBackwardArgs:
    """``a`` and ``db`` only with ``wants_db``, ``b`` and ``da`` with ``wants_da``, ``dbias`` with ``wants_dbias``."""

    dc: Tensor
    a: Tensor | None = None
    b: Tensor | None = None
    da: Tensor | None = None
    db: Tensor | None = None
    dbias: Tensor | None = None
    alpha: float | int | None = None


class GemmBackwardPlan(Plan[GemmBackwardDescriptor, GemmBackwardArgs]):
    descriptor_type, args_type = GemmBackwardDescriptor, GemmBackwardArgs
