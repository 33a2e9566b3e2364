"""What users hold: plans, their args, workspaces, caches."""

from triplan.facade.cache import CacheStats, LoadReport, PlanCache
from triplan.facade.gemm import BatchedGemmArgs, BatchedGemmPlan, GemmArgs, GemmPlan
from triplan.facade.indexing import (
    EmbeddingArgs,
    EmbeddingBackwardArgs,
    EmbeddingBackwardPlan,
    EmbeddingPlan,
    GatherArgs,
    GatherBackwardArgs,
    GatherBackwardPlan,
    GatherPlan,
    IndexAddArgs,
    IndexAddPlan,
    IndexPutArgs,
    IndexPutPlan,
    IndexSelectArgs,
    IndexSelectBackwardArgs,
    IndexSelectBackwardPlan,
    IndexSelectPlan,
    ScatterAddArgs,
    ScatterAddPlan,
    ScatterArgs,
    ScatterPlan,
)
from triplan.facade.plan import Plan, plan, plan_type
from triplan.facade.prepared import PreparedIndices
from triplan.facade.workspace import Workspace

__all__ = [
    "BatchedGemmArgs",
    "BatchedGemmPlan",
    "CacheStats",
    "EmbeddingArgs",
    "EmbeddingBackwardArgs",
    "EmbeddingBackwardPlan",
    "EmbeddingPlan",
    "GatherArgs",
    "GatherBackwardArgs",
    "GatherBackwardPlan",
    "GatherPlan",
    "GemmArgs",
    "GemmPlan",
    "IndexAddArgs",
    "IndexAddPlan",
    "IndexPutArgs",
    "IndexPutPlan",
    "IndexSelectArgs",
    "IndexSelectBackwardArgs",
    "IndexSelectBackwardPlan",
    "IndexSelectPlan",
    "LoadReport",
    "Plan",
    "PlanCache",
    "PreparedIndices",
    "ScatterAddArgs",
    "ScatterAddPlan",
    "ScatterArgs",
    "ScatterPlan",
    "Workspace",
    "plan",
    "plan_type",
]
