"""Sorting of rows, their largest or smallest elements, and positions in sorted rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from triplan.descriptors.base import Descriptor, PlannedBy
from triplan.descriptors.fields import Extent
from triplan.descriptors.operand import Operand, Role
from triplan.sku import Element, ElementKind, OpCategory

if TYPE_CHECKING:
    from triplan.facade.sorting import ArgsortPlan, KthValuePlan, SearchSortedPlan, SortPlan, TopKPlan

__all__ = ["ArgsortDescriptor", "KthValueDescriptor", "SearchSortedDescriptor", "SortDescriptor", "TopKDescriptor"]

I64 = ElementKind.I64


class RowOrderProblem(Descriptor):
    """Fields of the ops that order the elements of rows.

    The order is total, and the same for all ops: NaN is larger than every number, -0.0 equals 0.0, and of equal
    elements the one with the lower position comes first, also where the order is descending.

    Attributes:
        element: element of x.
        rows, n: extents of x.
    """

    category: ClassVar[OpCategory] = OpCategory.SORTING

    op: str
    element: Element
    rows: Extent
    n: Extent

    def _operands_of(self, shape: tuple[int, ...], *outputs: str) -> tuple[Operand, ...]:
        return (
            Operand("x", Role.INPUT, self.element, (self.rows, self.n), batch_axes=(0,)),
            *(
                Operand(name, Role.OUTPUT, I64 if name == "indices" else self.element, shape, batch_axes=(0,))
                for name in outputs
            ),
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        rows, n = args.x.shape
        return {"element": args.x.dtype, "rows": rows, "n": n, **options}


class TopKDescriptor(RowOrderProblem, PlannedBy["TopKPlan"]):
    """``values, indices`` = the first ``k`` elements of each row in descending order, and their positions (torch.topk).

    Sorted. NaN is largest, -0.0 equals 0.0, and of equal elements those with the lowest positions are taken, in this
    order.

    Attributes:
        k: elements that are taken, at most ``n``.
        largest: whether the order is descending; otherwise ascending.
    """

    op: Literal["topk"] = "topk"
    k: Annotated[int, Field(ge=0)]
    largest: bool = True

    def check_problem(self) -> None:
        if self.k > self.n:
            raise ValueError(f"k = {self.k}: a row has {self.n} elements")

    def declare_operands(self) -> tuple[Operand, ...]:
        return self._operands_of((self.rows, self.k), "values", "indices")

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return {**super().fields_from_args(args), "k": args.indices.shape[1], **options}


class KthValueDescriptor(RowOrderProblem, PlannedBy["KthValuePlan"]):
    """``values, indices`` = the ``k``-th smallest element of each row, and its position (torch.kthvalue).

    It is element ``k - 1`` of the stably sorted row: NaN is largest, -0.0 equals 0.0.

    Attributes:
        k: which element, from 1 on.
    """

    op: Literal["kthvalue"] = "kthvalue"
    k: Annotated[int, Field(ge=1)]

    def check_problem(self) -> None:
        if self.k > self.n:
            raise ValueError(f"k = {self.k}: a row has {self.n} elements")

    def declare_operands(self) -> tuple[Operand, ...]:
        return self._operands_of((self.rows,), "values", "indices")


class SortDescriptor(RowOrderProblem, PlannedBy["SortPlan"]):
    """``values, indices`` = each row in ascending order, and where its elements were (torch.sort).

    Stable: of equal elements the one with the lower position comes first. NaN is largest, -0.0 equals 0.0.

    Attributes:
        descending: whether the order is descending; stable as well.
    """

    op: Literal["sort"] = "sort"
    descending: bool = False

    def declare_operands(self) -> tuple[Operand, ...]:
        return self._operands_of((self.rows, self.n), "values", "indices")


class ArgsortDescriptor(RowOrderProblem, PlannedBy["ArgsortPlan"]):
    """``indices`` = where the elements of each stably sorted row were (torch.argsort).

    Attributes:
        descending: whether the order is descending; stable as well.
    """

    op: Literal["argsort"] = "argsort"
    descending: bool = False

    def declare_operands(self) -> tuple[Operand, ...]:
        return self._operands_of((self.rows, self.n), "indices")


class SearchSortedDescriptor(Descriptor, PlannedBy["SearchSortedPlan"]):
    """``out[r, j]`` = the number of elements of the sorted row ``sequence[r]`` below ``x[r, j]`` (torch.searchsorted).

    With ``right``, the number of those that are at most ``x[r, j]``. Comparisons with NaN are false, and the steps of
    the bisection are torch's, so that rows with NaN give what torch gives.

    Attributes:
        element: element of ``sequence`` and ``x``.
        rows: rows of ``sequence`` and of ``x``.
        n, m: elements of a row of ``sequence``, and of ``x``.
        right: whether equal elements count.
        out_int32: whether ``out`` is i32; otherwise i64.
        sorter: whether there is an operand ``sorter``: for each row, the positions of its elements in ascending order.
    """

    category: ClassVar[OpCategory] = OpCategory.SORTING

    op: Literal["searchsorted"] = "searchsorted"
    element: Element
    rows: Extent
    n: Extent
    m: Extent
    right: bool = False
    out_int32: bool = False
    sorter: bool = False

    def check_problem(self) -> None:
        if self.out_int32 and self.n >= 2**31:
            raise ValueError(f"n = {self.n}: a position does not fit into i32; set out_int32 to False")

    def declare_operands(self) -> tuple[Operand, ...]:
        row, found = (self.rows, self.n), ElementKind.I32 if self.out_int32 else I64
        sorter = (Operand("sorter", Role.INPUT, I64, row, batch_axes=(0,), index_extents=(self.n,)),)
        return (
            Operand("sequence", Role.INPUT, self.element, row, batch_axes=(0,)),
            *(sorter if self.sorter else ()),
            Operand("x", Role.INPUT, self.element, (self.rows, self.m), batch_axes=(0,)),
            Operand("out", Role.OUTPUT, found, (self.rows, self.m), batch_axes=(0,)),
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"element": args.x.dtype, "out_int32": args.out.element_size() == 4}
        rows, n = args.sequence.shape
        found |= {"rows": rows, "n": n, "m": args.x.shape[1], "sorter": getattr(args, "sorter", None) is not None}
        return {**found, **options}
