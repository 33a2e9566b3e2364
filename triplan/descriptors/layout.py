"""Layouts: what the caller promises about an operand's strides and address. They are part of the key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator
from typing_extensions import Self

from triplan.descriptors.fields import Extents
from triplan.errors import shown
from triplan.sku import FrozenModel, field

if TYPE_CHECKING:
    from triplan.sku.model import Converted

__all__ = ["Layout"]

#: Alignment of the widest vector loads, in bytes. Torch's allocators provide it, and it is the default promise.
VECTOR_BYTES = 16


class Layout(FrozenModel):
    """A promise about one operand.

    Attributes:
        kind: ``packed`` is row-major without gaps; ``strided`` allows any strides.
        alignment: the address is a multiple of this many bytes; None means the element's own size.
        unit_axis: the axis whose stride is 1 (strided only).
        zero_axes: axes whose stride is 0, as ``expand`` makes them (strided only).
        stride_multiple: every stride, except those of ``unit_axis`` and ``zero_axes``, is a positive multiple of this
            many elements. Vector loads and TMA need it of a matrix's leading dimension (strided only).
        order: the axes, outermost first, of an operand without gaps, such as a transposed or channels-last tensor: all
            strides then follow from its shape. Axes of one element may be left out (strided only).
    """

    kind: Literal["packed", "strided"] = "packed"
    alignment: Annotated[int, Field(ge=1, le=1024)] | None = None
    unit_axis: Annotated[int, Field(ge=0)] | None = None
    zero_axes: Extents = field(default=())
    stride_multiple: Annotated[int, Field(ge=1, le=16)] = 1
    order: Extents = field(default=())

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.alignment is not None and self.alignment & (self.alignment - 1):
            raise ValueError(f"alignment = {shown(self.alignment)}: must be a power of two")
        if self.stride_multiple & (self.stride_multiple - 1):
            raise ValueError(f"stride_multiple = {self.stride_multiple}: must be a power of two")
        facts = self.unit_axis is not None or self.zero_axes or self.stride_multiple > 1 or self.order
        if self.kind == "packed" and facts:
            raise ValueError("unit_axis, zero_axes, stride_multiple and order are facts of strided layouts")
        if self.unit_axis is not None and self.unit_axis in self.zero_axes:
            raise ValueError(f"axis {shown(self.unit_axis)} cannot have stride 1 and 0")
        if tuple(sorted(set(self.zero_axes))) != self.zero_axes:
            raise ValueError(f"zero_axes = {shown(self.zero_axes)}: must ascend without repeats")
        if self.order and (len({*self.order}) < len(self.order) or self.zero_axes or self.unit_axis != self.order[-1]):
            raise ValueError(
                f"order = {shown(self.order)}: must name axes once, the last of them unit_axis, and none has stride 0"
            )
        return self

    @property
    def packed(self) -> bool:
        return self.kind == "packed"

    @classmethod
    def strided(
        cls,
        *,
        alignment: int | None = None,
        unit_axis: int | None = None,
        zero_axes: Sequence[int] = (),
        stride_multiple: int = 1,
        order: Sequence[int] = (),
    ) -> Layout:
        """Any strides; the facts that the caller promises allow faster kernels. The last axis of ``order`` is the unit
        axis."""
        return cls(
            kind="strided",
            alignment=alignment,
            unit_axis=order[-1] if order and unit_axis is None else unit_axis,
            zero_axes=tuple(zero_axes),
            stride_multiple=stride_multiple,
            order=tuple(order),
        )

    @classmethod
    def of(cls, shape: Sequence[int], strides: Sequence[int], address: int, itemsize: int) -> Layout:
        """The strongest promise that an operand with this shape, strides and address keeps."""
        # The largest power of two that divides the address, capped because no kernel needs more.
        alignment = min(address & -address, VECTOR_BYTES) if address else VECTOR_BYTES
        if is_packed(shape, strides):
            return PACKED if alignment >= VECTOR_BYTES else cls(alignment=max(alignment, itemsize))
        zero = tuple(a for a, (n, s) in enumerate(zip(shape, strides, strict=True)) if s == 0 and n > 1)
        ones = [a for a in reversed(range(len(shape))) if strides[a] == 1]
        # Prefer an axis longer than 1. If none has unit stride, take one of extent 1, so that a single row of a
        # column-major matrix is still column-major.
        unit = next((a for a in ones if shape[a] > 1), ones[0] if ones else None)
        others = [s for a, (n, s) in enumerate(zip(shape, strides, strict=True)) if n > 1 and s and a != unit]
        multiple = max(VECTOR_BYTES // itemsize, 1)
        while any(s % multiple for s in others):
            multiple //= 2
        return cls(
            kind="strided",
            alignment=max(alignment, itemsize),
            unit_axis=unit,
            zero_axes=zero,
            stride_multiple=multiple,
            order=_order(shape, strides),
        )

    def broken_by(self, shape: Sequence[int], strides: Sequence[int]) -> str | None:
        """How ``strides`` break this promise, or None. (The address has its own check and its own error.)"""
        if 0 in shape:
            return None  # no element has an address
        if self.packed:
            if not is_packed(shape, strides):
                return f"strides {tuple(strides)}, but packed row-major {packed_strides(shape)} was promised"
            return None
        axis = self.unit_axis
        if axis is not None and shape[axis] > 1 and strides[axis] != 1:
            return f"stride {strides[axis]} on axis {axis}, but unit stride was promised"
        for axis in self.zero_axes:
            if shape[axis] > 1 and strides[axis] != 0:
                return f"stride {strides[axis]} on axis {axis}, but stride 0 was promised"
        if self.stride_multiple > 1:
            for axis, (n, s) in enumerate(zip(shape, strides, strict=True)):
                known = axis == self.unit_axis or axis in self.zero_axes
                if n > 1 and not known and (s <= 0 or s % self.stride_multiple):
                    return f"stride {s} on axis {axis}, but positive multiples of {self.stride_multiple} were promised"
        if self.order:
            expected = ordered_strides(shape, self.order)
            if any(n > 1 and s != t for n, s, t in zip(shape, strides, expected, strict=True)):
                return f"strides {tuple(strides)}, but {expected}, by the order {self.order}, were promised"
        return None


def ordered_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of ``shape`` with its axes in memory in ``order``, outermost first; 0 of axes that it leaves out."""
    found, step = [0] * len(shape), 1
    for axis in reversed(order):
        found[axis], step = step, step * max(shape[axis], 1)
    return tuple(found)


