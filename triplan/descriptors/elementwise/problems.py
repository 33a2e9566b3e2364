"""Descriptors of elementwise ops: each output element is a function of the input elements at the same position."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

from typing_extensions import Self

from triplan.descriptors.base import Descriptor, PlannedBy
from triplan.descriptors.elementwise import expr
from triplan.descriptors.expressions.derivatives import gradients
from triplan.descriptors.expressions.expression import FUNCTIONS, Expr, Function, flattened, operand, rebuilt
from triplan.descriptors.expressions.inputs import (
    Input,
    Inputs,
    Nodes,
    Results,
    broadcast,
    check_inputs,
    nodes_from_args,
)
from triplan.descriptors.expressions.tree import F32, F64, I64, Tree, checked
from triplan.descriptors.fields import AnyShape, ShapeField
from triplan.descriptors.operand import Operand, Role
from triplan.errors import InvalidProblem, shown
from triplan.sku import Element, ElementKind, OpCategory, OptionalElement, field
from triplan.sku.facts import cached_property, fact

if TYPE_CHECKING:
    from triplan.facade.elementwise import BinaryPlan, ExpressionPlan, TernaryPlan, UnaryBackwardPlan, UnaryPlan

__all__ = [
    "BinaryDescriptor",
    "ExpressionDescriptor",
    "TernaryDescriptor",
    "UnaryBackwardDescriptor",
    "UnaryDescriptor",
]


# --- named ops: the functions of the maths table, and those that are composed of them ---


class Named(NamedTuple):
    """A named op: its operands, its parameters with their defaults, and the function that builds its expression."""

    operands: int
    parameters: Mapping[str, float]
    build: Any


def _named() -> dict[str, Named]:
    found = {}
    for name, value in vars(expr).items():
        if isinstance(value, Function):
            found[name] = Named(value.arity, {}, value)
        elif isinstance(value, FunctionType) and value.__module__ == expr.__name__:
            signature = inspect.signature(value).parameters.values()
            defaults = {p.name: p.default for p in signature if p.default is not p.empty}
            found[name] = Named(len(signature) - len(defaults), defaults, value)
    return dict(sorted(found.items()))


NAMED = _named()
NAMES = ("x", "y", "z")


@cache
def _expression(op: str) -> Expr:
    named = NAMED[op]
    found: Expr = named.build(*map(operand, NAMES[: named.operands]), *map(operand, named.parameters))
    return found


@cache
def _gradient(op: str) -> Expr:
    return gradients({"out": _expression(op)}, "x")["dx"]


def _differentiable(op: str) -> bool:
    return FUNCTIONS[op].gradient is not None if op in FUNCTIONS else True


if TYPE_CHECKING:
    UnaryOp: TypeAlias = str
    UnaryBackwardOp: TypeAlias = str
    BinaryOp: TypeAlias = str
    TernaryOp: TypeAlias = str
else:
    UnaryOp = Literal[tuple(op for op, named in NAMED.items() if named.operands == 1)]
    UnaryBackwardOp = Literal[
        tuple(f"{op}_backward" for op, named in NAMED.items() if named.operands == 1 and _differentiable(op))
    ]
    BinaryOp = Literal[tuple(op for op, named in NAMED.items() if named.operands == 2)]
    TernaryOp = Literal[tuple(op for op, named in NAMED.items() if named.operands == 3)]

# --- descriptors ---


class ElementwiseDescriptor(Descriptor):
    """Fields of all elementwise ops, which are trees of functions of operands that broadcast.

    Attributes:
        out_element: element of the result; None: by torch's type promotion.
    """

    category: ClassVar[OpCategory] = OpCategory.ELEMENTWISE

    if TYPE_CHECKING:

        @property
        def element(self) -> ElementKind: ...

    def inputs_read(self) -> tuple[Input, ...]:
        """The operands that are read, in order."""
        raise NotImplementedError

    def _tree(self) -> tuple[Tree, tuple[str, ...]]:
        """The tree, and the names of its results."""
        raise NotImplementedError

    @cached_property
    def tree(self) -> Tree:
        """The checked tree."""
        return self._tree()[0]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of every result: that of all operands, broadcast."""
        return broadcast(tuple(i.shape for i in self.inputs_read() if i.shape is not None))

    def check_problem(self) -> None:
        if len(self.shape) > 8:
            raise ValueError(f"the operands broadcast to {self.shape}: rank {len(self.shape)} is above 8")
        assert self.tree

    def declare_operands(self) -> tuple[Operand, ...]:
        found = [i.operand(_axes(i.shape or ())) for i in self.inputs_read()]
        read = tuple(found)
        for name, (_, element) in zip(self._tree()[1], self.tree.results, strict=True):
            over = tuple(o.name for o in read if o.is_tensor and (o.shape, o.element) == (self.shape, element))
            only = len(self.tree.results) == 1  # a second result would be computed from what the first has replaced
            found.append(
                Operand(name, Role.OUTPUT, element, self.shape, batch_axes=_axes(self.shape), over=over if only else ())
            )
        return tuple(found)


