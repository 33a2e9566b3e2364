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
    """Operands of gemm. ``c0`` and ``beta`` belong to ``reads_c0``, ``bias`` to an epilogue with a bias, ``pre`` to
    ``saves_pre``; where these are not set, None is passed. A scalar that is None is 1."""

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
    """Operands of batched_gemm: those of ``GemmArgs``, with the batch axis first in every matrix."""

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
    """Operands of gemm_backward. ``a`` and ``db`` belong to ``wants_db``, ``b`` and ``da`` to ``wants_da``, ``dbias``
    to ``wants_dbias``; where these are not set, None is passed. ``alpha`` is 1 if it is None."""

    dc: Tensor
    a: Tensor | None = None
    b: Tensor | None = None
    da: Tensor | None = None
    db: Tensor | None = None
    dbias: Tensor | None = None
    alpha: float | int | None = None


class GemmBackwardPlan(Plan[GemmBackwardDescriptor, GemmBackwardArgs]):
    descriptor_type, args_type = GemmBackwardDescriptor, GemmBackwardArgs
