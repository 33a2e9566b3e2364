"""What the kernel table can do, as records: one for each op, kernel and group of elements with equal guarantees.

A guarantee is a function of a descriptor, so each row is asked about a small example of its op, built from nothing but
the field annotations: an op added later, or by a user, appears here without saying so.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from triplan.backends import TABLE, KernelRow, KernelTable
from triplan.descriptors import AxisField, Descriptor, ShapeField, descriptor_types
from triplan.errors import InvalidProblem
from triplan.sku import ArchSku, ElementKind, IndexElementKind, OpCategory, PrecisionGuarantee, Target

#: One target an architecture: the archs of a row are those whose target its ``supports`` takes.
TARGETS = {ArchSku.SM80: Target.sm80(), ArchSku.SM90A: Target.sm90a(), ArchSku.CPU: Target.cpu()}
FLAGS = ("deterministic", "bit_stable_on_same_hardware", "batch_invariant", "order_invariant")
#: The extents of the example: enough elements behind the first axis for kernels that move whole rows.
OUTER, INNER = 8, 64


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the catalogue.

    ``accumulator`` is ``"own"`` where each element accumulates in itself, ``math_precision`` where it is computed in
    itself (the narrow floats in f32).
    """

    op: str
    kernel: str
    version: int
    backend: str
    elements: tuple[str, ...]
    index_elements: tuple[str, ...]
    archs: tuple[str, ...]
    guarantees: tuple[str, ...]
    math_precision: str
    accumulator: str
    duplicates: str | None
    features: tuple[str, ...]


def catalog(table: KernelTable = TABLE) -> list[Entry]:
    """Every op with a descriptor and a kernel, sorted by op, backend and kernel name."""
    types_by_op = descriptor_types()
    entries = [
        entry
        for op in table.ops()
        if op in types_by_op
        for row in table.rows(op)
        for entry in _entries(types_by_op[op], row)
    ]
    # Triton rows first: the reference is what they are compared with.
    return sorted(entries, key=lambda e: (e.op, e.backend != "triton", e.kernel, e.archs))


def _entries(cls: type[Descriptor], row: KernelRow) -> Iterator[Entry]:
    groups: dict[tuple[Any, ...], list[str]] = {}
    for element in (e for e in ElementKind if e in row.elements):
        found = _supported(cls, row, element)
        if found is None:
            continue
        g, archs = found
        accumulator = "own" if g.accumulator is element else str(g.accumulator)
        precision = "own" if str(g.math_precision) == str(element.compute) else str(g.math_precision)
        duplicates = None if g.duplicates is None else str(g.duplicates)
        held = tuple(flag for flag in FLAGS if getattr(g, flag))
        groups.setdefault((archs, held, precision, accumulator, duplicates), []).append(str(element))
    for (archs, held, precision, accumulator, duplicates), elements in groups.items():
        yield Entry(
            op=row.op,
            kernel=row.name,
            version=row.version,
            backend=str(row.backend),
            elements=tuple(elements),
            index_elements=tuple(str(i) for i in IndexElementKind if i in row.index_elements),
            archs=archs,
            guarantees=held,
            math_precision=precision,
            accumulator=accumulator,
            duplicates=duplicates,
            features=tuple(sorted(row.features)),
        )


def _supported(
    cls: type[Descriptor], row: KernelRow, element: ElementKind
) -> tuple[PrecisionGuarantee, tuple[str, ...]] | None:
    """The guarantee for the first example that the row takes anywhere, and the archs that it takes it on."""
    for desc in examples(cls, element=element):
        archs = tuple(str(arch) for arch, target in TARGETS.items() if arch in row.archs and row.supports(desc, target))
        if archs:
            return PrecisionGuarantee.weakest(row.guarantee(desc).values()), archs
    return None


def examples(cls: type[Descriptor], **fixed: Any) -> Iterator[Descriptor]:
    """Small valid descriptors of ``cls``: the defaults first, then every combination of its options.

    Options are axes and the boolean and literal fields: a kernel may answer only one value of them. Nothing is yielded
    for a class whose required fields cannot be guessed from their annotations.
    """
    required: dict[str, Any] = {}
    options: dict[str, list[Any]] = {}
    axes = [1, 0] if cls.category is OpCategory.ROWWISE else [0, 1]  # rows lie along the last axis, as a rule
    for name, info in cls.model_fields.items():
        if name in fixed or name in ("op", "schema_version", "layouts"):
            continue
        axis = any(isinstance(mark, AxisField) for mark in info.metadata)
        choices = axes if axis else _choices(info.annotation)
        if choices:
            default = choices[0] if info.is_required() else info.default
            options[name] = [default, *(c for c in choices if c != default)]
        elif info.is_required():
            required[name] = _value(info.annotation, info.metadata)
    for chosen in itertools.product(*options.values()):
        try:
            yield cls(**required, **dict(zip(options, chosen, strict=True)), **fixed)
        except InvalidProblem:
            continue


def _choices(annotation: Any) -> list[Any]:
    if annotation is bool:
        return [False, True]
    return list(get_args(annotation)) if get_origin(annotation) is Literal else []


def _value(annotation: Any, metadata: list[Any]) -> Any:
    for mark in metadata:
        if isinstance(mark, ShapeField):
            rank = min(max(2, mark.min_rank), mark.max_rank)
            return (OUTER,) * (rank - 1) + (INNER,)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _value(args[0], list(args[1:]))
    if origin in (Union, types.UnionType):
        return None if type(None) in args else _value(args[0], [])
    if origin is tuple:
        return (OUTER, INNER)
    if annotation is ElementKind:
        return ElementKind.F32
    return {int: INNER, float: 1.0, str: ""}.get(annotation)