def _axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(range(len(shape)))


@fact
def _tree_of(root: Expr, inputs: tuple[tuple[str, ElementKind, int], ...], out: ElementKind | None) -> Tree:
    nodes, (at,) = flattened([root])
    return checked(nodes, {name: (element, rank) for name, element, rank in inputs}, [(at, out)])


class NamedDescriptor(ElementwiseDescriptor):
    """The base of named ops. Parameters of an op are numbers in Args, under their names.

    Attributes:
        element: element of x. Floats narrower than f32 are computed in f32, and nothing is rounded before the result.
        input_shape: shape of x.
    """

    op: str
    element: Element
    input_shape: AnyShape

    def inputs_read(self) -> tuple[Input, ...]:
        return self._inputs

    @cached_property
    def _inputs(self) -> tuple[Input, ...]:
        named, tensors = NAMED[self.op.removesuffix("_backward")], self._tensors()
        wide = any(i.element is F64 for i in tensors)
        whole = not any(i.element.is_floating_point for i in tensors)
        parameters = (
            Input(name, (F64 if wide else F32) if isinstance(value, float) or not whole else I64, None, value)
            for name, value in named.parameters.items()
        )
        return (*tensors, *parameters)

    def _tensors(self) -> tuple[Input, ...]:
        return (Input("x", self.element, self.input_shape),)

    def _root(self) -> Expr:
        return _expression(self.op)

    def _tree(self) -> tuple[Tree, tuple[str, ...]]:
        inputs = tuple((i.name, i.element, i.rank) for i in self.inputs_read())
        return _tree_of(self._root(), inputs, getattr(self, "out_element", None)), ("out",)


class UnaryDescriptor(NamedDescriptor, PlannedBy["UnaryPlan"]):
    """``out = f(x)``; ``op`` names f."""

    op: UnaryOp
    out_element: OptionalElement = field(default=None)

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return {"element": args.x.dtype, "input_shape": tuple(args.x.shape), "out_element": args.out.dtype, **options}


class UnaryBackwardDescriptor(NamedDescriptor, PlannedBy["UnaryBackwardPlan"]):
    """``dx = dout * f'(x)``; ``op`` is the name of f with ``_backward``. Reads x, not the result of the forward."""

    op: UnaryBackwardOp

    def check_problem(self) -> None:
        if not self.element.is_floating_point:
            raise ValueError(f"element = {self.element}: only floats have gradients")
        super().check_problem()

    def _tensors(self) -> tuple[Input, ...]:
        return (Input("dout", self.element, self.input_shape), *super()._tensors())

    def _tree(self) -> tuple[Tree, tuple[str, ...]]:
        inputs = tuple((i.name, i.element, i.rank) for i in self.inputs_read())
        return _tree_of(_gradient(self.op.removesuffix("_backward")), inputs, self.element), ("dx",)

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return {"element": args.x.dtype, "input_shape": tuple(args.x.shape), **options}


