"""Hypothesis strategies for descriptors, derived from their fields' annotations: this module knows no op by name."""

from __future__ import annotations

import enum
import math
import struct
import types
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

from hypothesis import assume, strategies as st

from triplan.backends import TABLE
from triplan.descriptors import (
    AxesField,
    AxisField,
    Descriptor,
    DivisorField,
    ExtentField,
    IndexValueField,
    Layout,
    Operand,
    OperandKind,
    ShapeField,
)
from triplan.errors import InvalidProblem, Unsupported
from triplan.facade import plan
from triplan.sku import ElementKind, IndexElementKind, Target

__all__ = ["descriptors", "extents", "layouts", "shapes"]

D = TypeVar("D", bound=Descriptor)
#: Extents just below, at and above the sizes of vectors, warps and blocks, where masks matter.
EDGES = (15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257, 1023, 1025)
_ATTEMPTS = 12


@cache  # Hypothesis validates each strategy once
def extents(max_extent: int = 1025) -> st.SearchStrategy[int]:
    """Extents of axes: mostly small; some near block sizes, some 1, a few 0."""
    edges = [n for n in EDGES if n <= max_extent]
    small = [n for n in range(1, 10) if n <= max_extent]
    return st.sampled_from([*small * 4, *edges, *[1] * 6, *[0] * 3])  # repeated values are drawn more often


@cache
def shapes(min_rank: int = 1, max_rank: int = 8, max_extent: int = 1025) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes, most of rank 1 to 4."""
    usual = st.integers(min_rank, min(max_rank, max(min_rank, 4)))
    ranks = st.one_of(usual, usual, usual, st.integers(min_rank, max_rank))
    return ranks.flatmap(lambda n: st.tuples(*[extents(max_extent)] * n))


def layouts(operand: Operand) -> st.SearchStrategy[Layout]:
    """Promises for ``operand``: packed, packed with less alignment, strided with and without further facts."""
    return _layouts(operand.element.itemsize, len(operand.shape), operand.is_written)


@cache
def _layouts(itemsize: int, rank: int, written: bool) -> st.SearchStrategy[Layout]:
    packed = st.just(Layout(alignment=16))
    aligned = _alignments(itemsize).map(lambda a: Layout(alignment=a))
    return st.one_of(packed, packed, aligned, _strided(itemsize, rank, written))


@cache
def _alignments(itemsize: int) -> st.SearchStrategy[int | None]:
    return st.sampled_from([None, *(a for a in (1, 2, 4, 8, 16, 32) if a >= itemsize)])


@st.composite  # of the module: Hypothesis reads the source of each function that it decorates
def _strided(draw: st.DrawFn, itemsize: int, rank: int, written: bool) -> Layout:
    alignments, axes = _alignments(itemsize), range(rank)
    unit = draw(st.none() | st.sampled_from(axes)) if axes else None
    zero: Collection[int] = ()
    if not written and draw(st.booleans()):
        zero = [a for a in axes if a != unit and draw(st.booleans())]
    multiple = draw(st.sampled_from((1, 1, 8)))
    if axes and draw(st.booleans()):
        return Layout.strided(alignment=draw(alignments), order=draw(st.permutations(axes)))
    return Layout.strided(alignment=draw(alignments), unit_axis=unit, zero_axes=sorted(zero), stride_multiple=multiple)


@st.composite
def descriptors(
    draw: st.DrawFn,
    cls: type[D],
    max_bytes: int = 1 << 16,
    *,
    target: Target | None = None,
    fixed: Mapping[str, Any] | None = None,
    promises: bool = True,
) -> D:
    """Valid, mostly non-empty descriptors of ``cls``, whose operands have at most ``max_bytes`` bytes together.

    Each field is drawn as its annotation says: shapes, axes of a shape, extents, positions within an extent, elements
    that some kernel of the op supports, enums, literals, numbers within bounds. Fields of other types keep their
    defaults.

    Args:
        cls: any Descriptor class, also a user's own.
        max_bytes: the extents of larger problems are halved until they fit.
        target: if given, only problems that some kernel supports on it.
        fixed: values for some fields.
        promises: whether to draw layout promises; if not, all operands are packed and aligned.
    """
    fixed = fixed or {}
    desc: D | None = None
    if hasattr(cls, "example"):  # no annotation could tell
        op = fixed["op"] if "op" in fixed else draw(st.sampled_from(cls.ops()))
        elements = sorted({e for r in TABLE.rows(op) for e in r.elements})
        desc = cast(Any, cls).example(draw(st.sampled_from(elements))).replace(op=op)
    for _ in range(_ATTEMPTS if desc is None else 0):
        fields: dict[str, Any] = {"op": fixed["op"] if "op" in fixed else draw(st.sampled_from(cls.ops()))}
        for name, info in cls.model_fields.items():
            if name in fixed:
                fields[name] = fixed[name]
            elif name not in ("op", "schema_version", "layouts"):
                found = draw(_field(cls, info.annotation, info.metadata, fields, max_bytes))
                if found is not _DEFAULT:
                    fields[name] = found
        try:
            desc = _within(cls, fields, max_bytes, set(fixed))
            break
        except InvalidProblem:
            continue  # the fields are not valid together: draw again
    assume(desc is not None)
    assert desc is not None
    if promises and "layouts" not in fixed:
        kinds = (OperandKind.TENSOR, OperandKind.TENSOR_LIST)
        desc = desc.replace(layouts={o.name: draw(layouts(o)) for o in desc.operands() if o.kind in kinds})
    if target is not None:
        try:
            plan(desc, target=target)
        except Unsupported:
            assume(False)
    return desc


_DEFAULT = object()


def _field(
    cls: type[Descriptor], annotation: Any, metadata: Sequence[Any], drawn: Mapping[str, Any], max_bytes: int
) -> st.SearchStrategy[Any]:
    """A strategy for one field; ``drawn`` has the values of the fields before it."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *marks = get_args(annotation)
        return _field(cls, inner, [*metadata, *marks], drawn, max_bytes)
    if origin in (Union, types.UnionType):
        parts = [a for a in get_args(annotation) if a is not type(None)]
        options = [_field(cls, part, metadata, drawn, max_bytes) for part in parts]
        return st.one_of(st.none(), *options) if len(parts) < len(get_args(annotation)) else st.one_of(options)
    marks = [m for part in metadata for m in (part.metadata if hasattr(part, "metadata") else [part])]
    low, high = _bounds(marks)
    for mark in marks:
        if isinstance(mark, ShapeField):
            least = max(mark.min_rank, *_limits(marks, "min_length"), 0)
            most = min([mark.max_rank, *_limits(marks, "max_length")])
            return shapes(least, most, _largest(max_bytes))
        if isinstance(mark, AxisField):
            return st.integers(0, len(drawn[mark.of]) - 1)
        if isinstance(mark, AxesField):
            axes = range(len(drawn[mark.of]))
            return st.lists(st.sampled_from(axes), unique=True).map(sorted).map(tuple) if axes else st.just(())
        if isinstance(mark, IndexValueField):
            return st.integers(0, drawn[mark.of] - 1) if drawn[mark.of] else st.none()
        if isinstance(mark, DivisorField):
            whole = math.gcd(*(drawn[name] for name in mark.of))
            return st.sampled_from([1, *(n for n in range(1, whole + 1) if whole % n == 0)])
        if isinstance(mark, ExtentField):
            return extents(_largest(max_bytes))
    if origin is tuple and ... not in get_args(annotation):
        return st.tuples(*(_field(cls, part, [], drawn, max_bytes) for part in get_args(annotation)))
    if origin is Literal:
        return st.sampled_from(get_args(annotation))
    if annotation is ElementKind:
        supported = {e for entry in TABLE.rows(drawn["op"]) for e in entry.elements}
        return st.sampled_from(sorted(supported or ElementKind))
    if annotation is IndexElementKind:
        indexed = {e for entry in TABLE.rows(drawn["op"]) for e in entry.index_elements}
        return st.sampled_from(sorted(indexed or IndexElementKind))
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        lowest = 0 if low is None else int(low)
        return st.integers(lowest, lowest + 3 if high is None else min(int(high), lowest + 3))
    if annotation is float:
        # With ``width``, Hypothesis refuses bounds that are no f32.
        return st.floats(_f32(0.0 if low is None else low), _f32(1.0 if high is None else high), width=32)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return st.sampled_from(list(annotation))
    return st.just(_DEFAULT)


