"""Cumulative sums and products along any axis, and the backward of the products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from triplan.descriptors.base import PlannedBy, RowwiseDescriptor
from triplan.descriptors.fields import AxisField, Shape
from triplan.descriptors.operand import Operand, Role

if TYPE_CHECKING:
    from triplan.facade.scans import CumprodBackwardPlan, ScanPlan

__all__ = ["CumprodBackwardDescriptor", "ScanDescriptor"]


class AnyScanDescriptor(RowwiseDescriptor):
    """Rows along one axis, of floats or i64.

    Attributes:
        input_shape: shape of every operand.
        scan_axis: the axis of a row.
    """

    input_shape: Shape
    scan_axis: Annotated[int, AxisField("input_shape")]

    def _operands_of(self, *names: str) -> tuple[Operand, ...]:
        """The operands ``names``: inputs, except that the last is the output."""
        batch = tuple(a for a in range(len(self.input_shape)) if a != self.scan_axis)
        roles = (*(Role.INPUT for _ in names[1:]), Role.OUTPUT)
        return tuple(
            Operand(name, role, self.element, self.input_shape, batch_axes=batch)
            for name, role in zip(names, roles, strict=True)
        )


class ScanDescriptor(AnyScanDescriptor, PlannedBy["ScanPlan"]):
    """``out[k] = x[0] + ... + x[k]`` (cumsum) or ``x[0] * ... * x[k]`` (cumprod) along ``scan_axis`` (torch.cumsum).

    f16 and bf16 are accumulated in f32, i64 modulo 2**64. The tolerance of a product holds while no product of
    consecutive elements leaves the accumulator's normal range, because the kernels merge such products.

    Attributes:
        reverse: whether rows are scanned from their end: ``out[k] = x[k] + ... + x[n - 1]``.
    """

    op: Literal["cumsum", "cumprod"]
    reverse: bool = False

    def declare_operands(self) -> tuple[Operand, ...]:
        return self._operands_of("x", "out")

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return {"element": args.out.dtype, "input_shape": tuple(args.out.shape), **options}


class CumprodBackwardDescriptor(AnyScanDescriptor, PlannedBy["CumprodBackwardPlan"]):
    """``dx[k] = out[k - 1] * s[k]``, with ``s[k] = dout[k] + x[k + 1] * s[k + 1]``, where ``out`` is the output of
    cumprod.

    This equals the sum over j >= k of dout[j] times the product of x[0], ..., x[j] without x[k]. Nothing is divided, so
    zeros in x need no special case. The tolerance holds while no product of consecutive elements leaves the
    accumulator's normal range.
    """

    op: Literal["cumprod_backward"] = "cumprod_backward"

    def declare_operands(self) -> tuple[Operand, ...]:
        return self._operands_of("dout", "x", "out", "dx")

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return {"element": args.x.dtype, "input_shape": tuple(args.x.shape), **options}
