"""The adjoint of a matrix product: gradients of both factors and of the bias."""

from __future__ import annotations

from typing import Any, Literal

from triplan.descriptors.gemm import MultiplyingDescriptor
from triplan.descriptors.operand import Operand, OperandKind, Role


class GemmBackwardDescriptor(MultiplyingDescriptor):
    """Gradients of ``c = alpha * a @ b + bias``: ``da = alpha * dc @ b.T``, ``db = alpha * a.T @ dc``, ``dbias = dc``
    summed over its rows; any of the three.

    Operands: ``dc`` (m, n), the gradient of ``c``; ``a`` (m, k) where ``db`` is wanted and ``b`` (k, n) where ``da``
    is, as the product had them; ``da`` (m, k), ``db`` (k, n), ``dbias`` (n,). ``alpha`` is an Arg, 1 where None is
    passed; ``dbias`` does not have it. A transposed matrix is one of another layout, and is never copied.

    Attributes:
        wants_da, wants_db, wants_dbias: which gradients are computed: one at least. An operand that is of no use to
            them is absent. db and dbias add up rows: with either, no kernel is batch-invariant.
        m, n, k, element, out_element, math, accumulator: as of gemm; ``out_element`` is that of the gradients.
    """

    op: Literal["gemm_backward"] = "gemm_backward"
    wants_da: bool = True
    wants_db: bool = True
    wants_dbias: bool = False

    def check_problem(self) -> None:
        super().check_problem()
        if not (self.wants_da or self.wants_db or self.wants_dbias):
            raise ValueError("wants_da, wants_db and wants_dbias are all False: one gradient at least must be wanted")

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
            "k": a.shape[1] if a is not None else b.shape[0] if b is not None else 0,  # on which nothing else depends
            "element": args.dc.dtype,
            "out_element": None if out == args.dc.dtype else out,
            **{f"wants_{name}": t is not None for name, t in outputs.items()},
            **options,
        }