def _order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The axes of more than one element, outermost first, if there are no gaps between elements; else none."""
    order = sorted((a for a, n in enumerate(shape) if n > 1), key=lambda a: -strides[a])
    expected = ordered_strides(shape, order)
    return tuple(order) if all(strides[a] == expected[a] for a in order) else ()


def packed_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of ``shape``, in elements."""
    strides = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def is_packed(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether ``strides`` are row-major without gaps. Axes of extent 1 and empty tensors may have any strides."""
    if 0 in shape:
        return True
    expected = 1
    for n, s in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1:
            if s != expected:
                return False
            expected *= n
    return True


#: The default promise: packed, 16-byte aligned.
PACKED = Layout(alignment=VECTOR_BYTES)


def _layouts_in(value: Any) -> Any:
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if not isinstance(value, (list, tuple)) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in value):
        return value
    for name, _ in value:
        if not isinstance(name, str):
            raise ValueError(f"{shown(name)} is no operand's name")
    pairs = {name: _layout(layout) for name, layout in value}
    return tuple(sorted(pairs.items(), key=lambda pair: pair[0]))


def _layout(value: Any) -> Layout:
    if value == "packed":
        return PACKED
    if value == "strided":
        return Layout.strided()
    if isinstance(value, Layout):
        return value
    try:
        return Layout.model_validate_json(json.dumps(value))
    except (TypeError, RecursionError):
        raise ValueError(f"{shown(value)} is no Layout; nor 'packed' or 'strided'") from None


#: A descriptor's ``layouts`` field. Its input is a mapping from operand to Layout, ``"packed"`` or ``"strided"``. It is
#: stored sorted and, once the names are checked, without defaults, so that equal promises have equal keys.
if TYPE_CHECKING:
    Promise = Layout | Literal["packed", "strided"]
    Layouts = Converted[tuple[tuple[str, Layout], ...], Mapping[str, Promise] | Sequence[tuple[str, Promise]]]
else:
    Layouts = Annotated[
        tuple[tuple[str, Layout], ...],
        BeforeValidator(_layouts_in),
        PlainSerializer(lambda pairs: {name: layout.model_dump(mode="json") for name, layout in pairs}),
    ]
