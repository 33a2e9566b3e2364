"""WHO answers, as pure data."""

from triplan.sku.element import Element, ElementKind, IndexElement, IndexElementKind
from triplan.sku.guarantee import PrecisionGuarantee, Tolerance
from triplan.sku.kernel_sku import KernelSku
from triplan.sku.kinds import GPU_ARCHS, ArchSku, BackendKind, Duplicates, Math, MathPrecision, OpCategory
from triplan.sku.model import FrozenModel
from triplan.sku.preference import NO_PREFERENCE, PlanPreference
from triplan.sku.support import SUPPORTED, Candidate, Support
from triplan.sku.target import Target, interpreting

__all__ = [
    "GPU_ARCHS",
    "NO_PREFERENCE",
    "SUPPORTED",
    "ArchSku",
    "BackendKind",
    "Candidate",
    "Duplicates",
    "Element",
    "ElementKind",
    "FrozenModel",
    "IndexElement",
    "IndexElementKind",
    "KernelSku",
    "Math",
    "MathPrecision",
    "OpCategory",
    "PlanPreference",
    "PrecisionGuarantee",
    "Support",
    "Target",
    "Tolerance",
    "interpreting",
]
