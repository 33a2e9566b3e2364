"""softmax and log_softmax along any axis, and their backward ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from triplan.descriptors.base import PlannedBy, RowwiseDescriptor
from triplan.descriptors.fields import AxisField, Shape
from triplan.descriptors.operand import Operand, Role

if TYPE_CHECKING:
    from triplan.facade.softmax import LogSoftmaxBackwardPlan, LogSoftmaxPlan, SoftmaxBackwardPlan, SoftmaxPlan

__all__ = ["LogSoftmaxBackwardDescriptor", "LogSoftmaxDescriptor"]
__all__ += ["SoftmaxBackwardDescriptor", "SoftmaxDescriptor"]


class _Softmax(RowwiseDescriptor):
    """Rows along one axis.

    Attributes:
        input_shape: shape of every operand.
        softmax_axis: the axis of a row.
    """

    input_shape: Shape
    softmax_axis: Annotated[int, AxisField("input_shape")]

    def _operand(self, name: str, role: Role) -> Operand:
        batch = tuple(a for a in range(len(self.input_shape)) if a != self.softmax_axis)
        return Operand(name, role, self.element, self.input_shape, batch_axes=batch)

    def declare_operands(self) -> tuple[Operand, ...]:
        return (self._operand("x", Role.INPUT), self._operand("out", Role.OUTPUT))

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return {"element": args.out.dtype, "input_shape": tuple(args.out.shape), **options}


class _SoftmaxBackward(_Softmax):
    """The backward ops read ``out``, what the forward op wrote, instead of ``x``."""

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            self._operand("dout", Role.INPUT),
            self._operand("out", Role.INPUT),
            self._operand("dx", Role.OUTPUT),
        )


class SoftmaxDescriptor(_Softmax, PlannedBy["SoftmaxPlan"]):
    """``out = exp(x - max) / sum(exp(x - max))`` along ``softmax_axis`` (torch.softmax).

    A row that holds a NaN or +inf, or nothing but -inf, becomes NaN, as in torch.
    """

    op: Literal["softmax"] = "softmax"


class SoftmaxBackwardDescriptor(_SoftmaxBackward, PlannedBy["SoftmaxBackwardPlan"]):
    """``dx = out * (dout - sum(dout * out))`` along ``softmax_axis``, where ``out`` is the output of softmax."""

    op: Literal["softmax_backward"] = "softmax_backward"


class LogSoftmaxDescriptor(_Softmax, PlannedBy["LogSoftmaxPlan"]):
    """``out = x - max - log(sum(exp(x - max)))`` along ``softmax_axis`` (torch.log_softmax).

    A row that holds a NaN or +inf, or nothing but -inf, becomes NaN, as in torch.
    """

    op: Literal["log_softmax"] = "log_softmax"


class LogSoftmaxBackwardDescriptor(_SoftmaxBackward, PlannedBy["LogSoftmaxBackwardPlan"]):
    """``dx = dout - exp(out) * sum(dout)`` along ``softmax_axis``, where ``out`` is the output of log_softmax."""

    op: Literal["log_softmax_backward"] = "log_softmax_backward"


#: A descriptor of any op of this family.
AnySoftmaxDescriptor: TypeAlias = (
    SoftmaxDescriptor | SoftmaxBackwardDescriptor | LogSoftmaxDescriptor | LogSoftmaxBackwardDescriptor
)
