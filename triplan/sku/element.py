"""Element types of tensors and indices. Names are those of baracuda's ``ElementKind``, in lower case."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import BeforeValidator

from triplan.errors import shown

if TYPE_CHECKING:
    from triplan.sku.model import Converted

__all__ = ["ElementKind", "IndexElementKind"]


class ElementKind(str, Enum):
    """The type of one tensor element."""

    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"
    F64 = "f64"
    I8 = "i8"
    I16 = "i16"
    I32 = "i32"
    I64 = "i64"
    U8 = "u8"
    BOOL = "bool"
    FP8E4M3 = "fp8e4m3"
    FP8E5M2 = "fp8e5m2"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def of(cls, value: ElementKind | str | torch.dtype) -> ElementKind:
        """From a name, a torch dtype or a member. Raises ``ValueError`` for anything else."""
        if isinstance(value, cls):
            return value
        if isinstance(value, torch.dtype):
            if value not in _FROM_TORCH:
                raise ValueError(f"{value} has no ElementKind; known are {', '.join(str(d) for d in _FROM_TORCH)}")
            return _FROM_TORCH[value]
        if isinstance(value, str) and value in cls._value2member_map_:
            return cls(value)
        raise ValueError(
            f"{shown(value)} is not an element; known are {', '.join(e.value for e in cls)}, or a torch dtype"
        )

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype."""
        return _TO_TORCH[self]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _TO_TORCH[self].itemsize

    @property
    def is_floating_point(self) -> bool:
        return _TO_TORCH[self].is_floating_point

    @property
    def unit_roundoff(self) -> float:
        """u, the largest relative error of rounding to nearest: half of torch's ``eps``. 0 for integers."""
        return torch.finfo(self.torch).eps / 2 if self.is_floating_point else 0.0

    @property
    def compute(self) -> ElementKind:
        """The element in which arithmetic is done: f32 for narrower floats, otherwise the element itself."""
        narrow = self.is_floating_point and self.itemsize < 4
        return ElementKind.F32 if narrow else self

    @property
    def bits(self) -> ElementKind:
        """The integer of the same width, for kernels that only move bits."""
        return {1: ElementKind.I8, 2: ElementKind.I16, 4: ElementKind.I32, 8: ElementKind.I64}[self.itemsize]


class IndexElementKind(str, Enum):
    """The type of one index."""

    I32 = "i32"
    I64 = "i64"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def of(cls, value: IndexElementKind | ElementKind | str | torch.dtype) -> IndexElementKind:
        """From a name, a torch dtype or a member. Raises ``ValueError`` for anything else."""
        if isinstance(value, cls):
            return value
        name = {torch.int32: "i32", torch.int64: "i64"}.get(value, value) if isinstance(value, torch.dtype) else value
        name = name.value if isinstance(name, Enum) else name
        if isinstance(name, str) and name in cls._value2member_map_:
            return cls(name)
        raise ValueError(f"{shown(value)} is not an index element; known are i32 and i64, or their torch dtypes")

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype."""
        return torch.int32 if self is IndexElementKind.I32 else torch.int64

    @property
    def itemsize(self) -> int:
        """Bytes per index."""
        return 4 if self is IndexElementKind.I32 else 8


_TO_TORCH = {
    ElementKind.F16: torch.float16,
    ElementKind.BF16: torch.bfloat16,
    ElementKind.F32: torch.float32,
    ElementKind.F64: torch.float64,
    ElementKind.I8: torch.int8,
    ElementKind.I16: torch.int16,
    ElementKind.I32: torch.int32,
    ElementKind.I64: torch.int64,
    ElementKind.U8: torch.uint8,
    ElementKind.BOOL: torch.bool,
    ElementKind.FP8E4M3: torch.float8_e4m3fn,
    ElementKind.FP8E5M2: torch.float8_e5m2,
}
_FROM_TORCH = {dtype: kind for kind, dtype in _TO_TORCH.items()}


def _element(value: Any) -> Any:
    return ElementKind.of(value)


def _index_element(value: Any) -> Any:
    return IndexElementKind.of(value)


ElementName = Literal["f16", "bf16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "bool", "fp8e4m3", "fp8e5m2"]
IndexName = Literal["i32", "i64"]

#: Field types that take a name, a torch dtype or the enum member.
if TYPE_CHECKING:
    Element = Converted[ElementKind, ElementKind | ElementName | torch.dtype]
    IndexElement = Converted[IndexElementKind, IndexElementKind | ElementKind | IndexName | torch.dtype]
    OptionalElement = Converted[ElementKind | None, ElementKind | ElementName | torch.dtype | None]
    OptionalIndexElement = Converted[
        IndexElementKind | None, IndexElementKind | ElementKind | IndexName | torch.dtype | None
    ]
else:
    Element = Annotated[ElementKind, BeforeValidator(_element)]
    IndexElement = Annotated[IndexElementKind, BeforeValidator(_index_element)]
    OptionalElement, OptionalIndexElement = Element | None, IndexElement | None
