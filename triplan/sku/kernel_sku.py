"""KernelSku: which kernel computes a descriptor."""

from __future__ import annotations

from pydantic import PositiveInt

from triplan.sku.element import Element, OptionalElement, OptionalIndexElement
from triplan.sku.guarantee import PrecisionGuarantee
from triplan.sku.kinds import ArchSku, BackendKind, OpCategory
from triplan.sku.model import FrozenModel, field

__all__ = ["KernelSku"]


class KernelSku(FrozenModel):
    """Identity of a plan's kernel: what the kernel *is*, not what was requested.

    ``version`` changes when, and only when, bits may change. Equal ``numerics_id``s mean equal bits for the same row or
    segment, also between plans of different batch size; None if no such claim is made.
    """

    category: OpCategory
    op: str
    element: Element
    aux_element: OptionalElement = field(default=None)
    index_element: OptionalIndexElement = field(default=None)
    layout: str | None = None
    epilogue: str | None = None
    arch: ArchSku
    backend: BackendKind
    kernel: str
    version: PositiveInt
    precision_guarantee: PrecisionGuarantee
    numerics_id: str | None = None

    @property
    def id(self) -> str:
        """A shape-free name for telemetry, such as ``gather/rows/v1/f32/i64/packed/sm90a``."""
        parts = (self.op, self.kernel, f"v{self.version}", self.element, self.aux_element, self.index_element)
        return "/".join(str(p) for p in (*parts, self.layout, self.epilogue, self.arch) if p is not None)
