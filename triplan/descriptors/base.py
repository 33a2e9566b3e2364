"""The base class of descriptors, which say what to compute. A family's module adds fields and ``declare_operands``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, get_args, get_origin

from pydantic import model_validator
from typing_extensions import Self

from triplan.descriptors.fields import NO_BAD_INDEX, AxesField, AxisField, OutOfBounds, Shape, ShapeField
from triplan.descriptors.layout import PACKED, Layout, Layouts
from triplan.descriptors.meanings import describe
from triplan.descriptors.operand import Operand, OperandKind
from triplan.errors import InvalidProblem, shown
from triplan.sku import Element, FrozenModel, OpCategory, field
from triplan.sku.facts import cached_property

__all__ = ["Descriptor", "RowwiseDescriptor", "descriptor_types", "parse_descriptor"]

P = TypeVar("P", covariant=True)
_REGISTRY: dict[str, type[Descriptor]] = {}
_sorted: dict[str, type[Descriptor]] = {}


class PlannedBy(Generic[P]):
    """Names a descriptor's Plan class to type checkers: what ``tp.plan`` and ``PlanCache.get`` return."""


class Descriptor(FrozenModel):
    """Shapes, axes, dtypes and options of one op; no tensors, no device.

    A subclass fixes ``op: Literal["name"] = "name"``, which registers it under that name. One class for several ops of
    equal operands lists them all, ``op: Literal["abs", "exp"]``, without a default. Values that change from call to
    call without changing the kernel (alpha, seed, step) are Args, not fields.

    Attributes:
        op: the op's name.
        schema_version: of the JSON form.
        layouts: promises about strides and addresses: a Layout, "packed" or "strided" for each operand that is not
            packed and 16-byte aligned.
    """

    category: ClassVar[OpCategory] = OpCategory.CUSTOM

    op: str
    schema_version: Literal[1] = 1
    layouts: Layouts = field(default=())

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        for op in cls.ops():
            known = _REGISTRY.get(op)
            if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise InvalidProblem(
                    f"op {shown(op)} of {cls.__qualname__} is already registered by "
                    f"{known.__module__}.{known.__qualname__}"
                )
            _REGISTRY[op] = cls
        if cls.ops():
            describe(cls)

    @classmethod
    def ops(cls) -> tuple[str, ...]:
        """The ops that this class describes; none for an intermediate base."""
        field = cls.model_fields["op"]
        if get_origin(field.annotation) is Literal:
            return tuple(str(op) for op in get_args(field.annotation))
        return (field.default,) if isinstance(field.default, str) else ()

    # --- implemented by subclasses ---

    def declare_operands(self) -> tuple[Operand, ...]:
        """The operands without layouts, in the order of Args' fields."""
        raise NotImplementedError(f"{type(self).__name__} must declare its operands")

    def check_problem(self) -> None:
        """Raise ``ValueError`` if fields contradict each other."""

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        """The fields, without ``layouts``, that the tensors of ``args`` and ``options`` determine."""
        raise NotImplementedError(f"{cls.__name__} does not derive its fields from tensors")

    def check_status(self, args: Any) -> None:
        """Synchronise and raise the error that the last run recorded; ``InvalidProblem`` if this op records nothing."""
        raise InvalidProblem(f"{self.op} records no status on the device: there is nothing to check")

    # --- common to all descriptors ---

    @model_validator(mode="after")
    def _validate_problem(self) -> Self:
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            for mark in info.metadata:
                if isinstance(mark, ShapeField) and not mark.min_rank <= len(value) <= mark.max_rank:
                    raise ValueError(
                        f"{name} = {shown(value)}: rank {len(value)} is outside [{mark.min_rank}, {mark.max_rank}]"
                    )
                if isinstance(mark, AxesField):
                    rank = len(getattr(self, mark.of))
                    if list(value) != sorted({a for a in value if 0 <= a < rank}):
                        raise ValueError(
                            f"{name} = {shown(value)}: must be increasing axes of {mark.of}, of rank {rank}"
                        )
                if isinstance(mark, AxisField) and not 0 <= value < len(getattr(self, mark.of)):
                    rank = len(getattr(self, mark.of))
                    raise ValueError(f"{name} = {shown(value)}: must be in [0, {rank}), the axes of {mark.of}")
        self.check_problem()
        operands = {o.name: o for o in self.operands()}
        for o in operands.values():
            if o.nbytes >= 2**62:
                raise ValueError(
                    f"operand {o.name} of shape {o.shape} has {o.nbytes} bytes, more than can be addressed"
                )
        for name, layout in self.layouts:
            operand = operands.get(name)
            if operand is None or operand.kind not in (OperandKind.TENSOR, OperandKind.TENSOR_LIST):
                tensors = ", ".join(o.name for o in operands.values() if o.is_tensor)
                raise ValueError(f"layouts names {shown(name)}; the tensors of {self.op} are {tensors}")
            axes = (*layout.zero_axes, *layout.order, *(() if layout.unit_axis is None else (layout.unit_axis,)))
            if any(a >= len(operand.shape) for a in axes):
                raise ValueError(
                    f"layouts[{name!r}] names axis {shown(max(axes))}; {name} has rank {len(operand.shape)}"
                )
            if layout.order and any(n > 1 and a not in layout.order for a, n in enumerate(operand.shape)):
                raise ValueError(
                    f"layouts[{name!r}].order = {shown(layout.order)}: leaves out an axis of more than one element of "
                    f"{name}, of shape {operand.shape}"
                )
            if operand.is_written and any(operand.shape[a] > 1 for a in layout.zero_axes):
                raise ValueError(
                    f"layouts[{name!r}] promises stride 0, but {name} is written: its elements would overlap"
                )
            if layout.alignment is not None and layout.alignment < operand.element.itemsize:
                raise ValueError(
                    f"layouts[{name!r}] promises an alignment of {layout.alignment} bytes, less than the "
                    f"{operand.element.itemsize} bytes of an element"
                )
        if any(layout == PACKED for _, layout in self.layouts):
            self.__dict__["layouts"] = tuple((name, layout) for name, layout in self.layouts if layout != PACKED)
        return self

    def operands(self) -> tuple[Operand, ...]:
        """Every operand, with its role, kind, element, shape and promised layout."""
        return self._operands

    @cached_property
    def _operands(self) -> tuple[Operand, ...]:
        from dataclasses import replace

        promised = dict(self.layouts)
        return tuple(replace(o, layout=promised[o.name]) if o.name in promised else o for o in self.declare_operands())

    def operand(self, name: str) -> Operand:
        """The operand called ``name``. Raises ``KeyError``."""
        for o in self._operands:
            if o.name == name:
                return o
        raise KeyError(f"{self.op} has no operand {shown(name)}")

    def to_json(self) -> str:
        """JSON that ``parse_descriptor`` reads back exactly."""
        return self.model_dump_json()

    @classmethod
    def from_args(cls, args: Any, **options: Any) -> Self:
        """Derive shapes, elements and the strongest layout promises from tensors.

        ``args`` is an Args of this op, or any object with its fields. ``options`` are the fields that tensors do not
        determine, such as an axis or ``out_of_bounds``. Raises ``InvalidProblem``.
        """
        bare = cls(**cls.fields_from_args(args, **options))
        layouts: dict[str, Layout] = {}
        for o in bare.operands():
            value = getattr(args, o.name, None)
            if not o.is_tensor or value is None:
                continue
            tensors = value if o.kind is OperandKind.TENSOR_LIST else [value]
            if isinstance(tensors[0], (list, tuple)):
                continue  # pieces of a vector lie anywhere: nothing is promised of it
            found = [Layout.of(t.shape, t.stride(), t.data_ptr(), t.element_size()) for t in tensors]
            if o.kind is OperandKind.TENSOR_LIST:  # whose shapes differ
                found = [layout.model_copy(update={"order": ()}) for layout in found]
            layouts[o.name] = found[0] if len(set(found)) == 1 else Layout.strided()
        return bare.replace(layouts=layouts)


