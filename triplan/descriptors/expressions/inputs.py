"""The operands of expressions: their fields in descriptors, and the shape that they broadcast to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol

import torch
from pydantic import BeforeValidator

from triplan.descriptors.expressions.expression import Expr, Node, flattened
from triplan.descriptors.expressions.tree import F32, F64, I64, MAX_OPERANDS, NUMBER, POINT, TENSOR, Tree
from triplan.descriptors.fields import AnyShape
from triplan.descriptors.operand import Operand, OperandKind, Role
from triplan.errors import shown
from triplan.sku import Element, ElementKind, OptionalElement
from triplan.sku.facts import fact


class Input(NamedTuple):
    """An operand that is read: a tensor, or (shape None) a number in Args, ``default`` if Args leave it out."""

    name: str
    element: ElementKind
    shape: tuple[int, ...] | None
    default: float | int | None = None

    @property
    def rank(self) -> int:
        return NUMBER if self.shape is None else TENSOR if self.shape else POINT

    def operand(self, batch_axes: tuple[int, ...]) -> Operand:
        """The operand of Args. ``batch_axes``: those of a tensor."""
        if self.shape is not None:
            return Operand(self.name, Role.INPUT, self.element, self.shape, batch_axes=batch_axes)
        optional = self.default is not None
        return Operand(self.name, Role.INPUT, self.element, kind=OperandKind.HOST_SCALAR, optional=optional)


class ExpressionProblem(Protocol):
    """A problem whose values are those of a tree: what the tree's jit function and its reference are made from."""

    @property
    def op(self) -> str: ...
    @property
    def tree(self) -> Tree: ...
    @property
    def shape(self) -> tuple[int, ...]:
        """What the operands are broadcast to."""

    def inputs_read(self) -> tuple[Input, ...]:
        """The operands that are read, in order."""


@fact
def broadcast(shapes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """The shape to which ``shapes`` broadcast. Raises ``ValueError``."""
    found: list[int] = []
    for shape in shapes:
        found = [1] * (len(shape) - len(found)) + found
        for axis in range(-len(shape), 0):
            if shape[axis] != 1 and found[axis] not in (1, shape[axis]):
                raise ValueError(f"shapes {', '.join(map(str, shapes))} do not broadcast")
            found[axis] = shape[axis] if found[axis] == 1 else found[axis]
    return tuple(found)


def check_inputs(inputs: Sequence[Input], results: Iterable[str], least: int = 1) -> None:
    """Raises ``ValueError`` for operands that no expression may have.

    ``results``: the names of those that take no operand's place, ``least`` of them.
    """
    names = [*(i.name for i in inputs), *results]
    if len(set(names)) < len(names) or not all(n.isidentifier() and not n.startswith("_") for n in names):
        raise ValueError(f"names of operands and results must be distinct identifiers, not {shown(names)}")
    if len(names) - len(inputs) < least or len(names) > MAX_OPERANDS:
        raise ValueError(
            f"{len(inputs)} operands and {len(names) - len(inputs)} results: must be at most "
            f"{MAX_OPERANDS} together, with at least one result"
        )
    for i in inputs:
        if i.shape is None and i.element not in (F32, F64, I64):
            raise ValueError(f"{i.name}: a number in Args must be f32, f64 or i64, not {i.element}")
    if not any(i.shape is not None for i in inputs):
        raise ValueError("no operand is a tensor; at least one must be")


def nodes_from_args(args: Any, roots: Iterable[Expr]) -> tuple[list[tuple[str, Any, Any]], Any, tuple[int, ...]]:
    """``inputs``, ``nodes`` and the positions of ``roots``, for the operands that ``args`` hold by name."""
    nodes, at = flattened(roots)
    inputs: list[tuple[str, Any, Any]] = []
    names = [str(n[1]) for n in nodes if n[0] == "operand"]
    real = "f64" if any(getattr(getattr(args, n), "dtype", None) is torch.float64 for n in names) else "f32"
    for name in names:
        value = getattr(args, name)
        if not isinstance(value, (bool, int, float)):
            inputs.append((name, value.dtype, tuple(value.shape)))
        else:
            inputs.append((name, real if isinstance(value, float) else "i64", None))
    return inputs, nodes, at


# --- fields ---


def as_tuples(value: Any) -> Any:
    """Lists become tuples, two levels down."""
    if not isinstance(value, (list, tuple)):
        return value
    return tuple(
        tuple(tuple(v) if isinstance(v, list) else v for v in item) if isinstance(item, (list, tuple)) else item
        for item in value
    )


if TYPE_CHECKING:
    Inputs = Sequence[tuple[str, Any, Any]]
    Nodes = Sequence[Node]
    Results = Sequence[tuple[str, int, Any]]
else:
    Inputs = Annotated[tuple[tuple[str, Element, AnyShape | None], ...], BeforeValidator(as_tuples)]
    Nodes = Annotated[tuple[tuple[str | int, ...], ...], BeforeValidator(as_tuples)]
    Results = Annotated[tuple[tuple[str, int, OptionalElement], ...], BeforeValidator(as_tuples)]
