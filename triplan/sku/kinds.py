"""The enumerations of a SKU: architecture, backend, category, precision, duplicates."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator

if TYPE_CHECKING:
    from triplan.sku.model import Converted

__all__ = ["ArchSku", "BackendKind", "Duplicates", "MathPrecision", "OpCategory"]


class _Name(str, Enum):
    def __str__(self) -> str:
        return str(self.value)


class ArchSku(_Name):
    """What a kernel is compiled for. sm80 code runs on every 8.x device, sm90a code on 9.0 only."""

    SM80 = "sm80"
    SM90A = "sm90a"
    CPU = "cpu"

    @property
    def capability(self) -> int:
        """Triton's number for the architecture: 80 or 90 (Triton appends the ``a`` itself)."""
        return {"sm80": 80, "sm90a": 90}[self.value]


#: The architectures that Triton kernels are compiled for.
GPU_ARCHS = (ArchSku.SM80, ArchSku.SM90A)


class BackendKind(_Name):
    """What executes a plan."""

    TRITON = "triton"
    REFERENCE = "reference"


class OpCategory(_Name):
    """The family of an op."""

    INDEXING = "indexing"
    GEMM = "gemm"
    ROWWISE = "rowwise"
    NORMALIZATION = "normalization"
    ELEMENTWISE = "elementwise"
    ATTENTION = "attention"
    CONV = "conv"
    POOLING = "pooling"
    COPIES = "copies"
    RANDOM = "random"
    SAMPLING = "sampling"
    OPTIM = "optim"
    REDUCTIONS = "reductions"
    SORTING = "sorting"
    CUSTOM = "custom"


class MathPrecision(_Name):
    """Precision of the multiplicands, from strongest to weakest. ``exact``: nothing is computed, or only integers.

    ``tf32x3``: each multiplicand is split into two tf32 parts; the smallest of the four products is left out.
    """

    EXACT = "exact"
    F64 = "f64"
    F32 = "f32"
    TF32X3 = "tf32x3"
    TF32 = "tf32"
    F16 = "f16"
    BF16 = "bf16"
    FP8 = "fp8"


def _math(value: Any) -> Any:
    return MathPrecision(value) if isinstance(value, str) and value in set(MathPrecision) else value


MathName = Literal["exact", "f64", "f32", "tf32x3", "tf32", "f16", "bf16", "fp8"]

#: A field type that accepts a name or an enum member.
if TYPE_CHECKING:
    OptionalMath = Converted[MathPrecision | None, MathPrecision | MathName | None]
else:
    OptionalMath = Annotated[MathPrecision, BeforeValidator(_math)] | None


class Duplicates(_Name):
    """What happens if several contributions go to one element. From strongest to weakest."""

    SUM = "sum"
    LAST = "last"
    ANY = "any"