def parse_descriptor(data: str | bytes | Mapping[str, Any]) -> Descriptor:
    """The descriptor in JSON text, or in its parsed object; ``op`` determines the class. Raises ``InvalidProblem``."""
    try:
        text = json.dumps(dict(data)) if isinstance(data, Mapping) else data
        fields = json.loads(text)
    except (ValueError, TypeError, RecursionError) as e:
        raise InvalidProblem(f"descriptor: {shown(data)} is not JSON: {e}") from None
    op = fields.get("op") if isinstance(fields, dict) else None
    if not isinstance(op, str) or op not in _REGISTRY:
        raise InvalidProblem(f"descriptor: op = {shown(op)}: known are {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[op].model_validate_json(json.dumps(fields))


def descriptor_types() -> dict[str, type[Descriptor]]:
    """Every registered descriptor class by op, sorted."""
    global _sorted
    if _sorted != _REGISTRY:  # comparing takes a tenth of the time of sorting
        _sorted = dict(sorted(_REGISTRY.items()))
    return dict(_sorted)


def check_bad_index(desc: Descriptor, policy: OutOfBounds, args: Any) -> None:
    """Synchronise, and raise ``IndexError`` for the bad index that ``args.status`` records.

    Raises ``InvalidProblem`` if ``policy``, the ``out_of_bounds`` of ``desc``, records none.
    """
    if policy != "error":
        raise InvalidProblem(f"{desc.op}: out_of_bounds is {policy!r}; only 'error' records bad indices")
    (position,) = args.status.tolist()  # synchronises
    if position == NO_BAD_INDEX:
        return
    indices = [o for o in desc.operands() if o.index_extents]
    o = indices.pop(0)
    while indices and position >= o.numel:  # positions are counted over all indices
        position -= o.numel
        o = indices.pop(0)
    tensors = getattr(args, o.name) if o.kind is OperandKind.TENSOR_LIST else [getattr(args, o.name)]
    at: list[int] = []
    for n in reversed(o.shape):
        position, coordinate = divmod(position, n)
        at.insert(0, coordinate)
    values = [t[tuple(at)].tolist() for t in tensors]
    shown = values[0] if len(values) == 1 else tuple(values)
    extents = o.index_extents[0] if len(values) == 1 else o.index_extents
    raise IndexError(f"{desc.op}: {o.name}[{', '.join(map(str, at))}] = {shown} is out of bounds for extent {extents}")


class RowsDescriptor(Descriptor):
    """The base of ops whose operands of shape ``input_shape`` consist of rows."""

    if TYPE_CHECKING:  # subclasses declare them, each in its order, which is that of the key
        element: Element
        input_shape: Shape


class RowwiseDescriptor(RowsDescriptor):
    """The base of softmax and norms.

    Attributes:
        element: element of the values; f16 and bf16 are computed in f32.
    """

    category: ClassVar[OpCategory] = OpCategory.ROWWISE

    element: Element
