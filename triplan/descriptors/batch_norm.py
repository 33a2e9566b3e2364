"""Normalisation of images: by statistics of each channel or by running ones, or of each group of channels; backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from triplan.descriptors.base import Descriptor, PlannedBy
from triplan.descriptors.fields import DivisorField, Epsilon, Extent
from triplan.descriptors.operand import Operand, OperandKind, Role
from triplan.errors import shown
from triplan.sku import Element, OpCategory, OptionalElement, field

if TYPE_CHECKING:
    from triplan.facade.batch_norm import (
        BatchNormBackwardPlan,
        BatchNormPlan,
        GroupNormBackwardPlan,
        GroupNormPlan,
    )

__all__ = [
    "BatchNormBackwardDescriptor",
    "BatchNormDescriptor",
    "GroupNormBackwardDescriptor",
    "GroupNormDescriptor",
]


class ImagesProblem(Descriptor):
    """Images of shape (batch, channels, pixels), with a weight and a bias. Statistics are in f32 (in f64 for f64).

    Attributes:
        element: element of the images.
        batch: number of images.
        channels: channels of an image.
        pixels: elements of a channel of one image.
        weight: whether there is an operand ``weight``, one number a channel.
        bias: whether there is an operand ``bias`` (of the backward op, ``dbias``).
        parameter_element: element of weight, bias and running statistics: the images' or that of the statistics; None:
            the images'.
    """

    category: ClassVar[OpCategory] = OpCategory.NORMALIZATION

    element: Element
    batch: Extent
    channels: Extent
    pixels: Extent
    weight: bool = True
    bias: bool = True
    parameter_element: OptionalElement = field(default=None)

    def check_problem(self) -> None:
        if self.batch * self.pixels == 0:
            raise ValueError(f"batch = {self.batch}, pixels = {self.pixels}: must be positive")
        if self.parameter_element not in (None, self.element, self.element.compute):
            raise ValueError(
                f"parameter_element = {shown(self.parameter_element)}: must be {self.element} or {self.element.compute}"
            )

    @property
    def _apart(self) -> tuple[int, ...]:
        """The axes of images that are a batch."""
        return ()

    def _images(self, name: str, role: Role = Role.INPUT) -> Operand:
        shape = (self.batch, self.channels, self.pixels)
        return Operand(name, role, self.element, shape, batch_axes=self._apart)

    def _parameter(
        self, name: str, present: bool, role: Role = Role.INPUT, over: tuple[str, ...] = ()
    ) -> list[Operand]:
        element = self.parameter_element or self.element
        return [Operand(name, role, element, (self.channels,), over=over)] if present else []

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        names = ("batch", "channels", "pixels")
        found = {"element": args.x.dtype, **dict(zip(names, args.x.shape, strict=True))}
        tells = {"weight": "weight", "bias": "bias" if "eps" in cls.model_fields else "dbias"}
        if "relu" in cls.model_fields:
            back = "eps" not in cls.model_fields
            tells |= {"relu": "out", "residual": "dresidual"} if back else {"residual": "residual"}
        tells |= {"running": "running_mean"} if "running" in cls.model_fields else {}
        given = {f: getattr(args, name, None) for f, name in tells.items()}
        found |= {f: t is not None for f, t in given.items()}
        element = next((t.dtype for t in given.values() if t is not None and len(t.shape) == 1), None)
        groups = {"groups": args.mean.shape[1]} if "groups" in cls.model_fields else {}
        return {**found, **groups, "parameter_element": element, **options}


class BatchNormProblem(ImagesProblem):
    """Normalisation of each channel.

    Images with channels last in memory are a batch of all their pixels, of one pixel each: packed then.

    Attributes:
        training: whether channels are normalised by their own statistics, rather than by running ones.
        relu: whether negative results become 0.
        residual: whether ``residual`` is added before that, images too.
    """

    training: bool = True
    relu: bool = False
    residual: bool = False

    def check_problem(self) -> None:
        super().check_problem()
        if self.residual and not self.relu:
            raise ValueError("residual = True: needs relu = True")

    @property
    def count(self) -> int:
        """Elements of a channel."""
        return self.batch * self.pixels

    @property
    def sums(self) -> bool:
        """Whether elements of a channel are summed; otherwise each depends on the channel's numbers alone."""
        return self.training

    @property
    def _apart(self) -> tuple[int, ...]:
        return () if self.training else (0, 1, 2)

    def _statistic(self, name: str, role: Role = Role.INPUT) -> Operand:
        return Operand(name, role, self.element.compute, (self.channels,))


