"""Args and plans of indexing. Each Args' fields are the operands of its descriptor, in order.

``status``, a tensor of one i64, belongs to ``out_of_bounds="error"``; under other policies it is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from triplan.descriptors import (
    EmbeddingBackwardDescriptor,
    EmbeddingDescriptor,
    GatherBackwardDescriptor,
    GatherDescriptor,
    IndexAddDescriptor,
    IndexPutDescriptor,
    IndexSelectBackwardDescriptor,
    IndexSelectDescriptor,
    NormedEmbeddingDescriptor,
    ScatterAddDescriptor,
    ScatterDescriptor,
    ScatterReduceDescriptor,
)
from triplan.facade.plan import Plan

__all__ = ["GatherArgs", "GatherBackwardArgs", "GatherBackwardPlan", "GatherPlan"]
__all__ += ["IndexSelectArgs", "IndexSelectBackwardArgs", "IndexSelectBackwardPlan", "IndexSelectPlan"]
__all__ += ["EmbeddingArgs", "EmbeddingBackwardArgs", "EmbeddingBackwardPlan", "EmbeddingPlan"]
__all__ += ["NormedEmbeddingArgs", "NormedEmbeddingPlan"]
__all__ += ["IndexAddArgs", "IndexAddPlan"]
__all__ += ["IndexPutArgs", "IndexPutPlan"]
__all__ += ["ScatterArgs", "ScatterPlan"]
__all__ += ["ScatterAddArgs", "ScatterAddPlan"]
__all__ += ["ScatterReduceArgs", "ScatterReducePlan"]


@dataclass(frozen=True, slots=True)
class GatherArgs:
    src: Tensor
    index: Tensor
    out: Tensor
    status: Tensor | None = None


class GatherPlan(Plan[GatherDescriptor, GatherArgs]):
    descriptor_type, args_type = GatherDescriptor, GatherArgs


@dataclass(frozen=True, slots=True)
class GatherBackwardArgs:
    dout: Tensor
    index: Tensor
    dsrc: Tensor
    status: Tensor | None = None


class GatherBackwardPlan(Plan[GatherBackwardDescriptor, GatherBackwardArgs]):
    descriptor_type, args_type = GatherBackwardDescriptor, GatherBackwardArgs


@dataclass(frozen=True, slots=True)
class IndexSelectArgs:
    src: Tensor
    index: Tensor
    out: Tensor
    status: Tensor | None = None


class IndexSelectPlan(Plan[IndexSelectDescriptor, IndexSelectArgs]):
    descriptor_type, args_type = IndexSelectDescriptor, IndexSelectArgs


@dataclass(frozen=True, slots=True)
class IndexSelectBackwardArgs:
    dout: Tensor
    index: Tensor
    dsrc: Tensor
    status: Tensor | None = None


class IndexSelectBackwardPlan(Plan[IndexSelectBackwardDescriptor, IndexSelectBackwardArgs]):
    descriptor_type, args_type = IndexSelectBackwardDescriptor, IndexSelectBackwardArgs


@dataclass(frozen=True, slots=True)
class ScatterAddArgs:
    index: Tensor
    src: Tensor
    out: Tensor
    status: Tensor | None = None


class ScatterAddPlan(Plan[ScatterAddDescriptor, ScatterAddArgs]):
    descriptor_type, args_type = ScatterAddDescriptor, ScatterAddArgs


@dataclass(frozen=True, slots=True)
class ScatterArgs:
    index: Tensor
    src: Tensor
    out: Tensor
    status: Tensor | None = None


class ScatterPlan(Plan[ScatterDescriptor, ScatterArgs]):
    descriptor_type, args_type = ScatterDescriptor, ScatterArgs


@dataclass(frozen=True, slots=True)
class ScatterReduceArgs:
    index: Tensor
    src: Tensor
    out: Tensor
    status: Tensor | None = None


class ScatterReducePlan(Plan[ScatterReduceDescriptor, ScatterReduceArgs]):
    descriptor_type, args_type = ScatterReduceDescriptor, ScatterReduceArgs


@dataclass(frozen=True, slots=True)
class IndexAddArgs:
    """``alpha`` scales ``src``; None is 1."""

    index: Tensor
    src: Tensor
    out: Tensor
    alpha: float | int | None = None
    status: Tensor | None = None


class IndexAddPlan(Plan[IndexAddDescriptor, IndexAddArgs]):
    descriptor_type, args_type = IndexAddDescriptor, IndexAddArgs


@dataclass(frozen=True, slots=True)
class IndexPutArgs:
    indices: Sequence[Tensor]
    values: Tensor
    out: Tensor
    status: Tensor | None = None


class IndexPutPlan(Plan[IndexPutDescriptor, IndexPutArgs]):
    descriptor_type, args_type = IndexPutDescriptor, IndexPutArgs


@dataclass(frozen=True, slots=True)
class EmbeddingArgs:
    weight: Tensor
    index: Tensor
    out: Tensor
    status: Tensor | None = None


class EmbeddingPlan(Plan[EmbeddingDescriptor, EmbeddingArgs]):
    descriptor_type, args_type = EmbeddingDescriptor, EmbeddingArgs


@dataclass(frozen=True, slots=True)
class EmbeddingBackwardArgs:
    dout: Tensor
    index: Tensor
    dweight: Tensor
    status: Tensor | None = None


class EmbeddingBackwardPlan(Plan[EmbeddingBackwardDescriptor, EmbeddingBackwardArgs]):
    descriptor_type, args_type = EmbeddingBackwardDescriptor, EmbeddingBackwardArgs


@dataclass(frozen=True, slots=True)
class NormedEmbeddingArgs:
    weight: Tensor
    index: Tensor
    norm_weight: Tensor
    rows: Tensor
    out: Tensor
    rstd: Tensor
    status: Tensor | None = None


class NormedEmbeddingPlan(Plan[NormedEmbeddingDescriptor, NormedEmbeddingArgs]):
    descriptor_type, args_type = NormedEmbeddingDescriptor, NormedEmbeddingArgs
