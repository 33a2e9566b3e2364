"""rms_norm, layer_norm and l2_norm along the last axis, and their backward ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from triplan.descriptors.base import PlannedBy, RowwiseDescriptor
from triplan.descriptors.fields import Epsilon, RowsShape
from triplan.descriptors.operand import Operand, Role
from triplan.errors import shown
from triplan.sku import ElementKind, OptionalElement, field

if TYPE_CHECKING:
    from triplan.facade.norms import (
        L2NormBackwardPlan,
        L2NormPlan,
        LayerNormBackwardPlan,
        LayerNormPlan,
        RmsNormBackwardPlan,
        RmsNormPlan,
    )

__all__ = ["L2NormBackwardDescriptor", "L2NormDescriptor"]
__all__ += ["LayerNormBackwardDescriptor", "LayerNormDescriptor"]
__all__ += ["RmsNormBackwardDescriptor", "RmsNormDescriptor"]


class _Norm(RowwiseDescriptor):
    """Rows along the last axis. Each has statistics, in f32 (in f64 for f64).

    Attributes:
        input_shape: shape of ``x``; its last axis is that of a row.
        eps: what is added to the mean square or the variance; of l2_norm, the smallest norm that is divided by.
    """

    input_shape: RowsShape

    @property
    def _rows(self) -> tuple[int, ...]:
        return self.input_shape[:-1]

    def _whole(
        self, name: str, role: Role, present: bool = True, element: ElementKind | None = None
    ) -> tuple[Operand, ...]:
        batch = tuple(range(len(self._rows)))
        return (Operand(name, role, element or self.element, self.input_shape, batch_axes=batch),) if present else ()

    def _of_rows(self, name: str, role: Role) -> Operand:
        return Operand(name, role, self.element.compute, self._rows, batch_axes=tuple(range(len(self._rows))))

    def _shared(self, name: str, role: Role, present: bool) -> tuple[Operand, ...]:
        return (Operand(name, role, self.element, self.input_shape[-1:]),) if present else ()

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        wide = args.x if getattr(args, "residual", None) is None else args.residual
        fields: dict[str, Any] = {"element": wide.dtype, "input_shape": tuple(args.x.shape)}
        if "branch_element" in cls.model_fields:
            branch = (args.out if hasattr(args, "out") else args.dout).dtype
            fields["branch_element"] = None if branch == wide.dtype else branch
        tells = {"weight": ("weight",), "bias": ("bias", "dbias"), "residual": ("residual", "dsummed")}
        tells["branch_gradient"] = ("dbranch",)
        for told, names in tells.items():
            if told in cls.model_fields:
                fields[told] = any(getattr(args, name, None) is not None for name in names)
        return {**fields, **options}


class _ScaledNorm(_Norm):
    """Norms with an optional weight and residual; layer_norm also with an optional bias.

    Attributes:
        weight: whether there is an operand ``weight``, of a row's shape.
        weight_offset: 0 or 1, added to the weight, for checkpoints that store weight - 1.
        residual: whether x + residual is normalised: in f32 (f64 for f64), before it is rounded to ``element`` and
            written to ``summed``. The backward op then adds ``dsummed``, the gradient of ``summed``.
        bias: whether there is an operand ``bias`` (of the backward op, ``dbias``), of a row's shape.
        branch_element: f16 or bf16: the element of what a layer before reads and one behind writes (``out``, ``dout``,
            and with a residual ``x``), where it is another than that of the sum of all layers. None: ``element``.
    """

    weight: bool = True
    weight_offset: Literal[0, 1] = 0
    residual: bool = False
    branch_element: OptionalElement = field(default=None)

    def check_problem(self) -> None:
        if self.branch_element not in (None, ElementKind.F16, ElementKind.BF16):
            raise ValueError(f"branch_element = {shown(self.branch_element)}: must be f16, bf16 or None")
        if self.weight_offset and not self.weight:
            raise ValueError("weight_offset = 1: needs a weight to be added to, but weight = False")


class _ScaledNormBackward(_ScaledNorm):
    """Their backward ops.

    Attributes:
        branch_gradient: whether ``dx`` is also written to ``dbranch``, rounded to ``branch_element``: the gradient of
            the forward op's ``x`` where its residual is wider.
    """

    branch_gradient: bool = False

    def check_problem(self) -> None:
        super().check_problem()
        if self.branch_gradient and self.branch_element is None:
            raise ValueError("branch_gradient = True: needs a branch_element")


class RmsNormDescriptor(_ScaledNorm, PlannedBy["RmsNormPlan"]):
    """``out = x * rstd * weight`` with ``rstd = 1 / sqrt(mean(x**2) + eps)`` along the last axis (torch's rms_norm).

    ``rstd`` (one a row, in f32, or f64 for f64) is written for the backward op. The tolerance holds while
    ``mean(x**2) + eps`` is a normal number of that element and ``4 * sum(x**2)`` is finite in it. Otherwise rows become
    0 (large values) or, with an ``eps`` as small as their squares, infinite, as in torch.
    """

    op: Literal["rms_norm"] = "rms_norm"
    eps: Epsilon = 1e-5

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            *self._whole("x", Role.INPUT, element=self.branch_element if self.residual else None),
            *self._whole("out", Role.OUTPUT, element=self.branch_element),
            self._of_rows("rstd", Role.OUTPUT),
            *self._shared("weight", Role.INPUT, self.weight),
            *self._whole("residual", Role.INPUT, self.residual),
            *self._whole("summed", Role.OUTPUT, self.residual),
        )


class RmsNormBackwardDescriptor(_ScaledNormBackward, PlannedBy["RmsNormBackwardPlan"]):
    """``dx = rstd * (g - xhat * mean(g * xhat))`` with ``xhat = x * rstd`` and ``g = dout * weight``;
    ``dweight = sum(dout * xhat)`` over all rows.

    With a residual, ``x`` is the forward op's ``summed``, and ``dx`` the gradient of both x and residual.
    """

    op: Literal["rms_norm_backward"] = "rms_norm_backward"

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            *self._whole("dout", Role.INPUT, element=self.branch_element),
            *self._whole("x", Role.INPUT),
            self._of_rows("rstd", Role.INPUT),
            *self._whole("dx", Role.OUTPUT),
            *self._shared("weight", Role.INPUT, self.weight),
            *self._shared("dweight", Role.OUTPUT, self.weight),
            *self._whole("dsummed", Role.INPUT, self.residual),
            *self._whole("dbranch", Role.OUTPUT, self.branch_gradient, self.branch_element),
        )


class LayerNormDescriptor(_ScaledNorm, PlannedBy["LayerNormPlan"]):
    """``out = (x - mean) * rstd * weight + bias`` with ``rstd = 1 / sqrt(var + eps)`` along the last axis, ``var`` of
    centred values (torch's layer_norm).

    ``mean`` and ``rstd`` (one a row, in f32, or f64 for f64) are written for the backward op.

    The tolerance holds while ``var + eps`` is a normal number of that element, ``4 * sum((x - mean)**2)`` is finite in
    it, and ``abs(mean)`` is less than 2**18 standard deviations (with a residual, less than 100). Otherwise rows may
    become 0 (large values), infinite or NaN, as in torch.
    """

    op: Literal["layer_norm"] = "layer_norm"
    eps: Epsilon = 1e-5
    bias: bool = True

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            *self._whole("x", Role.INPUT, element=self.branch_element if self.residual else None),
            *self._whole("out", Role.OUTPUT, element=self.branch_element),
            self._of_rows("mean", Role.OUTPUT),
            self._of_rows("rstd", Role.OUTPUT),
            *self._shared("weight", Role.INPUT, self.weight),
            *self._shared("bias", Role.INPUT, self.bias),
            *self._whole("residual", Role.INPUT, self.residual),
            *self._whole("summed", Role.OUTPUT, self.residual),
        )


class LayerNormBackwardDescriptor(_ScaledNormBackward, PlannedBy["LayerNormBackwardPlan"]):
    """``dx = rstd * (g - mean(g) - xhat * mean(g * xhat))`` with ``xhat = (x - mean) * rstd``, ``g = dout * weight``;
    ``dweight = sum(dout * xhat)`` and ``dbias = sum(dout)`` over all rows.

    With a residual, ``x`` is the forward op's ``summed``, and ``dx`` the gradient of both x and residual.
    """

    op: Literal["layer_norm_backward"] = "layer_norm_backward"
    bias: bool = True

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            *self._whole("dout", Role.INPUT, element=self.branch_element),
            *self._whole("x", Role.INPUT),
            self._of_rows("mean", Role.INPUT),
            self._of_rows("rstd", Role.INPUT),
            *self._whole("dx", Role.OUTPUT),
            *self._shared("weight", Role.INPUT, self.weight),
            *self._shared("dweight", Role.OUTPUT, self.weight),
            *self._shared("dbias", Role.OUTPUT, self.bias),
            *self._whole("dsummed", Role.INPUT, self.residual),
            *self._whole("dbranch", Role.OUTPUT, self.branch_gradient, self.branch_element),
        )


class L2NormDescriptor(_Norm, PlannedBy["L2NormPlan"]):
    """``out = x / max(norm, eps)`` with ``norm = sqrt(sum(x**2))`` along the last axis (torch's normalize).

    ``norm`` (one a row, in f32, or f64 for f64) is written for the backward op. The tolerance holds while
    ``mean(x**2)``, or ``eps**2`` divided by the elements of a row, is a normal number of that element, and
    ``4 * sum(x**2)`` is finite in it. Otherwise rows become 0 (large values), infinite or NaN, as in torch.
    """

    op: Literal["l2_norm"] = "l2_norm"
    eps: Epsilon = 1e-12

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            *self._whole("x", Role.INPUT),
            *self._whole("out", Role.OUTPUT),
            self._of_rows("norm", Role.OUTPUT),
        )


class L2NormBackwardDescriptor(_Norm, PlannedBy["L2NormBackwardPlan"]):
    """``dx = (dout - xhat * sum(dout * xhat)) / norm`` with ``xhat = x / norm``; where ``norm < eps``, the forward op
    divided by the constant ``eps``, and so ``dx = dout / eps``.
    """

    op: Literal["l2_norm_backward"] = "l2_norm_backward"
    eps: Epsilon = 1e-12

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            *self._whole("dout", Role.INPUT),
            *self._whole("x", Role.INPUT),
            self._of_rows("norm", Role.INPUT),
            *self._whole("dx", Role.OUTPUT),
        )


#: A descriptor of an op that may have a weight and a residual.
ScaledNormDescriptor: TypeAlias = (
    RmsNormDescriptor | RmsNormBackwardDescriptor | LayerNormDescriptor | LayerNormBackwardDescriptor
)
#: A descriptor of any op of this family.
NormDescriptor: TypeAlias = ScaledNormDescriptor | L2NormDescriptor | L2NormBackwardDescriptor
