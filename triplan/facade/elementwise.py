"""Args and plans of elementwise ops, whose operands differ from op to op."""

from __future__ import annotations

from triplan.descriptors import (
    BinaryDescriptor,
    ExpressionDescriptor,
    TernaryDescriptor,
    UnaryBackwardDescriptor,
    UnaryDescriptor,
)
from triplan.facade.plan import NamedArgs, Plan

__all__ = [
    "BinaryArgs",
    "BinaryPlan",
    "ExpressionArgs",
    "ExpressionPlan",
    "TernaryArgs",
    "TernaryPlan",
    "UnaryArgs",
    "UnaryBackwardArgs",
    "UnaryBackwardPlan",
    "UnaryPlan",
]


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
