"""Matrix products, ``c = act(alpha * a @ b + beta * c0 + bias)``, and their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from triplan.descriptors.base import Descriptor, PlannedBy
from triplan.descriptors.fields import Extent
from triplan.descriptors.operand import Operand, OperandKind, Role
from triplan.sku import Element, ElementKind, MathPrecision, OpCategory, OptionalElement, OptionalMath, field

if TYPE_CHECKING:
    from triplan.facade.gemm import BatchedGemmPlan, GemmBackwardPlan, GemmPlan

__all__ = ["BatchedGemmDescriptor"]
__all__ += ["GemmBackwardDescriptor", "GemmDescriptor"]
__all__ += ["MatrixProductDescriptor", "MultiplyingDescriptor"]

#: What is applied to the product in the accumulator, before the one rounding. ``gelu`` is the exact one, by erf.
Epilogue = Literal["identity", "relu", "gelu", "silu", "bias", "bias_relu", "bias_gelu", "bias_silu"]


class MultiplyingDescriptor(Descriptor):
    """Fields that matrix products and their backward ops share.

    Attributes:
        m, n, k: extents of ``c = a @ b``: (m, n) = (m, k) @ (k, n).
        element: element of the factors. i8 is computed in i32, modulo 2**32.
        out_element: element of the results; f16 and bf16 may be written as f32. By default ``element``, or i32 for i8.
        math: precision of the multiplicands of an f32 product: tf32, or the more precise tf32x3. In tolerances
            multiplicands below 2**-126 (tf32) or 2**-116 (tf32x3) count as that large, and an infinity times a value
            below 2**-136 may be NaN. By default ``element``'s own precision.
        accumulator: element of the accumulator; only the default is supported: f64 for f64, i32 for i8, else f32.
    """

    category: ClassVar[OpCategory] = OpCategory.GEMM

    m: Extent
    n: Extent
    k: Extent
    element: Element
    out_element: OptionalElement = field(default=None)
    math: OptionalMath = field(default=None)
    accumulator: OptionalElement = field(default=None)

    @model_validator(mode="before")
    @classmethod
    def _spelled_defaults(cls, data: Any) -> Any:
        """Turn defaults that are spelled out into None: equal problems have equal keys."""
        if not isinstance(data, dict) or data.get("element") is None:
            return data
        try:
            element = ElementKind.of(data["element"])
        except ValueError:
            return data  # the field's own validator raises the better error
        integer = element is ElementKind.I8
        sums = ElementKind.I32 if integer else element.compute
        math: Any = MathPrecision.EXACT if integer else element
        defaults = {"out_element": sums if integer else element, "math": math, "accumulator": sums}
        spelled = {
            name: None
            for name, default in defaults.items()
            if data.get(name) in (default.value, getattr(default, "torch", None)) or data.get(name) is default
        }
        return {**data, **spelled}

    def check_problem(self) -> None:
        if self.element is ElementKind.I8:
            self._check_integers()
        if not self.element.is_floating_point:
            return  # kernels refuse every integer but i8
        narrow = self.element.itemsize == 2
        if self.out_element not in (None, self.element, *((ElementKind.F32,) if narrow else ())):
            raise ValueError(
                f"out_element = {self.out_element}: must be {self.element}" + (" or f32" if narrow else "")
            )
        f32 = self.element is ElementKind.F32
        if self.math not in (None, *((MathPrecision.TF32X3, MathPrecision.TF32) if f32 else ())):
            raise ValueError(f"math = {self.math}: must be {self.element}" + (", tf32x3 or tf32" if f32 else ""))
        if self.accumulator not in (None, self.element.compute):
            raise ValueError(f"accumulator = {self.accumulator}: must be {self.element.compute} for {self.element}")

    def _check_integers(self) -> None:
        for name, only in (("out_element", ElementKind.I32), ("math", "exact"), ("accumulator", ElementKind.I32)):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} = {getattr(self, name)}: must be {only} for i8")

    @property
    def out(self) -> ElementKind:
        """The element of the results."""
        return self.out_element or (self.sums if self.element is ElementKind.I8 else self.element)

    @property
    def sums(self) -> ElementKind:
        """The accumulator's element, in which alpha and beta are applied too."""
        return ElementKind.I32 if self.element is ElementKind.I8 else self.element.compute

    @property
    def multiplicands(self) -> MathPrecision:
        """The precision that the factors are rounded to before they are multiplied."""
        if not self.element.is_floating_point:
            return MathPrecision.EXACT
        return self.math or MathPrecision(self.element.value)


