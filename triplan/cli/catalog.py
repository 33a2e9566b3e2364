"""What the kernel table can do, as lines: one for each op, kernel and group of elements with equal guarantees.

A guarantee is a function of a descriptor, so each entry of the table is asked about a small example of its op. The
example is built from the descriptor's field annotations alone, so that an op of a user's own appears here by itself.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from triplan.backends import TABLE, KernelRow, KernelTable
from triplan.descriptors import AxesField, AxisField, Descriptor, DivisorField, Layout, ShapeField, descriptor_types
from triplan.errors import InvalidProblem
from triplan.sku import ArchSku, ElementKind, IndexElementKind, OpCategory, PrecisionGuarantee, Target

#: One target for each architecture; an entry supports an architecture if its ``supports`` accepts this target.
TARGETS = {ArchSku.SM80: Target.sm80(), ArchSku.SM90A: Target.sm90a(), ArchSku.CPU: Target.cpu()}
FLAGS = ("deterministic", "bit_stable_on_same_hardware", "batch_invariant", "order_invariant")
#: Categories whose kernels may take an operand that is contiguous along another axis than the others.
TRANSPOSING = (OpCategory.ELEMENTWISE, OpCategory.COPIES)
#: Extents of the example: the inner one is long enough for kernels that move whole rows.
OUTER, INNER = 8, 64


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the catalogue: an entry of the kernel table, for those of its elements that share a guarantee.

    Attributes:
        accumulator: the element that sums are kept in; ``"own"`` if that is each operand's own element.
        math_precision: ``"own"`` if each element is computed in itself (f16 and bf16 in f32).
        guarantees: those of ``FLAGS`` that hold.
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


def catalog(table: KernelTable = TABLE, named: str | None = None) -> list[Line]:
    """The lines of every op that has a descriptor, or of the one that is ``named``, sorted by op, backend (Triton
    first) and kernel name."""
    types_by_op = descriptor_types()
    lines = [
        line
        for op in table.ops()
        if op in types_by_op and named in (None, op)
        for entry in table.rows(op)
        for line in _lines(types_by_op[op], entry)
    ]
    return sorted(lines, key=lambda line: (line.op, line.backend != "triton", line.kernel, line.archs))


def _lines(cls: type[Descriptor], entry: KernelRow) -> Iterator[Line]:
    groups: dict[tuple[Any, ...], list[str]] = {}
    for element in (e for e in ElementKind if e in entry.elements):
        found = _supported(cls, entry, element)
        if found is None:
            continue
        g, archs = found
        accumulator = "own" if g.accumulator is element else str(g.accumulator)
        precision = "own" if str(g.math_precision) == str(element.compute) else str(g.math_precision)
        duplicates = None if g.duplicates is None else str(g.duplicates)
        held = tuple(flag for flag in FLAGS if getattr(g, flag))
        groups.setdefault((archs, held, precision, accumulator, duplicates), []).append(str(element))
    for (archs, held, precision, accumulator, duplicates), elements in groups.items():
        yield Line(
            op=entry.op,
            kernel=entry.name,
            version=entry.version,
            backend=str(entry.backend),
            elements=tuple(elements),
            index_elements=tuple(str(i) for i in IndexElementKind if i in entry.index_elements),
            archs=archs,
            guarantees=held,
            math_precision=precision,
            accumulator=accumulator,
            duplicates=duplicates,
            features=tuple(sorted(entry.features)),
        )


def _supported(
    cls: type[Descriptor], entry: KernelRow, element: ElementKind
) -> tuple[PrecisionGuarantee, tuple[str, ...]] | None:
    """The guarantee for the first example that ``entry`` supports on any architecture, and those architectures."""
    for desc in examples(cls, op=entry.op, element=element):
        targets = ((arch, target) for arch, target in TARGETS.items() if arch in entry.archs)
        archs = tuple(str(arch) for arch, target in targets if entry.supports(desc, target))
        if archs:
            return PrecisionGuarantee.weakest(entry.guarantee(desc).values()), archs
    return None


def examples(cls: type[Descriptor], **fixed: Any) -> Iterator[Descriptor]:
    """Small valid descriptors of ``cls``: the defaults first, then every combination of its options.

    Options are the axes, the boolean and literal fields, and numbers that divide extents: a kernel may support only one
    of their values. Yields nothing if the annotations do not say what the required fields may hold.
    """
    if hasattr(cls, "example"):  # no annotation could tell
        found = cls.example(fixed.get("element", ElementKind.F32))
        found = found.replace(op=fixed.get("op", found.op))
        yield from (found, _turned(found))
        return
    required: dict[str, Any] = {}
    options: dict[str, list[Any]] = {}
    axes = [1, 0] if cls.category is OpCategory.ROWWISE else [0, 1]  # most kernels want rows along the last axis
    for name, info in cls.model_fields.items():
        if name in fixed or name in ("op", "schema_version", "layouts"):
            continue
        axis, divisor = (any(isinstance(m, kind) for m in info.metadata) for kind in (AxisField, DivisorField))
        choices = axes if axis else [1, INNER] if divisor else _choices(info.annotation)
        if choices:
            default = choices[0] if info.is_required() else info.default
            options[name] = [default, *(c for c in choices if c != default)]
        elif info.is_required():
            required[name] = _value(info.annotation, info.metadata)
    for chosen in itertools.product(*options.values()):
        try:
            found = cls(**required, **dict(zip(options, chosen, strict=True)), **fixed)
            yield found
            if cls.category in TRANSPOSING:
                yield _turned(found)
            elif cls.category is OpCategory.CONV:
                yield _with_channels_last(found)
                if getattr(found, "element", None) is ElementKind.F32:  # kernels may multiply it as tf32 alone
                    yield from (of.replace(math="tf32") for of in (found, _with_channels_last(found)))
                yield _with_channels_last(found.replace(kernel=(1, OUTER)))
                yield _with_channels_last(found.replace(in_channels=OUTER, stride=(2, 2)))
                yield _in_one_piece(found.replace(in_channels=INNER + 1, kernel=(1, 1)))
            elif cls.category is OpCategory.GEMM:
                yield from (found.replace(n=1), found.replace(k=1), found.replace(n=INNER + 1), _by_columns(found, 1))
                yield found.replace(k=8 * INNER)
                if getattr(found, "element", None) is ElementKind.F32:
                    yield _by_columns(found, 0).replace(math="tf32")
            elif cls.category is OpCategory.NORMALIZATION:  # groups of halves that several programs share
                yield found.replace(pixels=3 * INNER)
            elif cls.category is OpCategory.ATTENTION:
                yield from (found.replace(head_dim=n) for n in (INNER + 1, 3 * INNER, 3 * INNER + 1))
        except InvalidProblem:
            continue


def _turned(desc: Descriptor) -> Descriptor:
    """``desc`` with a first operand that is contiguous along another axis, for kernels that transpose."""
    return desc.replace(layouts={desc.operands()[0].name: Layout.strided(unit_axis=0)})


def _by_columns(desc: Descriptor, i: int) -> Descriptor:
    """``desc`` with a column-major matrix ``i``: the A or B of a product."""
    o = desc.operands()[i]
    return desc.replace(layouts={o.name: Layout.strided(unit_axis=len(o.shape) - 2)})


def _with_channels_last(desc: Descriptor) -> Descriptor:
    last = Layout.strided(unit_axis=1, alignment=16, stride_multiple=8)
    return desc.replace(layouts={o.name: last for o in desc.operands() if len(o.shape) == 4})


def _in_one_piece(desc: Descriptor) -> Descriptor:
    """``desc`` with images whose channels are last without gaps."""
    order = Layout.strided(order=(0, 2, 3, 1), alignment=16)
    return desc.replace(layouts={o.name: order for o in desc.operands() if o.name in ("x", "dout", "out", "dx")})


def _choices(annotation: Any) -> list[Any]:
    if annotation is bool:
        return [False, True]
    return list(get_args(annotation)) if get_origin(annotation) is Literal else []


def _value(annotation: Any, metadata: list[Any]) -> Any:
    for mark in metadata:
        if isinstance(mark, AxesField):
            return (1,)
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
