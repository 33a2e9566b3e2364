"""Elementwise ops: each output element is a function of the input elements at the same position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from triplan.descriptors.base import Descriptor, PlannedBy
from triplan.descriptors.fields import AnyShape
from triplan.descriptors.operand import Operand, Role
from triplan.sku import Element, OpCategory

if TYPE_CHECKING:
    from triplan.facade.elementwise import UnaryBackwardPlan, UnaryPlan

__all__ = ["UnaryBackwardDescriptor", "UnaryDescriptor"]


class ElementwiseDescriptor(Descriptor):
    """What elementwise ops share: one shape and one element.

    Attributes:
        element: element of every operand; f16 and bf16 are computed in f32.
        input_shape: shape of every operand.
    """

    category: ClassVar[OpCategory] = OpCategory.ELEMENTWISE

    element: Element
    input_shape: AnyShape

    def _tensor(self, name: str, role: Role) -> Operand:
        every_axis = tuple(range(len(self.input_shape)))
        return Operand(name, role, self.element, self.input_shape, batch_axes=every_axis)


class UnaryDescriptor(ElementwiseDescriptor, PlannedBy["UnaryPlan"]):
    """``out = f(x)``; ``op`` names f.

    relu_squared: ``f(x) = max(x, 0)**2`` (So et al., "Primer", 2021). NaN stays NaN.
    """

    op: Literal["relu_squared"]

    def declare_operands(self) -> tuple[Operand, ...]:
        return (self._tensor("x", Role.INPUT), self._tensor("out", Role.OUTPUT))

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return {"element": args.x.dtype, "input_shape": tuple(args.x.shape), **options}


class UnaryBackwardDescriptor(ElementwiseDescriptor, PlannedBy["UnaryBackwardPlan"]):
    """``dx = dout * f'(x)``; ``op`` names f and ends in ``_backward``.

    relu_squared_backward: ``dx = 2 * dout * x`` where x > 0, else 0, even if ``dout`` is not finite. A NaN in x
    stays NaN.
    """

    op: Literal["relu_squared_backward"]

    def declare_operands(self) -> tuple[Operand, ...]:
        return (self._tensor("dout", Role.INPUT), self._tensor("x", Role.INPUT), self._tensor("dx", Role.OUTPUT))

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return {"element": args.x.dtype, "input_shape": tuple(args.x.shape), **options}