if TYPE_CHECKING:
    OptionalShape = Sequence[int] | None
else:
    OptionalShape = Annotated[AnyShape, ShapeField(min_rank=0)] | None


class _SeveralDescriptor(NamedDescriptor):
    """
    Attributes:
        y_element, z_element: elements of y and z; None: that of x.
        y_shape, z_shape: shapes of y and z; None: that of x. Shapes broadcast.
        numbers: which of y and z are numbers in Args instead of tensors.
    """

    @property
    def _is_wide(self) -> bool:
        """Whether a tensor is f64, so that numbers are f64 too."""
        given = (getattr(self, f"{n}_element") for n in NAMES[1 : NAMED[self.op].operands] if n not in self.numbers)  # type: ignore[attr-defined]
        return self.element is F64 or F64 in given

    def _tensors(self) -> tuple[Input, ...]:
        found = [*super()._tensors()]
        for name in NAMES[1 : NAMED[self.op].operands]:
            element: ElementKind = getattr(self, f"{name}_element") or self.element
            shape = getattr(self, f"{name}_shape")
            if name in self.numbers:  # type: ignore[attr-defined]
                element = (F64 if self._is_wide else F32) if element.is_floating_point else I64
                found.append(Input(name, element, None))
            else:
                found.append(Input(name, element, self.input_shape if shape is None else shape))
        return tuple(found)

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        found = {"element": args.x.dtype, "input_shape": tuple(args.x.shape), "out_element": args.out.dtype, **options}
        numbers = []
        for name in (n for n in NAMES[1:] if f"{n}_shape" in cls.model_fields):
            value = getattr(args, name)
            if not isinstance(value, (bool, int, float)):
                found |= {f"{name}_element": value.dtype, f"{name}_shape": tuple(value.shape)}
            else:
                numbers.append(name)
                found[f"{name}_element"] = F32 if isinstance(value, float) else I64
        return {**found, "numbers": tuple(numbers)}


class BinaryDescriptor(_SeveralDescriptor, PlannedBy["BinaryPlan"]):
    """``out = f(x, y)``; ``op`` names f."""

    op: BinaryOp
    y_element: OptionalElement = field(default=None)
    y_shape: OptionalShape = field(default=None)
    numbers: tuple[Literal["y"], ...] = field(default=())
    out_element: OptionalElement = field(default=None)

    def check_problem(self) -> None:
        super().check_problem()
        # torch refuses one bool, too, which promotion would make a number.
        if self.op in ("sub", "sub_scaled") and ElementKind.BOOL in (self.element, self.y_element):
            raise ValueError(f"{self.op} does not take bool")


class TernaryDescriptor(_SeveralDescriptor, PlannedBy["TernaryPlan"]):
    """``out = f(x, y, z)``; ``op`` names f."""

    op: TernaryOp
    y_element: OptionalElement = field(default=None)
    y_shape: OptionalShape = field(default=None)
    z_element: OptionalElement = field(default=None)
    z_shape: OptionalShape = field(default=None)
    numbers: tuple[Literal["y", "z"], ...] = field(default=())
    out_element: OptionalElement = field(default=None)


# --- expressions ---