def _f32(x: float) -> float:
    found: float = struct.unpack("f", struct.pack("f", x))[0]
    return found


def _largest(max_bytes: int) -> int:
    return max(1, min(1025, max_bytes // 16))


def _limits(marks: Sequence[Any], name: str) -> list[int]:
    """The values of one constraint (``ge``, ``max_length``, ...) in all annotations that have it."""
    return [value for m in marks if (value := getattr(m, name, None)) is not None]


def _bounds(marks: Sequence[Any]) -> tuple[int | None, int | None]:
    low = [*_limits(marks, "ge"), *(n + 1 for n in _limits(marks, "gt"))]
    high = [*_limits(marks, "le"), *(n - 1 for n in _limits(marks, "lt"))]
    return max(low, default=None), min(high, default=None)


def _within(cls: type[D], fields: dict[str, Any], max_bytes: int, fixed: set[str]) -> D:
    """The descriptor of ``fields``, with its largest extents halved until it fits. Raises ``InvalidProblem``."""
    while True:
        desc = cls(**fields)
        if sum(o.nbytes * o.count for o in desc.operands()) <= max_bytes:
            return desc
        sizes = [
            (n, name, axis)
            for name, info in cls.model_fields.items()
            if name not in fixed and any(isinstance(m, (ShapeField, ExtentField)) for m in info.metadata)
            for axis, n in enumerate(fields[name] if isinstance(fields[name], tuple) else (fields[name],))
        ]
        largest, name, axis = max(sizes, default=(0, "", 0))
        if largest <= 1:
            raise InvalidProblem(f"{cls.__name__}: its smallest problem has more than {max_bytes} bytes")
        value = fields[name]
        half = largest // 2
        fields[name] = (*value[:axis], half, *value[axis + 1 :]) if isinstance(value, tuple) else half
        for other in cls.model_fields:
            for of in _positions(cls, other):
                if fields.get(other) is not None and isinstance(fields[of], int):
                    fields[other] = min(fields[other], max(fields[of] - 1, 0))


def _positions(cls: type[Descriptor], name: str) -> list[str]:
    """The fields with the extents that the field ``name`` is a position in."""
    info = cls.model_fields[name]
    nested = [m for part in get_args(info.annotation) for m in getattr(part, "__metadata__", ())]
    return [m.of for m in (*info.metadata, *nested) if isinstance(m, IndexValueField)]
