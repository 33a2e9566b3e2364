"""Args and plans of elementwise ops, whose operands differ from op to op."""

from __future__ import annotations

import dataclasses
from typing import Any

from typing_extensions import Self

from triplan.descriptors import (
    BinaryDescriptor,
    ExpressionDescriptor,
    TernaryDescriptor,
    UnaryBackwardDescriptor,
    UnaryDescriptor,
)
from triplan.facade.plan import Plan
from triplan.sku.facts import fact

__all__ = [
    "BinaryArgs",
    "BinaryPlan",
    "ExpressionArgs",
    "ExpressionPlan",
    "NamedArgs",
    "TernaryArgs",
    "TernaryPlan",
    "UnaryArgs",
    "UnaryBackwardArgs",
    "UnaryBackwardPlan",
    "UnaryPlan",
]


class NamedArgs:
    """Tensors and numbers by the names of a descriptor's operands: ``BinaryArgs(x=x, y=2.0, out=out)``.

    An instance is a frozen dataclass of these fields. A name that was not given reads as None.
    """

    __slots__ = ()

    def __new__(cls, **operands: Any) -> Self:
        made: Any = cls if dataclasses.is_dataclass(cls) else _with_fields(cls, tuple(operands))
        found: Self = object.__new__(made)
        return found

    def __init__(self, **operands: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@fact
def _with_fields(cls: type[NamedArgs], names: tuple[str, ...]) -> type[NamedArgs]:
    """A subclass of ``cls`` with the fields ``names``."""
    return dataclasses.make_dataclass(cls.__name__, names, bases=(cls,), frozen=True, slots=True)


class UnaryArgs(NamedArgs):
    """x, the op's parameters, out."""

    __slots__ = ()


class UnaryPlan(Plan[UnaryDescriptor, UnaryArgs]):
    descriptor_type, args_type = UnaryDescriptor, UnaryArgs


class UnaryBackwardArgs(NamedArgs):
    """dout, x, the op's parameters, dx."""

    __slots__ = ()


class UnaryBackwardPlan(Plan[UnaryBackwardDescriptor, UnaryBackwardArgs]):
    descriptor_type, args_type = UnaryBackwardDescriptor, UnaryBackwardArgs


class BinaryArgs(NamedArgs):
    """x, y, the op's parameters, out."""

    __slots__ = ()


class BinaryPlan(Plan[BinaryDescriptor, BinaryArgs]):
    descriptor_type, args_type = BinaryDescriptor, BinaryArgs


class TernaryArgs(NamedArgs):
    """x, y, z, the op's parameters, out."""

    __slots__ = ()


class TernaryPlan(Plan[TernaryDescriptor, TernaryArgs]):
    descriptor_type, args_type = TernaryDescriptor, TernaryArgs


class ExpressionArgs(NamedArgs):
    """The operands and the results of the expression."""

    __slots__ = ()


class ExpressionPlan(Plan[ExpressionDescriptor, ExpressionArgs]):
    descriptor_type, args_type = ExpressionDescriptor, ExpressionArgs
