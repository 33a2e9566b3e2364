"""Reductions over any set of axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from triplan.descriptors.base import Descriptor, PlannedBy
from triplan.descriptors.fields import AnyShape, AxesField, to_tuple
from triplan.descriptors.operand import Operand, Role
from triplan.errors import shown
from triplan.sku import Element, ElementKind, OpCategory, OptionalElement, field

if TYPE_CHECKING:
    from triplan.facade.reductions import ExtremumPlan, ReducePlan
    from triplan.sku.model import Converted

    Axes = Converted[tuple[int, ...], Sequence[int]]
else:
    Axes = Annotated[tuple[int, ...], BeforeValidator(to_tuple), AxesField("input_shape")]

__all__ = ["ExtremumDescriptor", "ReduceDescriptor"]

#: The element of sums of integers, counts and positions.
I64 = ElementKind.I64
#: Ops that take only floats.
OF_FLOATS = ("mean", "var", "std", "vector_norm", "logsumexp")
#: Ops whose result may have another element, ``out_element``; that of the others is fixed by x.
SUMS = ("sum", "prod", *OF_FLOATS)
#: Ops that are undefined on an empty set of elements.
EXTREMA = ("amax", "amin", "max", "min", "argmax", "argmin")


class ReductionProblem(Descriptor):
    """Fields of all reductions. Results have the shape of the axes that are not reduced (torch's, without keepdim).

    Attributes:
        element: element of x.
        input_shape: shape of x.
        reduce_axes: axes of x in increasing order; may be none or all.
    """

    category: ClassVar[OpCategory] = OpCategory.REDUCTIONS

    op: str
    element: Element
    input_shape: AnyShape
    reduce_axes: Axes

    if TYPE_CHECKING:
        out_element: ElementKind | None
        correction: float
        order: float

    @property
    def result(self) -> ElementKind:
        """The element of ``out``."""
        if self.op in ("any", "all"):
            return ElementKind.BOOL
        if self.op in ("count_nonzero", "argmax", "argmin"):
            return I64
        integer = not self.element.is_floating_point and self.op in SUMS
        return self.out_element or (I64 if integer else self.element)

    @property
    def kept_axes(self) -> tuple[int, ...]:
        """The axes that are not reduced."""
        return tuple(a for a in range(len(self.input_shape)) if a not in self.reduce_axes)

    @property
    def reduced(self) -> int:
        """Number of elements that each result reduces."""
        found = 1
        for a in self.reduce_axes:
            found *= self.input_shape[a]
        return found

    def check_problem(self) -> None:
        if self.op in EXTREMA and self.reduced == 0 and 0 not in [self.input_shape[a] for a in self.kept_axes]:
            raise ValueError(f"input_shape = {shown(self.input_shape)}: {self.op} of no elements does not exist")

    def _results(self, **results: ElementKind) -> tuple[Operand, ...]:
        kept = self.kept_axes
        shape = tuple(self.input_shape[a] for a in kept)
        batch = tuple(range(len(shape)))
        return (
            Operand("x", Role.INPUT, self.element, tuple(self.input_shape), batch_axes=kept),
            *(Operand(name, Role.OUTPUT, e, shape, batch_axes=batch) for name, e in results.items()),
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        found = {"element": args.x.dtype, "input_shape": tuple(args.x.shape), **options}
        if options["op"] in SUMS:
            found["out_element"] = args.out.dtype
        return found


class ReduceDescriptor(ReductionProblem, PlannedBy["ReducePlan"]):
    """``out = op(x)`` over ``reduce_axes`` (torch.sum, torch.mean, torch.argmax and others).

    f16 and bf16 are accumulated in f32; sums and products of integers and bool in i64, modulo 2**64. ``amax``,
    ``amin``, ``argmax`` and ``argmin`` take the first NaN if there is one, and the first of equal elements; positions
    are row-major over ``reduce_axes``. ``any`` and ``all`` give bool, ``count_nonzero`` i64. ``vector_norm`` is
    (sum |x|**order) ** (1 / order). The tolerance of a product holds while no product of a subset of the elements
    leaves the accumulator's normal range.

    Attributes:
        out_element: element of the results of sum, mean, prod, var, std, vector_norm and logsumexp. None: that of x, or
            i64 if x is integers or bool.
        correction: for var and std, which divide by the number of elements minus ``correction``.
        order: order of vector_norm.
    """

    op: Literal[
        "sum", "mean", "prod", "amax", "amin", "argmax", "argmin", "any", "all", "count_nonzero", "var", "std",
        "vector_norm", "logsumexp",
    ]  # fmt: skip
    out_element: OptionalElement = field(default=None)
    correction: float = 1.0
    order: Annotated[float, Field(gt=0)] = 2.0

    def check_problem(self) -> None:
        super().check_problem()
        floats = self.element.is_floating_point
        if self.op in OF_FLOATS and not floats:
            raise ValueError(f"element = {self.element}: {self.op} takes floats")
        fits = self.out_element is None or (
            self.op in SUMS and (self.out_element.is_floating_point if floats else self.out_element is I64)
        )
        if not fits:
            raise ValueError(f"out_element = {self.out_element}: {self.op} of {self.element} has no such result")
        if not math.isfinite(self.correction) or not math.isfinite(self.order):
            raise ValueError(f"correction = {self.correction}, order = {self.order}: must be finite")

    def declare_operands(self) -> tuple[Operand, ...]:
        return self._results(out=self.result)


class ExtremumDescriptor(ReductionProblem, PlannedBy["ExtremumPlan"]):
    """``out``, the largest (smallest) elements over ``reduce_axes``, and ``indices``, their positions (torch.max).

    The first NaN is taken if there is one, and the first of equal elements. Positions are row-major over
    ``reduce_axes``.
    """

    op: Literal["max", "min"]
    if not TYPE_CHECKING:
        out_element: ClassVar[None] = None
        correction: ClassVar[float] = 1.0
        order: ClassVar[float] = 2.0

    def declare_operands(self) -> tuple[Operand, ...]:
        return self._results(out=self.result, indices=I64)
