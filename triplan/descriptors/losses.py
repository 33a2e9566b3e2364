"""Losses over classes: cross-entropy of logits, negative log-likelihood of log-probabilities; backward ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from triplan.descriptors.base import PlannedBy, RowsDescriptor, check_bad_index
from triplan.descriptors.fields import AxisField, OutOfBounds, RowsShape, Shape
from triplan.descriptors.operand import Operand, Role
from triplan.sku import Element, ElementKind, IndexElement, IndexElementKind, OpCategory, field

if TYPE_CHECKING:
    from triplan.facade.losses import (
        CrossEntropyBackwardPlan,
        CrossEntropyPlan,
        NllLossBackwardPlan,
        NllLossPlan,
        ScaleGradientPlan,
    )

__all__ = ["CrossEntropyBackwardDescriptor", "CrossEntropyDescriptor"]
__all__ += ["NllLossBackwardDescriptor", "NllLossDescriptor"]
__all__ += ["LossDescriptor", "ScaleGradientDescriptor"]

#: How the losses of the kept rows are reduced.
Reduction = Literal["mean", "sum", "none", "byte_mean"]


class LossDescriptor(RowsDescriptor):
    """Fields that all losses over classes share. A row is *kept* unless ``ignore_index`` or ``out_of_bounds``
    ignores it.

    Attributes:
        input_shape: shape of the logits or log-probabilities.
        class_axis: the axis of the classes; the others number the rows, row-major.
        element: element of ``x``; f16 and bf16 are computed in f32.
        index_element: element of ``target``, i32 or i64.
        reduction: ``mean``: sum(loss) / sum(weight[target]); ``byte_mean``: sum(loss * bytes[target]) /
            sum(bytes[target]); ``none``: not at all. Where no row is kept, a mean is NaN and a sum 0, as in torch.
        weight: whether there is an operand ``weight``, one non-negative value a class; without it, all are 1.
        ignore_index: rows with this target are not read; their losses and gradients are 0.
        out_of_bounds: what happens to a row whose target is no class, unless it is ``ignore_index``: ``skip`` ignores
            the row, ``clamp`` takes the nearest class, ``error`` ignores it and records the lowest such row in
            ``status``.
    """

    category: ClassVar[OpCategory] = OpCategory.ROWWISE

    input_shape: RowsShape
    class_axis: Annotated[int, AxisField("input_shape")] = 1
    element: Element
    index_element: IndexElement = field(default=IndexElementKind.I64)
    reduction: Reduction = "mean"
    weight: bool = False
    ignore_index: Annotated[int, Field(ge=-(2**63), lt=2**63)] = -100
    out_of_bounds: OutOfBounds = "skip"

    @property
    def classes(self) -> int:
        return self.input_shape[self.class_axis]

    @property
    def reduced(self) -> bool:
        return self.reduction != "none"

    def _whole(self, name: str, role: Role) -> Operand:
        batch = tuple(a for a in range(len(self.input_shape)) if a != self.class_axis)
        return Operand(name, role, self.element, self.input_shape, batch_axes=batch)

    def _of_rows(self, name: str, role: Role, element: ElementKind, extents: tuple[int, ...] = ()) -> Operand:
        shape = tuple(n for a, n in enumerate(self.input_shape) if a != self.class_axis)
        return Operand(name, role, element, shape, batch_axes=tuple(range(len(shape))), index_extents=extents)

    def _target(self) -> Operand:
        return self._of_rows("target", Role.INPUT, ElementKind(self.index_element.value), (self.classes,))

    def _loss(self, name: str, role: Role) -> tuple[Operand, ...]:
        return (Operand(name, role, self.element, (1,)),) if self.reduced else ()

    def _dloss(self) -> Operand:
        if self.reduced:
            return self._loss("dloss", Role.INPUT)[0]
        return self._of_rows("dloss", Role.INPUT, self.element.compute)

    def _last(self) -> tuple[Operand, ...]:
        """The last operands of every loss: tables of the classes, and the status."""
        compute = self.element.compute
        weight = (Operand("weight", Role.INPUT, compute, (self.classes,)),) if self.weight else ()
        counts = (Operand("bytes", Role.INPUT, compute, (self.classes,)),) if self.reduction == "byte_mean" else ()
        status = (Operand("status", Role.OUTPUT, ElementKind.I64, (1,)),) if self.out_of_bounds == "error" else ()
        return (*weight, *counts, *status)

    def check_status(self, args: Any) -> None:
        check_bad_index(self, self.out_of_bounds, args)

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        found = {"element": args.x.dtype, "input_shape": tuple(args.x.shape)}
        return {
            **found,
            "index_element": args.target.dtype,
            "weight": getattr(args, "weight", None) is not None,
            **options,
        }


class _CrossEntropy(LossDescriptor):
    """cross_entropy and its backward op.

    Attributes:
        label_smoothing: s, the part of each target that is spread evenly over the classes.
    """

    label_smoothing: Annotated[float, Field(ge=0, le=1), AfterValidator(lambda share: share + 0.0)] = 0.0


class CrossEntropyDescriptor(_CrossEntropy, PlannedBy["CrossEntropyPlan"]):
    """For each row of logits ``x`` with target t: ``losses = (1 - s) * weight[t] * (lse - x[t]) +
    s / C * sum(weight * (lse - x))``, with ``lse = log(sum(exp(x)))``, C classes and s = ``label_smoothing``
    (torch.nn.functional.cross_entropy with class indices); ``loss`` is their reduction.

    Operands: ``x``; ``target``, ``losses`` and ``lse`` (the last two in f32, or f64 for f64), one a row; ``loss`` (one
    element, unless the reduction is none); ``dx``; ``weight`` and ``bytes`` (one a class, in f32 or f64). ``lse`` of a
    row that is not kept is -inf, as of an empty sum; infinities and NaN in ``x`` give what torch gives.

    With ``gradient``, the gradient of ``loss`` with respect to ``x`` is written to ``dx``, or with ``in_place`` over
    ``x`` itself. The forward op then reads the logits once or twice, and backward only scales (scale_gradient). That
    gradient is rounded before it is scaled: in f16, a mean over many rows loses gradients below 6e-8 before a loss
    scale can save them. cross_entropy_backward multiplies by the loss scale first.

    Attributes:
        gradient: whether the gradient of ``loss`` is written too.
        in_place: whether it is written over ``x``.
    """

    op: Literal["cross_entropy"] = "cross_entropy"
    gradient: bool = False
    in_place: bool = False

    def check_problem(self) -> None:
        if self.gradient and not self.reduced:
            raise ValueError("gradient = True: reduction = 'none' has no single loss; use cross_entropy_backward")
        if self.in_place and not self.gradient:
            raise ValueError("in_place = True: only a gradient is written over x, but gradient = False")

    def declare_operands(self) -> tuple[Operand, ...]:
        separate = self.gradient and not self.in_place
        return (
            self._whole("x", Role.IN_OUT if self.in_place else Role.INPUT),
            self._target(),
            self._of_rows("losses", Role.OUTPUT, self.element.compute),
            self._of_rows("lse", Role.OUTPUT, self.element.compute),
            *self._loss("loss", Role.OUTPUT),
            *((self._whole("dx", Role.OUTPUT),) if separate else ()),
            *self._last(),
        )


class CrossEntropyBackwardDescriptor(_CrossEntropy, PlannedBy["CrossEntropyBackwardPlan"]):
    """The gradient ``dx`` of cross_entropy from ``x``, ``target`` and ``lse``, times ``dloss``.

    ``dloss`` has one element; with reduction ``none`` one a row (f32, or f64 for f64). ``softmax(x)`` is recomputed as
    ``exp(x - lse)``.
    """

    op: Literal["cross_entropy_backward"] = "cross_entropy_backward"

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            self._dloss(),
            self._whole("x", Role.INPUT),
            self._target(),
            self._of_rows("lse", Role.INPUT, self.element.compute),
            self._whole("dx", Role.OUTPUT),
            *self._last(),
        )


class NllLossDescriptor(LossDescriptor, PlannedBy["NllLossPlan"]):
    """``losses = -weight[t] * x[t]`` for each row of log-probabilities ``x`` with target t
    (torch.nn.functional.nll_loss); ``loss`` is their reduction. Operands as those of cross_entropy.
    """

    op: Literal["nll_loss"] = "nll_loss"

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            self._whole("x", Role.INPUT),
            self._target(),
            self._of_rows("losses", Role.OUTPUT, self.element.compute),
            *self._loss("loss", Role.OUTPUT),
            *self._last(),
        )


class NllLossBackwardDescriptor(LossDescriptor, PlannedBy["NllLossBackwardPlan"]):
    """The gradient ``dx`` of nll_loss times ``dloss`` (see cross_entropy_backward): zero except at the targets."""

    op: Literal["nll_loss_backward"] = "nll_loss_backward"

    def declare_operands(self) -> tuple[Operand, ...]:
        return (self._dloss(), self._target(), self._whole("dx", Role.OUTPUT), *self._last())

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        found = {"element": args.dx.dtype, "input_shape": tuple(args.dx.shape)}
        return {
            **found,
            "index_element": args.target.dtype,
            "weight": getattr(args, "weight", None) is not None,
            **options,
        }


class ScaleGradientDescriptor(RowsDescriptor, PlannedBy["ScaleGradientPlan"]):
    """``dx = dloss * unscaled``: the backward op of a loss whose forward op wrote the gradient.

    ``dloss`` has one element, which is read on the device. With ``in_place``, ``dx`` itself is scaled; where ``dloss``
    is 1, it is neither read nor written.

    Attributes:
        input_shape: shape of the gradient.
        element: element of the gradient and of ``dloss``.
        in_place: whether ``dx`` itself is scaled.
    """

    category: ClassVar[OpCategory] = OpCategory.ROWWISE

    op: Literal["scale_gradient"] = "scale_gradient"
    input_shape: Shape
    element: Element
    in_place: bool = False

    def declare_operands(self) -> tuple[Operand, ...]:
        axes = tuple(range(len(self.input_shape)))
        whole = Operand("dx", Role.IN_OUT if self.in_place else Role.OUTPUT, self.element, self.input_shape)
        unscaled = Operand("unscaled", Role.INPUT, self.element, self.input_shape, batch_axes=axes)
        return (Operand("dloss", Role.INPUT, self.element, (1,)), whole, *(() if self.in_place else (unscaled,)))

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return {"element": args.dx.dtype, "input_shape": tuple(args.dx.shape), **options}
