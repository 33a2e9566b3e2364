"""Pooling: the maximum or the average of windows over images, and the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from triplan.descriptors.base import Descriptor, PlannedBy
from triplan.descriptors.fields import Extent, to_tuple
from triplan.descriptors.operand import Operand, Role
from triplan.sku import Element, ElementKind, OpCategory, field

if TYPE_CHECKING:
    from triplan.facade.pooling import (
        AdaptiveAvgPool2dBackwardPlan,
        AdaptiveAvgPool2dPlan,
        AvgPool2dBackwardPlan,
        AvgPool2dPlan,
        MaxPool2dBackwardPlan,
        MaxPool2dPlan,
    )
    from triplan.sku.model import Converted

__all__ = [
    "AdaptiveAvgPool2dBackwardDescriptor",
    "AdaptiveAvgPool2dDescriptor",
    "AvgPool2dBackwardDescriptor",
    "AvgPool2dDescriptor",
    "MaxPool2dBackwardDescriptor",
    "MaxPool2dDescriptor",
]

if TYPE_CHECKING:
    Pair = Converted[tuple[int, int], Sequence[int]]
    Padding = Converted[tuple[int, int], Sequence[int]]
else:
    Pair = Annotated[tuple[(Annotated[int, Field(ge=1, lt=2**31)],) * 2], BeforeValidator(to_tuple)]
    Padding = Annotated[tuple[(Annotated[int, Field(ge=0, lt=2**31)],) * 2], BeforeValidator(to_tuple)]


class PoolProblem(Descriptor):
    """Fields of all pooling ops. Each channel is pooled separately; images may have any strides.

    Attributes:
        element: element of the values; averages and sums of f16 and bf16 are accumulated in f32.
        batch: number of images.
        channels: channels of an image.
        height, width: extents of ``x``.
    """

    category: ClassVar[OpCategory] = OpCategory.POOLING

    element: Element
    batch: Extent
    channels: Extent
    height: Extent
    width: Extent

    if TYPE_CHECKING:

        @property
        def out_extents(self) -> tuple[int, int]:
            """(height, width) of the result."""

    def check_problem(self) -> None:
        if 0 in (self.height, self.width):
            raise ValueError(f"height = {self.height}, width = {self.width}: must be positive")

    def _pixels(self, name: str, role: Role = Role.INPUT) -> Operand:
        shape = (self.batch, self.channels, self.height, self.width)
        return Operand(name, role, self.element, shape, batch_axes=(0, 1))

    def _results(self, name: str, role: Role = Role.INPUT, element: ElementKind | None = None) -> Operand:
        shape = (self.batch, self.channels, *self.out_extents)
        return Operand(name, role, element or self.element, shape, batch_axes=(0, 1))

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        like = args.x if hasattr(args, "x") else args.dx
        names = ("batch", "channels", "height", "width")
        return {"element": like.dtype, **dict(zip(names, like.shape, strict=True)), **options}


class WindowsProblem(PoolProblem):
    """Windows of one size.

    Attributes:
        kernel: (height, width) of a window, in elements.
        stride: rows and columns from one window to the next.
        padding: rows and columns around ``x``, at most half of a window's reach.
        ceil_mode: whether a last window that starts within the padded image may reach beyond its end.
    """

    kernel: Pair
    stride: Pair = field(default=(1, 1))
    padding: Padding = field(default=(0, 0))
    ceil_mode: bool = False

    if TYPE_CHECKING:
        dilation: tuple[int, int]

    def check_problem(self) -> None:
        super().check_problem()
        for axis in (0, 1):
            reach = self.dilation[axis] * (self.kernel[axis] - 1) + 1
            if 2 * self.padding[axis] > reach:
                raise ValueError(f"padding = {self.padding}: at most half of a window's reach of {reach}")
        if min(self.out_extents) < 1:
            raise ValueError(f"kernel = {self.kernel}: no window fits into {self.height} x {self.width} padded pixels")

    @property
    def out_extents(self) -> tuple[int, int]:
        def along(axis: int) -> int:
            size, pad, step = (self.height, self.width)[axis], self.padding[axis], self.stride[axis]
            left = size + 2 * pad - self.dilation[axis] * (self.kernel[axis] - 1) - 1
            found = (left + (step - 1) * self.ceil_mode) // step + 1
            return found - (self.ceil_mode and (found - 1) * step >= size + pad)

        return along(0), along(1)


class MaxProblem(WindowsProblem):
    """Fields of max pooling.

    Attributes:
        dilation: rows and columns from one element of a window to the next.
    """

    dilation: Pair = field(default=(1, 1))


class MaxPool2dDescriptor(MaxProblem, PlannedBy["MaxPool2dPlan"]):
    """``out[n, c, p, q]``, the largest element of a window of ``x``, and ``indices``, its position: row * width +
    column within the channel (torch.nn.functional.max_pool2d).

    If a window holds NaN, its last NaN is taken; of equal elements, the first. A window without an element of ``x``,
    which dilation can cause, gives -inf and index -1.
    """

    op: Literal["max_pool2d"] = "max_pool2d"

    def declare_operands(self) -> tuple[Operand, ...]:
        indices = self._results("indices", Role.OUTPUT, ElementKind.I64)
        return self._pixels("x"), self._results("out", Role.OUTPUT), indices


class MaxPool2dBackwardDescriptor(MaxProblem, PlannedBy["MaxPool2dBackwardPlan"]):
    """``dx[n, c, h, w]``, the sum of ``dout`` over the windows that contain the element and whose ``indices`` name it.

    ``indices`` are those of max_pool2d. An index that names no element of its own window is ignored.
    """

    op: Literal["max_pool2d_backward"] = "max_pool2d_backward"

    def declare_operands(self) -> tuple[Operand, ...]:
        indices = self._results("indices", element=ElementKind.I64)
        return self._results("dout"), indices, self._pixels("dx", Role.OUTPUT)


class AvgProblem(WindowsProblem):
    """Fields of average pooling with windows of one size.

    Attributes:
        count_include_pad: whether the padding of a window counts as elements.
        divisor: the number by which sums are divided; 0: the number of elements of each window.
    """

    if not TYPE_CHECKING:
        dilation: ClassVar[tuple[int, int]] = (1, 1)

    count_include_pad: bool = True
    divisor: Annotated[int, Field(ge=0, lt=2**31)] = 0


class AvgPool2dDescriptor(AvgProblem, PlannedBy["AvgPool2dPlan"]):
    """``out[n, c, p, q]``, the average of the elements of a window of ``x`` (torch.nn.functional.avg_pool2d)."""

    op: Literal["avg_pool2d"] = "avg_pool2d"

    def declare_operands(self) -> tuple[Operand, ...]:
        return self._pixels("x"), self._results("out", Role.OUTPUT)


class AvgPool2dBackwardDescriptor(AvgProblem, PlannedBy["AvgPool2dBackwardPlan"]):
    """``dx[n, c, h, w]``, the sum over the windows that contain the element of ``dout`` divided as in avg_pool2d."""

    op: Literal["avg_pool2d_backward"] = "avg_pool2d_backward"

    def declare_operands(self) -> tuple[Operand, ...]:
        return self._results("dout"), self._pixels("dx", Role.OUTPUT)


class AdaptiveProblem(PoolProblem):
    """Fields of average pooling with a given number of windows.

    Attributes:
        out_size: (height, width) of the result.
    """

    out_size: Pair

    @property
    def out_extents(self) -> tuple[int, int]:
        return self.out_size


class AdaptiveAvgPool2dDescriptor(AdaptiveProblem, PlannedBy["AdaptiveAvgPool2dPlan"]):
    """``out[n, c, p, q]``, the average over rows floor(p * height / P) to ceil((p + 1) * height / P) - 1 of ``x``,
    where P is the number of output rows, and over columns by the same rule (torch.nn.functional.adaptive_avg_pool2d).
    """

    op: Literal["adaptive_avg_pool2d"] = "adaptive_avg_pool2d"

    def declare_operands(self) -> tuple[Operand, ...]:
        return self._pixels("x"), self._results("out", Role.OUTPUT)


class AdaptiveAvgPool2dBackwardDescriptor(AdaptiveProblem, PlannedBy["AdaptiveAvgPool2dBackwardPlan"]):
    """``dx[n, c, h, w]``, the sum over the windows that contain the pixel of ``dout / (elements of the window)``."""

    op: Literal["adaptive_avg_pool2d_backward"] = "adaptive_avg_pool2d_backward"

    def declare_operands(self) -> tuple[Operand, ...]:
        return self._results("dout"), self._pixels("dx", Role.OUTPUT)
