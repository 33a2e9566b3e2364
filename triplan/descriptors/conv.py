"""Two-dimensional convolution (cross-correlation, as torch has it) and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from triplan.descriptors.base import Descriptor, PlannedBy
from triplan.descriptors.fields import DivisorField, Extent, to_tuple
from triplan.descriptors.operand import Operand, Role
from triplan.sku import Element, ElementKind, MathPrecision, OpCategory, OptionalMath, field

if TYPE_CHECKING:
    from triplan.facade.conv import Conv2dBackwardInputPlan, Conv2dBackwardWeightPlan, Conv2dPlan
    from triplan.sku.model import Converted

__all__ = ["Conv2dBackwardInputDescriptor", "Conv2dBackwardWeightDescriptor", "Conv2dDescriptor", "Conv2dProblem"]

_Positive = Annotated[int, Field(ge=1, lt=2**31)]
_Padding = Annotated[int, Field(ge=0, lt=2**31)]
if TYPE_CHECKING:
    Pair = Converted[tuple[int, int], Sequence[int]]
    Sides = Converted[tuple[int, int, int, int], Sequence[int]]
else:
    Pair = Annotated[tuple[_Positive, _Positive], BeforeValidator(to_tuple)]
    Sides = Annotated[tuple[_Padding, _Padding, _Padding, _Padding], BeforeValidator(to_tuple)]


class Conv2dProblem(Descriptor):
    """Fields that convolution and its gradients share. Any order of axes in memory (such as channels last) is expressed
    by strides; nothing is copied.

    Attributes:
        element: element of all operands. f16 and bf16 are accumulated in f32.
        batch: number of images.
        in_channels: channels of ``x``; a multiple of ``groups``.
        height, width: extents of ``x``.
        out_channels: channels of the result; a multiple of ``groups``.
        kernel: (height, width) of the filters.
        stride: rows and columns of ``x`` from one output pixel to the next.
        padding: rows and columns of zeros (above, below, left, right) of ``x``.
        dilation: rows and columns from one tap of a filter to the next.
        groups: number of groups of channels and filters; the filters of a group read the channels of that group only.
        math: precision to which f32 factors are rounded before they are multiplied: f32 (None) or tf32.
    """

    category: ClassVar[OpCategory] = OpCategory.CONV

    element: Element
    batch: Extent
    in_channels: Extent
    height: Extent
    width: Extent
    out_channels: Extent
    kernel: Pair
    stride: Pair = field(default=(1, 1))
    padding: Sides = field(default=(0, 0, 0, 0))
    dilation: Pair = field(default=(1, 1))
    groups: Annotated[_Positive, DivisorField(("in_channels", "out_channels"))] = 1
    math: OptionalMath = field(default=None)

    def check_problem(self) -> None:
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise ValueError(
                f"groups = {self.groups}: must divide in_channels = {self.in_channels} and out_channels = "
                f"{self.out_channels}"
            )
        for axis, name in enumerate(("height", "width")):
            padded, reach = self._padded(axis), self.dilation[axis] * (self.kernel[axis] - 1) + 1
            if padded < reach:
                raise ValueError(f"kernel = {self.kernel}: reaches over {reach} of {padded} padded elements of {name}")
        if self.math not in (None, *((MathPrecision.TF32,) if self.element is ElementKind.F32 else ())):
            raise ValueError(f"math = {self.math}: must be None, or tf32 for f32")

    def _padded(self, axis: int) -> int:
        return (self.height, self.width)[axis] + self.padding[2 * axis] + self.padding[2 * axis + 1]

    @property
    def out_extents(self) -> tuple[int, int]:
        """(height, width) of the result."""
        first, second = (
            (self._padded(axis) - self.dilation[axis] * (self.kernel[axis] - 1) - 1) // self.stride[axis] + 1
            for axis in (0, 1)
        )
        return first, second

    @property
    def channels(self) -> int:
        """Input channels per group."""
        return self.in_channels // self.groups

    @property
    def filters(self) -> int:
        """Filters (output channels) per group."""
        return self.out_channels // self.groups

    @property
    def taps(self) -> int:
        """Elements of a filter per input channel."""
        return self.kernel[0] * self.kernel[1]

    @property
    def multiplicands(self) -> MathPrecision:
        """The precision to which the factors of products are rounded."""
        return self.math or MathPrecision(self.element.value)

    def _input(self, name: str, role: Role = Role.INPUT, batch: bool = True) -> Operand:
        shape = (self.batch, self.in_channels, self.height, self.width)
        return Operand(name, role, self.element, shape, batch_axes=(0,) if batch else ())

    def _weight(self, name: str, role: Role = Role.INPUT) -> Operand:
        return Operand(name, role, self.element, (self.out_channels, self.channels, *self.kernel))

    def _result(self, name: str, role: Role = Role.INPUT, batch: bool = True) -> Operand:
        shape = (self.batch, self.out_channels, *self.out_extents)
        return Operand(name, role, self.element, shape, batch_axes=(0,) if batch else ())

    @classmethod
    def _fields(cls, x: Any, weight: Any, options: dict[str, Any]) -> dict[str, Any]:
        """The fields, from tensors of the shapes of ``x`` and ``weight`` (these operands or their gradients)."""
        batch, channels, height, width = x.shape
        return {
            "element": x.dtype,
            "batch": batch,
            "in_channels": channels,
            "height": height,
            "width": width,
            "out_channels": weight.shape[0],
            "kernel": tuple(weight.shape[2:]),
            "groups": channels // weight.shape[1] if weight.shape[1] else 1,
            **options,
        }


class Conv2dDescriptor(Conv2dProblem, PlannedBy["Conv2dPlan"]):
    """``out[n, k, p, q] = bias[k] + sum over c, r, s of x[n, c, p * stride + r * dilation - above, ...] * weight[k, c,
    r, s]``, with c over the channels of k's group and zeros outside x (torch.nn.functional.conv2d).

    Operands: ``x`` (batch, in_channels, height, width), ``weight`` (out_channels, in_channels / groups, *kernel),
    ``out`` (batch, out_channels, *out_extents), ``bias`` (out_channels,) if ``has_bias``.

    Attributes:
        has_bias: whether there is an operand ``bias``.
    """

    op: Literal["conv2d"] = "conv2d"
    has_bias: bool = False

    def declare_operands(self) -> tuple[Operand, ...]:
        bias = Operand("bias", Role.INPUT, self.element, (self.out_channels,))
        return (
            self._input("x"),
            self._weight("weight"),
            self._result("out", Role.OUTPUT),
            *((bias,) if self.has_bias else ()),
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return cls._fields(args.x, args.weight, {"has_bias": getattr(args, "bias", None) is not None, **options})


class Conv2dBackwardInputDescriptor(Conv2dProblem, PlannedBy["Conv2dBackwardInputPlan"]):
    """``dx``, the gradient of conv2d with respect to x: ``dx[n, c, h, w] = sum over k, r, s of dout[n, k, p, q] *
    weight[k, c, r, s]``, over the output pixels (p, q) that tap (r, s) computed from pixel (h, w).

    Operands: ``dout`` (batch, out_channels, *out_extents), ``weight``, ``dx`` (batch, in_channels, height, width).
    """

    op: Literal["conv2d_backward_input"] = "conv2d_backward_input"

    def declare_operands(self) -> tuple[Operand, ...]:
        return self._result("dout"), self._weight("weight"), self._input("dx", Role.OUTPUT)

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return cls._fields(args.dx, args.weight, options)


class Conv2dBackwardWeightDescriptor(Conv2dProblem, PlannedBy["Conv2dBackwardWeightPlan"]):
    """``dweight``, the gradient of conv2d with respect to weight: the products ``dout * x``, summed over all images and
    output pixels in a fixed order.

    Operands: ``x`` (batch, in_channels, height, width), ``dout`` (batch, out_channels, *out_extents), ``dweight``
    (out_channels, in_channels / groups, *kernel).
    """

    op: Literal["conv2d_backward_weight"] = "conv2d_backward_weight"

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            self._input("x", batch=False),
            self._result("dout", batch=False),
            self._weight("dweight", Role.OUTPUT),
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return cls._fields(args.x, args.dweight, options)
