"""Descriptors of copies: each output element is an element of the input, or a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator

from triplan.descriptors.base import Descriptor, PlannedBy
from triplan.descriptors.fields import MAX_RANK, AnyShape, Extent, Shape, to_tuple
from triplan.descriptors.operand import Operand, OperandKind, Role
from triplan.errors import shown
from triplan.sku import Element, ElementKind, OpCategory, OptionalElement, field

if TYPE_CHECKING:
    from triplan.facade.copies import ArangePlan, CopyPlan, FillPlan, JoinPlan, PadPlan

    Amounts: TypeAlias = Sequence[int]
else:
    Amounts = Annotated[tuple[int, ...], BeforeValidator(to_tuple)]

__all__ = ["ArangeDescriptor", "CopyDescriptor", "FillDescriptor", "JoinDescriptor", "PadDescriptor"]

#: Matrices that one launch joins at most: ``widths`` is checked as a shape is.
MOST_JOINED = MAX_RANK
F32, F64, I64 = ElementKind.F32, ElementKind.F64, ElementKind.I64


def number(element: ElementKind) -> ElementKind:
    """The element in which a kernel takes a number that becomes ``element``."""
    return (F64 if element is F64 else F32) if element.is_floating_point else I64


class MoveDescriptor(Descriptor):
    """Fields of ops whose result consists of elements of x.

    Attributes:
        element: element of x.
        input_shape: shape of x.
    """

    category: ClassVar[OpCategory] = OpCategory.COPIES

    op: str
    element: Element
    input_shape: AnyShape

    if TYPE_CHECKING:
        amounts: Amounts

    @property
    def result(self) -> ElementKind:
        """The element of ``out``."""
        return self.element

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of ``out``."""
        return tuple(self.input_shape)

    @property
    def by_axis(self) -> tuple[int, ...]:
        """``amounts``, with zeros written out."""
        return tuple(self.amounts) or (0,) * self._counted()

    def _counted(self) -> int:
        return len(self.input_shape)

    def check_problem(self) -> None:
        if len(self.by_axis) != self._counted() or not all(abs(a) < 2**61 for a in self.by_axis):
            raise ValueError(
                f"amounts = {shown(self.amounts)}: {self.op} of rank {len(self.input_shape)} has {self._counted()}"
            )
        if any(n < 0 for n in self.out_shape):
            raise ValueError(f"amounts = {shown(self.amounts)}: leave out more than input_shape {self.input_shape} has")

    def declare_operands(self) -> tuple[Operand, ...]:
        rank = len(self.input_shape)
        each = len(self.by_axis) // max(rank, 1)
        fixed = tuple(a for a in range(rank) if not any(self.by_axis[each * a : each * (a + 1)]))
        if self.op in ("tril", "triu"):
            fixed = tuple(range(rank - 2))
        stays = self.op in ("copy", "tril", "triu") and self.result is self.element
        value = Operand("value", Role.INPUT, number(self.element), kind=OperandKind.HOST_SCALAR)
        return (
            Operand("x", Role.INPUT, self.element, tuple(self.input_shape), batch_axes=fixed),
            *((value,) if self.op == "pad" else ()),
            Operand("out", Role.OUTPUT, self.result, self.out_shape, batch_axes=fixed, over=("x",) if stays else ()),
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return {"element": args.x.dtype, "input_shape": tuple(args.x.shape), **options}


class CopyDescriptor(MoveDescriptor, PlannedBy["CopyPlan"]):
    """``out[i] = x[m(i)]``; ``op`` names the map m. ``copy``: m is the identity, and ``out`` may have another element.

    ``flip``: reverses some axes. ``roll``: ``out[(i + shift) % n] = x[i]`` along each axis. ``tril``, ``triu``:
    ``out[..., r, c]`` is x where ``c - r <= diagonal`` (``triu``: ``>=``), else 0.

    Floats are truncated to integers; where the integer cannot hold the value, the result is unspecified. Integers and
    f64 are converted to f16 and bf16 by way of f32, as in torch.

    Attributes:
        out_element: element of the result; None: that of x. Only ``copy`` may have another.
        amounts: for ``flip``, 1 for each axis that is flipped, else 0; for ``roll``, the shift of each axis; for
            ``tril`` and ``triu``, the diagonal; for ``copy``, nothing. ``()`` means zeros.
    """

    op: Literal["copy", "flip", "roll", "tril", "triu"]
    out_element: OptionalElement = field(default=None)
    amounts: Amounts = field(default=())

    @property
    def result(self) -> ElementKind:
        return self.out_element or self.element

    def _counted(self) -> int:
        return {"copy": 0, "tril": 1, "triu": 1}.get(self.op, len(self.input_shape))

    def check_problem(self) -> None:
        super().check_problem()
        if self.op in ("tril", "triu") and len(self.input_shape) < 2:
            raise ValueError(f"input_shape = {self.input_shape}: {self.op} takes matrices")
        if self.op == "flip" and not set(self.by_axis) <= {0, 1}:
            raise ValueError(f"amounts = {shown(self.amounts)}: of flip they are 0 or 1")
        if self.result is not self.element and self.op != "copy":
            raise ValueError(f"out_element = {self.out_element}: only copy converts; {self.op} has {self.element}")

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return super().fields_from_args(args, out_element=args.out.dtype, **options)


class PadDescriptor(MoveDescriptor, PlannedBy["PadPlan"]):
    """``out`` is x surrounded by elements equal to ``value``, a number in Args; negative amounts crop x.

    Attributes:
        amounts: elements before and after x along each axis, ``(before_0, after_0, before_1, ...)``; ``()`` means
            zeros.
    """

    op: Literal["pad"] = "pad"
    amounts: Amounts = field(default=())

    @property
    def out_shape(self) -> tuple[int, ...]:
        amounts = self.by_axis
        return tuple(n + sum(amounts[2 * a : 2 * a + 2]) for a, n in enumerate(self.input_shape))

    def _counted(self) -> int:
        return 2 * len(self.input_shape)


class JoinDescriptor(Descriptor, PlannedBy["JoinPlan"]):
    """``out`` is the matrices ``x0``, ``x1`` and so on side by side: columns ``widths[0]`` to ``widths[0] + widths[1]``
    of ``out`` are those of ``x1``.

    Attributes:
        element: element of all.
        rows: rows of each.
        widths: columns of each; from 1 to 8 of them.
    """

    category: ClassVar[OpCategory] = OpCategory.COPIES

    op: Literal["join"] = "join"
    element: Element
    rows: Extent
    widths: Shape

    def declare_operands(self) -> tuple[Operand, ...]:
        inputs = (
            Operand(f"x{i}", Role.INPUT, self.element, (self.rows, n), batch_axes=(0,))
            for i, n in enumerate(self.widths)
        )
        return (*inputs, Operand("out", Role.OUTPUT, self.element, (self.rows, sum(self.widths)), batch_axes=(0,)))

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        given = (getattr(args, f"x{i}", None) for i in range(MOST_JOINED))
        widths = tuple(x.shape[1] for x in given if x is not None)
        return {"element": args.out.dtype, "rows": args.out.shape[0], "widths": widths, **options}


class FillDescriptor(Descriptor, PlannedBy["FillPlan"]):
    """``out = value``, a number in Args.

    Attributes:
        element: element of the result.
        out_shape: its shape.
    """

    category: ClassVar[OpCategory] = OpCategory.COPIES

    op: Literal["fill"] = "fill"
    element: Element
    out_shape: AnyShape

    def declare_operands(self) -> tuple[Operand, ...]:
        value = Operand("value", Role.INPUT, number(self.element), kind=OperandKind.HOST_SCALAR)
        shape = tuple(self.out_shape)
        return Operand("out", Role.OUTPUT, self.element, shape, batch_axes=tuple(range(len(shape)))), value

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return {"element": args.out.dtype, "out_shape": tuple(args.out.shape), **options}


class ArangeDescriptor(Descriptor, PlannedBy["ArangePlan"]):
    """``out[i] = start + i * step``, where ``start`` and ``step`` are numbers in Args; computed in f64 or i64.

    Attributes:
        element: element of the result.
        count: number of elements.
    """

    category: ClassVar[OpCategory] = OpCategory.COPIES

    op: Literal["arange"] = "arange"
    element: Element
    count: Extent

    def declare_operands(self) -> tuple[Operand, ...]:
        wide = F64 if self.element.is_floating_point else I64
        numbers = (Operand(n, Role.INPUT, wide, kind=OperandKind.HOST_SCALAR) for n in ("start", "step"))
        return (Operand("out", Role.OUTPUT, self.element, (self.count,)), *numbers)

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return {"element": args.out.dtype, "count": args.out.shape[0], **options}
