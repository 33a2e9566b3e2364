"""Field types that name their meaning (shape, axis, extent) for validation and for test strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

if TYPE_CHECKING:
    from triplan.sku.model import Converted

__all__ = [
    "AxesField",
    "AxisField",
    "DivisorField",
    "Extent",
    "ExtentField",
    "IndexValueField",
    "OutOfBounds",
    "Shape",
    "ShapeField",
]

MAX_RANK = 8


@dataclass(frozen=True, slots=True)
class ShapeField:
    """Extents of a tensor whose rank is in [min_rank, max_rank]."""

    min_rank: int = 1
    max_rank: int = MAX_RANK


@dataclass(frozen=True, slots=True)
class AxisField:
    """An axis of the shape in field ``of``: 0 <= axis < rank."""

    of: str


@dataclass(frozen=True, slots=True)
class AxesField:
    """Increasing axes of the shape in field ``of``, perhaps none."""

    of: str


@dataclass(frozen=True, slots=True)
class ExtentField:
    """The size of one axis."""


@dataclass(frozen=True, slots=True)
class IndexValueField:
    """A position along an axis whose size is in field ``of``."""

    of: str


@dataclass(frozen=True, slots=True)
class DivisorField:
    """A number, at least 1, that divides the extents in the fields ``of``."""

    of: tuple[str, ...]


def to_tuple(value: Any) -> Any:
    """Lists and ``torch.Size`` become tuples; other values stay as they are."""
    return tuple(value) if isinstance(value, (list, tuple)) else value


NonNegative = Annotated[int, Field(ge=0, lt=2**62)]
Extent = Annotated[int, Field(ge=0, lt=2**62), ExtentField()]
#: Axes or extents, as a list, a tuple or a ``torch.Size``.
if TYPE_CHECKING:
    Extents = Converted[tuple[int, ...], Sequence[int]]
else:
    Extents = Annotated[tuple[NonNegative, ...], BeforeValidator(to_tuple)]
Shape = Annotated[Extents, ShapeField()]
#: A batch of rows: at least one batch axis, then the axis of the row.
RowsShape = Annotated[Extents, ShapeField(min_rank=2)]
#: A shape of any rank; that of a scalar is ().
AnyShape = Annotated[Extents, ShapeField(min_rank=0)]
#: What norms add to a variance. 0 and below too, as in torch: where the sum is then 0 or below, results become NaN or
#: infinite. -0.0 is stored as 0.0: equal values have equal keys.
Epsilon = Annotated[float, Field(allow_inf_nan=False), AfterValidator(lambda eps: eps + 0.0)]
#: What an index outside its axis does. ``skip``: the update is dropped, a gathered element becomes zero. ``clamp``: the
#: nearest valid position is taken. ``error``: as skip, and the lowest bad position is recorded in ``status``.
OutOfBounds = Literal["skip", "clamp", "error"]
#: What ``status`` holds where no index was bad; else the lowest bad position, counted row-major over the index.
NO_BAD_INDEX = 2**63 - 1