class MatrixProductDescriptor(MultiplyingDescriptor):
    """Fields that all matrix products share: ``c = act(alpha * a @ b + beta * c0 + bias)``.

    Operands: ``a`` (m, k), ``b`` (k, n), ``c`` (m, n); ``c0`` (m, n) with ``reads_c0``; ``bias`` (n,) where the
    epilogue adds one; ``pre`` (m, n) with ``saves_pre``. ``alpha`` and ``beta`` are Args; None means 1. With beta = 0,
    ``c0`` is not read. ``c`` may be ``c0`` itself, which the product is then added to.

    A transposed matrix is a matrix of another layout, never a copy: ``Layout.strided(unit_axis=0)`` is column-major
    with any leading dimension, ``unit_axis=1`` row-major. ``stride_multiple`` promises a divisor of the leading
    dimension, ``alignment`` one of the address.

    Attributes:
        m, n, k, element, out_element, math, accumulator: see ``MultiplyingDescriptor``. ``a`` and ``b`` have
            ``element``; ``c``, ``c0``, ``bias`` and ``pre`` have ``out_element``. With k = 0 the product is zero.
        epilogue: bias and activation, applied in the accumulator, before the one rounding.
        reads_c0: whether there is a ``c0``.
        saves_pre: whether the argument of the activation is written to ``pre``, for the backward pass.
        symmetric: the caller promises that ``c`` is symmetric, as of ``a @ a.T``: an element above the diagonal may be
            a copy of the one below it.
    """

    epilogue: Epilogue = "identity"
    reads_c0: bool = False
    saves_pre: bool = False
    symmetric: bool = False

    def check_problem(self) -> None:
        super().check_problem()
        if self.symmetric and (self.m != self.n or self.has_bias):
            raise ValueError(f"symmetric = True: needs m = n and no bias, not {self.m}, {self.n} and {self.epilogue}")
        if self.element is ElementKind.I8 and self.activation not in ("identity", "relu"):
            raise ValueError(f"epilogue = {self.epilogue}: integers have no {self.activation}")

    @property
    def written(self) -> tuple[str, ...]:
        """The names of the outputs."""
        return ("c", "pre") if self.saves_pre else ("c",)

    @property
    def has_bias(self) -> bool:
        return self.epilogue.startswith("bias")

    @property
    def activation(self) -> str:
        """The epilogue without its bias: ``identity``, ``relu``, ``gelu`` or ``silu``."""
        return self.epilogue.removeprefix("bias").removeprefix("_") or "identity"

    @property
    def lead(self) -> tuple[int, ...]:
        """The batch extents, which stand before those of each matrix; empty without a batch."""
        return ()

    def declare_operands(self) -> tuple[Operand, ...]:
        compute, lead = self.sums, self.lead
        rows = tuple(range(len(lead) + (not self.symmetric)))
        c0 = Operand("c0", Role.INPUT, self.out, (*lead, self.m, self.n), batch_axes=rows)
        pre = Operand("pre", Role.OUTPUT, self.out, (*lead, self.m, self.n), batch_axes=rows)
        return (
            Operand("a", Role.INPUT, self.element, (*lead, self.m, self.k), batch_axes=rows),
            Operand("b", Role.INPUT, self.element, (*lead, self.k, self.n), batch_axes=tuple(range(len(lead)))),
            Operand("c", Role.OUTPUT, self.out, (*lead, self.m, self.n), batch_axes=rows, over=("c0",)),
            *((c0,) if self.reads_c0 else ()),
            *((Operand("bias", Role.INPUT, self.out, (self.n,)),) if self.has_bias else ()),
            Operand("alpha", Role.INPUT, compute, kind=OperandKind.HOST_SCALAR, optional=True),
            *(
                (Operand("beta", Role.INPUT, compute, kind=OperandKind.HOST_SCALAR, optional=True),)
                if self.reads_c0
                else ()
            ),
            *((pre,) if self.saves_pre else ()),
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        (*lead, m, k), n = args.a.shape, args.b.shape[-1]
        same = args.c.dtype == args.a.dtype
        return {
            **({"batch": lead[0]} if lead else {}),
            "m": m,
            "n": n,
            "k": k,
            "element": args.a.dtype,
            "out_element": None if same else args.c.dtype,
            "reads_c0": getattr(args, "c0", None) is not None,
            "saves_pre": getattr(args, "pre", None) is not None,
            **options,
        }


class GemmDescriptor(MatrixProductDescriptor, PlannedBy["GemmPlan"]):
    """``c = act(alpha * a @ b + beta * c0 + bias)`` (BLAS's gemm, with an epilogue).

    Operands: ``a`` (m, k), ``b`` (k, n), ``c`` (m, n); ``c0`` (m, n) with ``reads_c0``; ``bias`` (n,) where the
    epilogue adds one; ``pre`` (m, n) with ``saves_pre``. ``alpha`` and ``beta`` are Args; None means 1.
    """

    op: Literal["gemm"] = "gemm"


class BatchedGemmDescriptor(MatrixProductDescriptor, PlannedBy["BatchedGemmPlan"]):
    """``c[i] = act(alpha * a[i] @ b[i] + beta * c0[i] + bias)`` for each of ``batch`` products of one shape.

    Operands are those of gemm; all but ``bias`` have the axis ``batch`` first. A matrix that all products share is
    promised with ``zero_axes=(0,)``, which is what ``expand`` gives.

    Attributes:
        batch: number of products.
    """

    op: Literal["batched_gemm"] = "batched_gemm"
    batch: Extent

    @property
    def lead(self) -> tuple[int, ...]:
        return (self.batch,)


class GemmBackwardDescriptor(MultiplyingDescriptor, PlannedBy["GemmBackwardPlan"]):
    """Gradients of ``c = alpha * a @ b + bias``, any of ``da = alpha * dc @ b.T``, ``db = alpha * a.T @ dc`` and
    ``dbias = dc.sum(0)``.

    Operands: ``dc`` (m, n), the gradient of ``c``; ``a`` (m, k) if ``db`` is wanted, ``b`` (k, n) if ``da`` is;
    ``da`` (m, k), ``db`` (k, n), ``dbias`` (n,). ``alpha`` is an Arg; None means 1; ``dbias`` does not depend on it. A
    transposed matrix is a matrix of another layout, never a copy.

    Attributes:
        wants_da, wants_db, wants_dbias: the gradients to compute, at least one. Operands that none of them needs are
            absent. db and dbias sum over the rows, so with either no kernel is batch-invariant.
        m, n, k, element, out_element, math, accumulator: as in gemm; the gradients have ``out_element``.
    """

    op: Literal["gemm_backward"] = "gemm_backward"
    wants_da: bool = True
    wants_db: bool = True
    wants_dbias: bool = False

    def check_problem(self) -> None:
        super().check_problem()
        if not (self.wants_da or self.wants_db or self.wants_dbias):
            raise ValueError("wants_da, wants_db and wants_dbias are all False: at least one gradient must be wanted")

    def declare_operands(self) -> tuple[Operand, ...]:
        a, b, rows = (self.m, self.k), (self.k, self.n), (0,)
        found = [Operand("dc", Role.INPUT, self.element, (self.m, self.n), batch_axes=rows)]
        if self.wants_db:
            found.append(Operand("a", Role.INPUT, self.element, a, batch_axes=rows))
        if self.wants_da:
            found.append(Operand("b", Role.INPUT, self.element, b))
            found.append(Operand("da", Role.OUTPUT, self.out, a, batch_axes=rows))
        if self.wants_db:
            found.append(Operand("db", Role.OUTPUT, self.out, b))
        if self.wants_dbias:
            found.append(Operand("dbias", Role.OUTPUT, self.out, (self.n,)))
        if self.wants_da or self.wants_db:
            compute = self.element.compute
            found.append(Operand("alpha", Role.INPUT, compute, kind=OperandKind.HOST_SCALAR, optional=True))
        return tuple(found)

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        m, n = args.dc.shape
        a, b = getattr(args, "a", None), getattr(args, "b", None)
        outputs = {name: getattr(args, name, None) for name in ("da", "db", "dbias")}
        out = next((t.dtype for t in outputs.values() if t is not None), args.dc.dtype)
        return {
            "m": m,
            "n": n,
            "k": a.shape[1] if a is not None else b.shape[0] if b is not None else 0,  # dbias alone: no operand has a k
            "element": args.dc.dtype,
            "out_element": None if out == args.dc.dtype else out,
            **{f"wants_{name}": t is not None for name, t in outputs.items()},
            **options,
        }