class BatchNormDescriptor(BatchNormProblem, PlannedBy["BatchNormPlan"]):
    """``out = (x - mean) * rstd * weight + bias`` with ``rstd = 1 / sqrt(var + eps)`` of each channel
    (torch.nn.functional.batch_norm; Ioffe and Szegedy, 2015); with ``relu``, that or ``residual`` more, at least 0.

    In training ``mean`` and ``var`` are those of all elements of a channel. With running statistics, of which ``var``
    is divided by one less than the elements, ``next = (1 - momentum) * running + momentum * statistic``; ``next_mean``
    and ``next_var`` may be the memory of ``running_mean`` and ``running_var``. ``momentum`` is an Arg; None means 0.1.
    Otherwise ``mean`` and ``var`` are the running ones. ``mean`` and ``rstd`` are written for the backward op.

    The tolerance holds while ``var + eps`` is a normal number of the statistics' element and the sum of squares of a
    channel is finite in it. It grows with the absolute values of a channel in standard deviations.

    Attributes:
        running: whether there are running statistics; they must be there if not in training.
        eps: what is added to the variance.
    """

    op: Literal["batch_norm"] = "batch_norm"
    running: bool = True
    eps: Epsilon = 1e-5

    def check_problem(self) -> None:
        super().check_problem()
        if not (self.training or self.running):
            raise ValueError("training = False: needs running = True")

    def declare_operands(self) -> tuple[Operand, ...]:
        updates = self.training and self.running
        momentum = Operand("momentum", Role.INPUT, self.element.compute, kind=OperandKind.HOST_SCALAR, optional=True)
        return (
            self._images("x"),
            self._images("out", Role.OUTPUT),
            self._statistic("mean", Role.OUTPUT),
            self._statistic("rstd", Role.OUTPUT),
            *self._parameter("weight", self.weight),
            *self._parameter("bias", self.bias),
            *self._parameter("running_mean", self.running),
            *self._parameter("running_var", self.running),
            *self._parameter("next_mean", updates, Role.OUTPUT, ("running_mean",)),
            *self._parameter("next_var", updates, Role.OUTPUT, ("running_var",)),
            *([momentum] if updates else []),
            *([self._images("residual")] if self.residual else []),
        )


class BatchNormBackwardDescriptor(BatchNormProblem, PlannedBy["BatchNormBackwardPlan"]):
    """``dx = rstd * weight * (dout - mean(dout) - xhat * mean(dout * xhat))`` with ``xhat = (x - mean) * rstd``, means
    over all elements of a channel; ``dweight = sum(dout * xhat)`` and ``dbias = sum(dout)``.

    If not in training, the statistics are constants: ``dx = rstd * weight * dout``. With ``relu``, which needs
    training, ``dout`` is 0 in all of this where the forward op's ``out`` is; with ``residual`` that is ``dresidual``.
    """

    op: Literal["batch_norm_backward"] = "batch_norm_backward"

    def check_problem(self) -> None:
        super().check_problem()
        if self.relu and not self.training:
            raise ValueError("relu = True: needs training = True")

    @property
    def sums(self) -> bool:
        return self.training or self.weight or self.bias

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            self._images("dout"),
            self._images("x"),
            self._statistic("mean"),
            self._statistic("rstd"),
            self._images("dx", Role.OUTPUT),
            *self._parameter("weight", self.weight),
            *self._parameter("dweight", self.weight, Role.OUTPUT),
            *self._parameter("dbias", self.bias, Role.OUTPUT),
            *([self._images("out")] if self.relu else []),
            *([self._images("dresidual", Role.OUTPUT)] if self.residual else []),
        )


class GroupNormProblem(ImagesProblem):
    """Normalisation of each group of adjacent channels of each image.

    Attributes:
        groups: number of groups of channels; divides them.
    """

    groups: Annotated[int, Field(ge=1, lt=2**31), DivisorField(("channels",))] = 1

    @property
    def count(self) -> int:
        """Elements of a group."""
        return self.channels // self.groups * self.pixels

    def check_problem(self) -> None:
        super().check_problem()
        if self.channels % self.groups:
            raise ValueError(f"groups = {self.groups}: must divide channels = {self.channels}")

    @property
    def _apart(self) -> tuple[int, ...]:
        return (0,)

    def _statistic(self, name: str, role: Role = Role.INPUT) -> Operand:
        return Operand(name, role, self.element.compute, (self.batch, self.groups), batch_axes=(0, 1))


class GroupNormDescriptor(GroupNormProblem, PlannedBy["GroupNormPlan"]):
    """``out = (x - mean) * rstd * weight + bias`` with ``rstd = 1 / sqrt(var + eps)`` of each group of channels of each
    image, and weight and bias of each channel (torch.nn.functional.group_norm; Wu and He, 2018).

    ``mean`` and ``rstd`` (batch, groups) are written for the backward op. The tolerance is as of batch_norm.

    Attributes:
        eps: what is added to the variance.
    """

    op: Literal["group_norm"] = "group_norm"
    eps: Epsilon = 1e-5

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            self._images("x"),
            self._images("out", Role.OUTPUT),
            self._statistic("mean", Role.OUTPUT),
            self._statistic("rstd", Role.OUTPUT),
            *self._parameter("weight", self.weight),
            *self._parameter("bias", self.bias),
        )


class GroupNormBackwardDescriptor(GroupNormProblem, PlannedBy["GroupNormBackwardPlan"]):
    """``dx = rstd * (g - mean(g) - xhat * mean(g * xhat))`` with ``xhat = (x - mean) * rstd``, ``g = dout * weight``,
    means over each group; ``dweight = sum(dout * xhat)`` and ``dbias = sum(dout)`` of each channel.
    """

    op: Literal["group_norm_backward"] = "group_norm_backward"

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            self._images("dout"),
            self._images("x"),
            self._statistic("mean"),
            self._statistic("rstd"),
            self._images("dx", Role.OUTPUT),
            *self._parameter("weight", self.weight),
            *self._parameter("dweight", self.weight, Role.OUTPUT),
            *self._parameter("dbias", self.bias, Role.OUTPUT),
        )