class ExpressionDescriptor(ElementwiseDescriptor, PlannedBy["ExpressionPlan"]):
    """User-defined expressions: every result is a tree of functions of the operands, which broadcast.

    ``of`` builds the descriptor from expressions of ``tp.expr`` and operand specifications, ``from_args`` from
    expressions and tensors.

    Attributes:
        inputs: (name, element, shape) of each operand; shape None: a number in Args.
        nodes: (function, position of each argument) for each node, arguments before functions; leaves are
            ("operand", name) and ("number", text). A shared subexpression stands once.
        results: (name, position of its node, element) of each result; element None: by torch's type promotion.
    """

    op: Literal["expression"] = "expression"
    inputs: Inputs
    nodes: Nodes
    results: Results

    @classmethod
    def example(cls, element: ElementKind) -> Self:
        x, y = operand("x"), operand("y")
        return cls.of(expr.relu(x) * x + y, x=(element, (8, 64)), y=(element, (8, 64)))

    @property
    def element(self) -> ElementKind:
        """The element of the first result."""
        return self.tree.results[0][1]

    def inputs_read(self) -> tuple[Input, ...]:
        return tuple(Input(*i) for i in self.inputs)

    def check_problem(self) -> None:
        check_inputs(self.inputs_read(), (r[0] for r in self.results))
        super().check_problem()
        # Elements are filled in, so that equal problems have equal keys.
        stated = zip(self.results, self.tree.results, strict=True)
        self.__dict__["results"] = tuple((name, at, element) for (name, at, _), (_, element) in stated)

    @cached_property
    def tree(self) -> Tree:
        operands = {i.name: (i.element, i.rank) for i in self.inputs_read()}
        return checked(self.nodes, operands, [(at, element) for _, at, element in self.results])

    def _tree(self) -> tuple[Tree, tuple[str, ...]]:
        return self.tree, tuple(name for name, _, _ in self.results)

    @classmethod
    def of(
        cls, results: Expr | Mapping[str, Expr], elements: Mapping[str, Any] | None = None, /, **inputs: Any
    ) -> Self:
        """The problem of ``results`` (a single one is called ``out``), with ``inputs`` as (element, shape) by name.

        The shape of a number in Args is None. ``elements``: elements of results by name; by default those of torch's
        type promotion. Raises ``InvalidProblem``.
        """
        given = results if isinstance(results, Mapping) else {"out": results}
        elements = elements or {}
        for name, root in given.items():
            if not isinstance(root, Expr):
                raise InvalidProblem(f"{name}: {shown(root)} is not an expression")
        nodes, roots = flattened(given.values())
        return cls(
            inputs=[(name, *spec) for name, spec in inputs.items()],
            nodes=nodes,
            results=[(name, at, elements.get(name)) for name, at in zip(given, roots, strict=True)],
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        results = options.pop("results")
        given = {"out": results} if isinstance(results, Expr) else dict(results)
        inputs, nodes, roots = nodes_from_args(args, given.values())
        outs = [(name, at, getattr(args, name).dtype) for name, at in zip(given, roots, strict=True)]
        return {"inputs": inputs, "nodes": nodes, "results": outs, **options}

    def backward(self, wrt: Sequence[str]) -> ExpressionDescriptor:
        """The problem of the gradients ``d<name>`` with respect to the operands ``wrt``, given ``d<result>``.

        Gradients have the shape of the results; the sum over broadcast axes is left to the caller. Values are
        recomputed from the operands. Raises ``InvalidProblem`` for an unknown operand.
        """
        values = rebuilt(self.nodes)
        found = gradients({name: values[at] for name, at, _ in self.results}, wrt)
        names = [i.name for i in self.inputs_read()]
        if unknown := set(wrt) - set(names):
            raise InvalidProblem(f"wrt names {', '.join(sorted(unknown))}; the operands are {', '.join(names)}")
        specs = {i.name: (i.element, i.shape) for i in self.inputs_read()}
        specs |= {f"d{n}": (e, self.shape) for (n, _, _), (_, e) in zip(self.results, self.tree.results, strict=True)}
        nodes, _ = flattened(found.values())
        read = {str(n[1]) for n in nodes if n[0] == "operand"}
        specs = {n: s for n, s in specs.items() if n in read or n in wrt}
        return ExpressionDescriptor.of(found, {f"d{n}": specs[n][0] for n in wrt}, **specs)
