"""Pooling and resizing of images: the maximum or the average of windows, pixels between pixels, and the gradients."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

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
        UpsampleBilinear2dBackwardPlan,
        UpsampleBilinear2dPlan,
        UpsampleNearest2dBackwardPlan,
        UpsampleNearest2dPlan,
    )
    from triplan.sku.model import Converted

__all__ = [
    "AdaptiveAvgPool2dBackwardDescriptor",
    "AdaptiveAvgPool2dDescriptor",
    "AvgPool2dBackwardDescriptor",
    "AvgPool2dDescriptor",
    "MaxPool2dBackwardDescriptor",
    "MaxPool2dDescriptor",
    "UpsampleBilinear2dBackwardDescriptor",
    "UpsampleBilinear2dDescriptor",
    "UpsampleNearest2dBackwardDescriptor",
    "UpsampleNearest2dDescriptor",
]

if TYPE_CHECKING:
    Pair = Converted[tuple[int, int], Sequence[int]]
    Padding = Converted[tuple[int, int], Sequence[int]]
    Scale = Converted[tuple[float, float], Sequence[float]]
else:
    Pair = Annotated[tuple[(Annotated[int, Field(ge=1, lt=2**31)],) * 2], BeforeValidator(to_tuple)]
    Padding = Annotated[tuple[(Annotated[int, Field(ge=0, lt=2**31)],) * 2], BeforeValidator(to_tuple)]
    # -0.0 is stored as 0.0: equal values have equal keys.
    Factor = Annotated[float, Field(ge=0, le=2**31, allow_inf_nan=False), AfterValidator(lambda f: f + 0.0)]
    Scale = Annotated[tuple[(Factor,) * 2], BeforeValidator(to_tuple)]


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

    ``indices`` are those of max_pool2d: each names an element of its own window, or is -1 and ignored. Whether another
    index is ignored, or its ``dout`` added to the element that it names, is not defined.
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


# --- resizing ---


def _f32(value: float) -> float:
    """``value`` rounded to f32."""
    found: float = struct.unpack("f", struct.pack("f", value))[0]
    return found


class ResizeProblem(PoolProblem):
    """Fields of resizing. Position ``p`` of the result lies at ``source(p)`` along an axis of ``x``.

    ``source(p)`` is ``p * step``, or ``(p + 0.5) * step`` where pixels have their centers at 0.5. ``step`` is
    1 / scale, or the quotient of the extents of ``x`` and of the result if scale is 0. Each of these operations is
    rounded to ``position``. An axis along which ``x`` and the result have equal extents is copied, whatever the scale.

    Attributes:
        out_size: (height, width) of the result.
        scale: rows and columns of the result for one of ``x``; 0: as the extents say.
    """

    out_size: Pair
    scale: Scale = field(default=(0.0, 0.0))

    def check_problem(self) -> None:
        super().check_problem()
        if any(0 < f < 2**-31 for f in self.scale):
            raise ValueError(f"scale = {self.scale}: must be 0, or between 2**-31 and 2**31")

    @property
    def out_extents(self) -> tuple[int, int]:
        return self.out_size

    @property
    def position(self) -> ElementKind:
        """The element in which positions are computed."""
        return ElementKind.F32

    @property
    def resized(self) -> tuple[bool, bool]:
        """Whether rows, and columns, are not just copied."""
        return self.height != self.out_size[0], self.width != self.out_size[1]

    @property
    def steps(self) -> tuple[float, float]:
        """Rows and columns of ``x`` from one of the result to the next, rounded to ``position``."""
        axes = zip((self.height, self.width), self.out_size, self.scale, strict=True)
        exact = (1.0 if n == m else self._step(n, m, scale) for n, m, scale in axes)
        rows, columns = (_f32(step) if self.position is ElementKind.F32 else step for step in exact)
        return rows, columns

    def _step(self, n: int, m: int, scale: float) -> float:
        """What ``steps`` rounds, for extents of ``x`` and of the result."""
        return 1 / scale if scale else n / m


class NearestProblem(ResizeProblem):
    """Fields of resizing by copies of pixels.

    Attributes:
        exact: whether pixels have their centers at 0.5, so that the nearest pixel is taken; if not, the one at or
            before ``p * step``.
    """

    exact: bool = False


class UpsampleNearest2dDescriptor(NearestProblem, PlannedBy["UpsampleNearest2dPlan"]):
    """``out[n, c, p, q] = x[n, c, floor(source(p)), floor(source(q))]``, the last pixel at most
    (torch.nn.functional.interpolate, modes nearest and nearest-exact)."""

    op: Literal["upsample_nearest2d"] = "upsample_nearest2d"

    def declare_operands(self) -> tuple[Operand, ...]:
        return self._pixels("x"), self._results("out", Role.OUTPUT)


class UpsampleNearest2dBackwardDescriptor(NearestProblem, PlannedBy["UpsampleNearest2dBackwardPlan"]):
    """``dx[n, c, h, w]``, the sum of ``dout`` over the pixels of upsample_nearest2d that are copies of this one."""

    op: Literal["upsample_nearest2d_backward"] = "upsample_nearest2d_backward"

    def declare_operands(self) -> tuple[Operand, ...]:
        return self._results("dout"), self._pixels("dx", Role.OUTPUT)


class BilinearProblem(ResizeProblem):
    """Fields of linear interpolation between pixels.

    With ``s = max(source(p) - 0.5, 0)``, or ``s = source(p)`` with ``align_corners``, a result lies between pixels
    ``i = floor(s)`` and ``i + 1``, with weights ``1 - (s - i)`` and ``s - i``; from the last pixel on, that one alone
    has weight 1.

    Attributes:
        align_corners: whether the first pixels of ``x`` and of the result have the same centers, and the last ones:
            ``step`` is then the quotient of the extents less 1, and scale is ignored.
    """

    align_corners: bool = False

    @property
    def position(self) -> ElementKind:
        return self.element.compute

    def _step(self, n: int, m: int, scale: float) -> float:
        if self.align_corners:
            return (n - 1) / (m - 1) if m > 1 else 0.0
        return super()._step(n, m, scale)


class UpsampleBilinear2dDescriptor(BilinearProblem, PlannedBy["UpsampleBilinear2dPlan"]):
    """``out[n, c, p, q]``, the sum of four pixels of ``x``, between whose centers it lies, by the weights of their rows
    and columns; of two, if one axis is copied (torch.nn.functional.interpolate, modes bilinear and linear)."""

    op: Literal["upsample_bilinear2d"] = "upsample_bilinear2d"

    def declare_operands(self) -> tuple[Operand, ...]:
        return self._pixels("x"), self._results("out", Role.OUTPUT)


class UpsampleBilinear2dBackwardDescriptor(BilinearProblem, PlannedBy["UpsampleBilinear2dBackwardPlan"]):
    """``dx[n, c, h, w]``, the sum of ``dout`` by the weights that the pixel has in upsample_bilinear2d."""

    op: Literal["upsample_bilinear2d_backward"] = "upsample_bilinear2d_backward"

    def declare_operands(self) -> tuple[Operand, ...]:
        return self._results("dout"), self._pixels("dx", Role.OUTPUT)
