"""Rowwise ops: each output row depends on one input row (softmax and its kin), and on parameters shared by all rows."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from triplan.descriptors.base import Descriptor
from triplan.descriptors.fields import AxisField, NonNegative, Shape, ShapeField, to_tuple
from triplan.descriptors.operand import Operand, Role
from triplan.sku import Element, ElementKind, OpCategory


class RowwiseDescriptor(Descriptor):
    """What all rowwise ops share: ``element``, of the values. Narrow floats are computed in f32."""

    category: ClassVar[OpCategory] = OpCategory.ROWWISE

    element: Element


# --- softmax and log_softmax, along any axis ---


class _Softmax(RowwiseDescriptor):
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
    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            self._operand("dout", Role.INPUT),
            self._operand("out", Role.INPUT),
            self._operand("dx", Role.OUTPUT),
        )


class SoftmaxDescriptor(_Softmax):
    """``out = exp(x - max) / sum(exp(x - max))`` along ``softmax_axis`` (torch.softmax).

    A row with a NaN, with +inf or of nothing but -inf becomes NaN, as in torch.
    """

    op: Literal["softmax"] = "softmax"


class SoftmaxBackwardDescriptor(_SoftmaxBackward):
    """``dx = out * (dout - sum(dout * out))`` along ``softmax_axis``, where ``out`` is what softmax gave."""

    op: Literal["softmax_backward"] = "softmax_backward"


class LogSoftmaxDescriptor(_Softmax):
    """``out = x - max - log(sum(exp(x - max)))`` along ``softmax_axis`` (torch.log_softmax).

    A row with a NaN, with +inf or of nothing but -inf becomes NaN, as in torch.
    """

    op: Literal["log_softmax"] = "log_softmax"


class LogSoftmaxBackwardDescriptor(_SoftmaxBackward):
    """``dx = dout - exp(out) * sum(dout)`` along ``softmax_axis``, where ``out`` is what log_softmax gave."""

    op: Literal["log_softmax_backward"] = "log_softmax_backward"


# --- norms, along the last axis ---

#: A batch of rows: at least one axis, then that of the row.
RowsShape = Annotated[tuple[NonNegative, ...], BeforeValidator(to_tuple), ShapeField(min_rank=2)]
Epsilon = Annotated[float, Field(ge=0, lt=1, strict=False)]


class _Norm(RowwiseDescriptor):
    """``weight`` and ``bias`` say whether there are such operands (of a row's shape)."""

    input_shape: RowsShape
    weight: bool = True

    @property
    def _rows(self) -> tuple[int, ...]:
        return self.input_shape[:-1]

    @property
    def _statistic(self) -> ElementKind:
        return self.element.compute

    def _whole(self, name: str, role: Role) -> Operand:
        return Operand(name, role, self.element, self.input_shape, batch_axes=tuple(range(len(self._rows))))

    def _of_rows(self, name: str, role: Role) -> Operand:
        return Operand(name, role, self._statistic, self._rows, batch_axes=tuple(range(len(self._rows))))

    def _shared(self, name: str, role: Role, present: bool) -> tuple[Operand, ...]:
        return (Operand(name, role, self.element, self.input_shape[-1:]),) if present else ()

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {"element": args.x.dtype, "input_shape": tuple(args.x.shape)}
        fields["weight"] = getattr(args, "weight", None) is not None
        if "bias" in cls.model_fields:
            fields["bias"] = any(getattr(args, name, None) is not None for name in ("bias", "dbias"))
        return {**fields, **options}


class RmsNormDescriptor(_Norm):
    """``out = x * rstd * weight`` with ``rstd = 1 / sqrt(mean(x**2) + eps)`` along the last axis (torch's rms_norm).

    ``rstd`` (one a row, in f32, or f64 for f64) is written for the adjoint. As in torch, squares that leave the range
    of f32 make the row 0.
    """

    op: Literal["rms_norm"] = "rms_norm"
    eps: Epsilon = 1e-5

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            self._whole("x", Role.INPUT),
            self._whole("out", Role.OUTPUT),
            self._of_rows("rstd", Role.OUTPUT),
            *self._shared("weight", Role.INPUT, self.weight),
        )


class RmsNormBackwardDescriptor(_Norm):
    """``dx = rstd * (g - xhat * mean(g * xhat))`` with ``xhat = x * rstd`` and ``g = dout * weight``;
    ``dweight = sum(dout * xhat)`` over all rows.
    """

    op: Literal["rms_norm_backward"] = "rms_norm_backward"

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            self._whole("dout", Role.INPUT),
            self._whole("x", Role.INPUT),
            self._of_rows("rstd", Role.INPUT),
            self._whole("dx", Role.OUTPUT),
            *self._shared("weight", Role.INPUT, self.weight),
            *self._shared("dweight", Role.OUTPUT, self.weight),
        )


class LayerNormDescriptor(_Norm):
    """``out = (x - mean) * rstd * weight + bias`` with ``rstd = 1 / sqrt(var + eps)`` along the last axis, ``var`` of
    centred values (torch's layer_norm).

    ``mean`` and ``rstd`` (one a row, in f32, or f64 for f64) are written for the adjoint.
    """

    op: Literal["layer_norm"] = "layer_norm"
    eps: Epsilon = 1e-5
    bias: bool = True

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            self._whole("x", Role.INPUT),
            self._whole("out", Role.OUTPUT),
            self._of_rows("mean", Role.OUTPUT),
            self._of_rows("rstd", Role.OUTPUT),
            *self._shared("weight", Role.INPUT, self.weight),
            *self._shared("bias", Role.INPUT, self.bias),
        )


class LayerNormBackwardDescriptor(_Norm):
    """``dx = rstd * (g - mean(g) - xhat * mean(g * xhat))`` with ``xhat = (x - mean) * rstd``, ``g = dout * weight``;
    ``dweight = sum(dout * xhat)`` and ``dbias = sum(dout)`` over all rows.
    """

    op: Literal["layer_norm_backward"] = "layer_norm_backward"
    bias: bool = True

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            self._whole("dout", Role.INPUT),
            self._whole("x", Role.INPUT),
            self._of_rows("mean", Role.INPUT),
            self._of_rows("rstd", Role.INPUT),
            self._whole("dx", Role.OUTPUT),
            *self._shared("weight", Role.INPUT, self.weight),
            *self._shared("dweight", Role.OUTPUT, self.weight),
            *self._shared("dbias", Role.OUTPUT, self.bias),
        )
