"""Reductions over any set of axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from typing_extensions import Self

from triplan.descriptors.base import Descriptor, PlannedBy
from triplan.descriptors.expressions.expression import Expr, flattened, operand
from triplan.descriptors.expressions.inputs import Input, Inputs, Nodes, broadcast, check_inputs, nodes_from_args
from triplan.descriptors.expressions.tree import Tree, checked
from triplan.descriptors.fields import MAX_RANK, AnyShape, AxesField, to_tuple
from triplan.descriptors.operand import Operand, Role
from triplan.errors import InvalidProblem, shown
from triplan.sku import Element, ElementKind, OpCategory, OptionalElement, field
from triplan.sku.facts import cached_property

if TYPE_CHECKING:
    from triplan.facade.reductions import ExpressionReductionPlan, ExtremumPlan, ReducePairPlan, ReducePlan
    from triplan.sku.model import Converted

    Axes = Converted[tuple[int, ...], Sequence[int]]
else:
    Axes = Annotated[tuple[int, ...], BeforeValidator(to_tuple), AxesField("input_shape")]

__all__ = ["ExpressionReductionDescriptor", "ExtremumDescriptor", "ReduceDescriptor", "ReducePairDescriptor"]

#: The element of sums of integers, counts and positions.
I64 = ElementKind.I64
#: The two results of each op that has them, by the ops of one result.
PAIRS = {"aminmax": ("amin", "amax"), "var_mean": ("var", "mean"), "std_mean": ("std", "mean")}
#: Ops that divide by the number of elements minus ``correction``.
DEVIATIONS = ("var", "std", "var_mean", "std_mean")
#: Ops that take only floats.
OF_FLOATS = ("mean", *DEVIATIONS, "vector_norm", "logsumexp")
#: Ops whose result may have another element, ``out_element``; that of the others is fixed by x.
SUMS = ("sum", "prod", *OF_FLOATS)
#: Ops that also give the position of their result.
INDEXED = ("max", "min")
#: Ops that are undefined on an empty set of elements.
EXTREMA = ("amax", "amin", "aminmax", *INDEXED, "argmax", "argmin")


class ReductionProblem(Descriptor):
    """What all reductions have. Results have the shape of the axes that are not reduced (torch's, without keepdim)."""

    category: ClassVar[OpCategory] = OpCategory.REDUCTIONS

    op: str
    if TYPE_CHECKING:
        reduce_axes: Axes
        out_element: ElementKind | None
        correction: float
        order: float

        @property
        def element(self) -> ElementKind:
            """The element of what is reduced."""

        @property
        def input_shape(self) -> tuple[int, ...]:
            """The shape of what is reduced."""

    @property
    def reduction(self) -> str:
        """How elements are reduced."""
        return self.op.removesuffix("_expression")

    @property
    def result(self) -> ElementKind:
        """The element of ``out``."""
        if self.op in ("any", "all"):
            return ElementKind.BOOL
        if self.op in ("count_nonzero", "argmax", "argmin"):
            return I64
        integer = not self.element.is_floating_point and self.reduction in SUMS
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
        if self.reduction in EXTREMA and self.reduced == 0 and 0 not in [self.input_shape[a] for a in self.kept_axes]:
            raise ValueError(f"input_shape = {shown(self.input_shape)}: {self.op} of no elements does not exist")
        floats = self.element.is_floating_point
        if self.reduction in OF_FLOATS and not floats:
            raise ValueError(f"element = {self.element}: {self.op} takes floats")
        fits = self.out_element is None or (
            self.reduction in SUMS and (self.out_element.is_floating_point if floats else self.out_element is I64)
        )
        if not fits:
            raise ValueError(f"out_element = {self.out_element}: {self.op} of {self.element} has no such result")

    def _inputs(self) -> tuple[Operand, ...]:
        raise NotImplementedError

    def _results(self, **results: ElementKind) -> tuple[Operand, ...]:
        shape = tuple(self.input_shape[a] for a in self.kept_axes)
        batch = tuple(range(len(shape)))
        found = (Operand(name, Role.OUTPUT, e, shape, batch_axes=batch) for name, e in results.items())
        return (*self._inputs(), *found)


class TensorReduction(ReductionProblem):
    """Fields of reductions of a tensor.

    Attributes:
        element: element of x.
        input_shape: shape of x.
        reduce_axes: axes of x in increasing order; may be none or all.
    """

    if not TYPE_CHECKING:
        element: Element
        input_shape: AnyShape
        reduce_axes: Axes

    def _inputs(self) -> tuple[Operand, ...]:
        return (Operand("x", Role.INPUT, self.element, tuple(self.input_shape), batch_axes=self.kept_axes),)

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        found = {"element": args.x.dtype, "input_shape": tuple(args.x.shape), **options}
        if options["op"] in SUMS:
            found["out_element"] = args.out.dtype
        return found


class ReduceDescriptor(TensorReduction, PlannedBy["ReducePlan"]):
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
        if not math.isfinite(self.correction) or not math.isfinite(self.order):
            raise ValueError(f"correction = {self.correction}, order = {self.order}: must be finite")

    def declare_operands(self) -> tuple[Operand, ...]:
        return self._results(out=self.result)


class ExtremumDescriptor(TensorReduction, PlannedBy["ExtremumPlan"]):
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


class ReducePairDescriptor(TensorReduction, PlannedBy["ReducePairPlan"]):
    """``out`` and ``second``: amin and amax, var and mean, or std and mean, as ``ReduceDescriptor`` has them.

    Means are not sums divided by a number, but what variances are computed from: their errors are larger.

    Attributes:
        out_element: element of both results of var_mean and std_mean. None: that of x.
        correction: variances divide by the number of elements minus ``correction``.
    """

    op: Literal["aminmax", "var_mean", "std_mean"]
    out_element: OptionalElement = field(default=None)
    correction: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    if not TYPE_CHECKING:
        order: ClassVar[float] = 2.0

    def declare_operands(self) -> tuple[Operand, ...]:
        return self._results(out=self.result, second=self.result)


class ExpressionReductionDescriptor(ReductionProblem, PlannedBy["ExpressionReductionPlan"]):
    """``out = reduction(f(operands))`` over ``reduce_axes``, as ``sum((x - y) ** 2)``: the values of an expression are
    reduced where they are computed, and never written.

    Operands broadcast. f16 and bf16 are computed and accumulated in f32, and only the result is rounded. ``op`` is the
    reduction with ``_expression``. ``of`` builds the descriptor from an expression of ``tp.expr`` and operand
    specifications, ``from_args`` from an expression and tensors.

    Attributes:
        inputs, nodes: operands and tree, as in ``ExpressionDescriptor``; the last node is what is reduced.
        reduce_axes: axes of the operands' broadcast shape in increasing order; may be none or all.
        out_element: element of sums and means. None: that of the values, or i64 if they are integers or bool.
    """

    op: Literal["sum_expression", "mean_expression", "amax_expression", "amin_expression"]
    inputs: Inputs
    nodes: Nodes
    reduce_axes: Axes
    out_element: OptionalElement = field(default=None)
    if not TYPE_CHECKING:
        correction: ClassVar[float] = 1.0
        order: ClassVar[float] = 2.0

    @classmethod
    def example(cls, element: ElementKind) -> Self:
        x, y = operand("x"), operand("y")
        return cls.of("sum_expression", x * y + x, (1,), x=(element, (8, 3)), y=(element, (8, 3)))

    @classmethod
    def of(
        cls,
        op: str,
        root: Expr,
        reduce_axes: Sequence[int],
        out_element: ElementKind | str | None = None,
        /,
        **inputs: Any,
    ) -> Self:
        """The problem that reduces ``root``, with ``inputs`` as (element, shape) by name; None is a number's shape.

        Raises ``InvalidProblem``.
        """
        if not isinstance(root, Expr):
            raise InvalidProblem(f"{shown(root)} is not an expression")
        nodes, _ = flattened([root])
        fields: dict[str, Any] = {"op": op, "reduce_axes": reduce_axes, "out_element": out_element}
        return cls(inputs=[(name, *spec) for name, spec in inputs.items()], nodes=nodes, **fields)

    def inputs_read(self) -> tuple[Input, ...]:
        """The operands that are read, in order."""
        return tuple(Input(*i) for i in self.inputs)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape to which the operands are broadcast."""
        return broadcast(tuple(i.shape for i in self.inputs_read() if i.shape is not None))

    @cached_property
    def tree(self) -> Tree:
        """The checked tree."""
        operands = {i.name: (i.element, i.rank) for i in self.inputs_read()}
        return checked(self.nodes, operands, [(len(self.nodes) - 1, None)])

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.shape

    @property
    def element(self) -> ElementKind:
        """The element of the expression's values, by torch's type promotion."""
        return self.tree.results[0][1]

    def check_problem(self) -> None:
        check_inputs(self.inputs_read(), ("out",))
        if len(self.shape) > MAX_RANK:
            raise ValueError(f"the operands broadcast to {self.shape}: rank {len(self.shape)} is above {MAX_RANK}")
        super().check_problem()

    def _inputs(self) -> tuple[Operand, ...]:
        def batch(shape: tuple[int, ...]) -> tuple[int, ...]:
            first = len(self.input_shape) - len(shape)
            return tuple(a - first for a in self.kept_axes if a >= first)

        return tuple(i.operand(batch(i.shape or ())) for i in self.inputs_read())

    def declare_operands(self) -> tuple[Operand, ...]:
        return self._results(out=self.result)

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        inputs, nodes, _ = nodes_from_args(args, [options.pop("expression")])
        if options["op"].removesuffix("_expression") in SUMS:
            options["out_element"] = args.out.dtype
        return {"inputs": inputs, "nodes": nodes, **options}
