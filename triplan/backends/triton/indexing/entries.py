"""The kernel table's rows for the indexing family.

Copies move bits and are exact. Accumulating ops have atomic rows (fast, in whatever order the hardware chooses) and the
ordered row (each table element has one owner that adds its contributions in ascending order).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch

from triplan.backends.runtime.launch import Launch, Scratch
from triplan.backends.table import kernel
from triplan.backends.triton.common.fill import fill_launch, fold_launch
from triplan.backends.triton.common.offsets import bits, values
from triplan.backends.triton.indexing import costs, kernels
from triplan.backends.triton.indexing.geometry import geometry, keeps
from triplan.backends.triton.indexing.launches import (
    elements_launch,
    fits_rows,
    ordered_launch,
    rows_launch,
    scattered_add,
    status_launch,
    table_bytes,
)
from triplan.sku import (
    SUPPORTED,
    Duplicates,
    ElementKind,
    IndexElementKind,
    MathPrecision,
    PrecisionGuarantee,
    Support,
    Target,
    Tolerance,
)

COPIED = ("f16", "bf16", "f32", "f64", "i32", "i64", "bool")
ADDED = ("f16", "bf16", "f32", "f64", "i32", "i64")
HALF = ("f16", "bf16")
INDICES = tuple(IndexElementKind)

GATHERS = ("gather", "index_select", "embedding")
STORES = ("scatter",)
SUMS = ("gather_backward", "index_select_backward", "scatter_add", "index_add", "embedding_backward")
# index_put stores or accumulates, as its descriptor says; its rows refuse the other half.


# --- what may be said of each kernel ---


def outputs(desc: Any, guarantee: PrecisionGuarantee) -> Mapping[str, PrecisionGuarantee]:
    found = {o.name: guarantee for o in desc.operands() if o.is_written}
    if "status" in found:
        # The lowest bad position is a minimum: no order can change it.
        found["status"] = PrecisionGuarantee.exact(ElementKind.I64)
    return found


def copy_guarantee(desc: Any) -> Mapping[str, PrecisionGuarantee]:
    return outputs(desc, PrecisionGuarantee.exact(desc.element))


@lru_cache(maxsize=64)
def _write_guarantee(element: ElementKind, duplicates: Duplicates) -> PrecisionGuarantee:
    settled = duplicates is Duplicates.LAST
    changes = {"deterministic": settled, "bit_stable_on_same_hardware": settled, "batch_invariant": settled}
    return PrecisionGuarantee.exact(element).replace(order_invariant=False, duplicates=duplicates, **changes)


def any_guarantee(desc: Any) -> Mapping[str, PrecisionGuarantee]:
    return outputs(desc, _write_guarantee(desc.element, Duplicates.ANY))


def last_guarantee(desc: Any) -> Mapping[str, PrecisionGuarantee]:
    return outputs(desc, _write_guarantee(desc.element, Duplicates.LAST))


def sum_tolerance(
    element: ElementKind, accumulator: ElementKind, terms: int, additions: int | None = None
) -> Tolerance:
    """Worst case of summation: ``additions`` roundings in the accumulator a term passes through (by default ``terms``,
    as in recursive summation), one more into the element.

    (1 + u)^n - 1 for n additions (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2), with three more
    roundings for alpha, its product and the product's conversion. It is met where a large sum swallows small terms.
    The float64 reference, with which the tolerance compares, adds its terms one after another and is off by as much.
    """
    u, final = accumulator.unit_roundoff, element.unit_roundoff
    if u == 0:
        return Tolerance()
    # f32 atomics flush subnormals; elsewhere only results below the smallest subnormal are lost.
    info = torch.finfo(accumulator.torch)
    lost = float(info.tiny) if accumulator is ElementKind.F32 else float(info.smallest_normal * info.eps)
    roundings = (terms if additions is None else additions) + 3
    double = ElementKind.F64.unit_roundoff
    ctol = math.expm1(min(roundings * math.log1p(u) + (terms + 1) * math.log1p(double), 700.0))
    narrowed = accumulator is not element
    smallest = torch.finfo(element.torch)
    return Tolerance(
        rtol=final if narrowed else 0.0,
        ctol=ctol * (1 + final) if narrowed else ctol,
        underflow=(terms + 3) * lost + float(smallest.smallest_normal * smallest.eps),
    )


@lru_cache(maxsize=1024)
def _sum_guarantee(element: ElementKind, accumulator: ElementKind, ordered: bool, terms: int) -> PrecisionGuarantee:
    integer = not element.is_floating_point  # addition modulo 2^n is associative: order cannot show
    settled = ordered or integer
    return PrecisionGuarantee(
        math_precision=MathPrecision.EXACT if integer else MathPrecision(element.compute.value),
        accumulator=accumulator,
        deterministic=settled,
        bit_stable_on_same_hardware=settled,
        batch_invariant=settled,
        order_invariant=integer,
        duplicates=Duplicates.SUM,
        tolerance=sum_tolerance(element, accumulator, terms),
    )


def sum_guarantee(desc: Any, accumulator: ElementKind, ordered: bool) -> Mapping[str, PrecisionGuarantee]:
    terms = geometry(desc).duplicates_possible
    return outputs(desc, _sum_guarantee(desc.element, accumulator, ordered, terms))


def atomic_guarantee(desc: Any) -> Mapping[str, PrecisionGuarantee]:
    return sum_guarantee(desc, desc.element, ordered=False)


def wide_atomic_guarantee(desc: Any) -> Mapping[str, PrecisionGuarantee]:
    return sum_guarantee(desc, ElementKind.F32, ordered=False)


def ordered_guarantee(desc: Any) -> Mapping[str, PrecisionGuarantee]:
    return sum_guarantee(desc, desc.element.compute, ordered=True)


def sum_numerics(kind: str) -> Callable[[Any], str | None]:
    def numerics(desc: Any) -> str | None:
        if not desc.element.is_floating_point:
            return f"sum-modulo.{desc.element}.v1"
        return f"{kind}.{desc.element}.v1" if kind == "ordered-sum" else None

    return numerics


def layout(desc: Any) -> str:
    return "packed" if geometry(desc).packed else "strided"


# --- when they apply and what they cost ---


def rows_apply(desc: Any, target: Target) -> Support:
    if fits_rows(geometry(desc)):
        return SUPPORTED
    return Support.no("needs one index, packed operands and at least 16 contiguous elements behind the indexed axis")


def atomics_apply(desc: Any, target: Target) -> Support:
    if desc.element is not ElementKind.BF16:
        return SUPPORTED
    if target.interpret:
        return Support.no("Triton's interpreter has no bf16 atomics")
    if target.arch == "sm80":
        return Support.no("sm80 has no bf16 atomic addition, only compare-and-swap loops")
    return SUPPORTED


def both(*checks: Callable[[Any, Target], Support]) -> Callable[[Any, Target], Support]:
    def check(desc: Any, target: Target) -> Support:
        return next((s for c in checks if not (s := c(desc, target))), SUPPORTED)

    return check


def only_if(accumulate: bool) -> Callable[[Any, Target], Support]:
    """For index_put, whose descriptor says whether it stores or accumulates."""

    def check(desc: Any, target: Target) -> Support:
        if desc.op != "index_put" or desc.accumulate is accumulate:
            return SUPPORTED
        return Support.no(f"accumulate is {desc.accumulate}; this kernel {'adds' if accumulate else 'stores'}")

    return check


def ordered_applies(desc: Any, target: Target) -> Support:
    programs = costs.ordered_programs(geometry(desc))
    if programs < 2**31:
        return SUPPORTED
    return Support.no(f"the table needs {programs} programs; a grid holds fewer than 2**31")


# --- launches ---


def zeroed(desc: Any) -> list[Launch]:
    table = geometry(desc).table
    if keeps(desc) or table.numel == 0:
        return []
    return [fill_launch(bits(table), table.numel, 0, table)]


def _moved(desc: Any, point: Any, traverse: Any) -> list[Launch]:
    g = geometry(desc)
    if g.idle:
        return status_launch(desc)
    return [*status_launch(desc), traverse(desc, point, bits(g.dense), bits(g.table), desc.element.bits)]


def _added(desc: Any, traverse: Any) -> list[Launch]:
    g = geometry(desc)
    before = [*status_launch(desc), *zeroed(desc)]
    if g.idle:
        return before
    vectors = traverse is rows_launch and not g.full and g.fold[2] % 2 == 0
    point = kernels.atomic_point if vectors else scattered_add(desc)
    return [*before, traverse(desc, point, values(g.dense), values(g.table), desc.element.compute)]


def _gather_rows(desc: Any, target: Target) -> list[Launch]:
    return _moved(desc, kernels.gather_point, rows_launch)


def _gather_elements(desc: Any, target: Target) -> list[Launch]:
    return _moved(desc, kernels.gather_point, elements_launch)


def _store_rows(desc: Any, target: Target) -> list[Launch]:
    return _moved(desc, kernels.store_point, rows_launch)


def _store_elements(desc: Any, target: Target) -> list[Launch]:
    return _moved(desc, kernels.store_point, elements_launch)


def _atomic_rows(desc: Any, target: Target) -> list[Launch]:
    return _added(desc, rows_launch)


def _atomic_elements(desc: Any, target: Target) -> list[Launch]:
    return _added(desc, elements_launch)


def _atomic_f32(desc: Any, target: Target) -> list[Launch]:
    g = geometry(desc)
    before = status_launch(desc)
    if g.idle:
        return [*before, *zeroed(desc)]
    sums = Scratch(0, ElementKind.F32)
    clear = fill_launch(sums, g.table.numel, 0)
    args = (desc, kernels.atomic_point, values(g.dense), sums, ElementKind.F32)
    add = rows_launch(*args) if fits_rows(g) else elements_launch(*args, packed_table=True)
    return [*before, clear, add, fold_launch(sums, g.table, keeps(desc))]


def _ordered_sum(desc: Any, target: Target) -> list[Launch]:
    return _ordered(desc, kernels.add_step, values, desc.element.compute)


def _ordered_last(desc: Any, target: Target) -> list[Launch]:
    return _ordered(desc, kernels.last_step, bits, desc.element.bits)


def _ordered(desc: Any, step: Any, pointer: Any, compute: ElementKind) -> list[Launch]:
    g = geometry(desc)
    if g.table.numel == 0 or (g.numel == 0 and keeps(desc)):
        return status_launch(desc)
    return [*status_launch(desc), ordered_launch(desc, step, pointer, compute)]


def _wide_atomic_workspace(desc: Any, target: Target) -> int:
    return table_bytes(desc, ElementKind.F32) if geometry(desc).numel else 0


def _register() -> None:
    for op in GATHERS:
        common: dict[str, Any] = {
            "op": op,
            "elements": COPIED,
            "index_elements": INDICES,
            "guarantee": copy_guarantee,
            "layout": layout,
        }
        exact: dict[str, Any] = {"numerics": lambda desc: f"exact.{desc.element}"}
        kernel(name="rows", supports=rows_apply, rank=costs.rows_rank, **common, **exact)(_gather_rows)
        kernel(name="elements", rank=costs.elements_rank, **common, **exact)(_gather_elements)
    for op in (*STORES, "index_put"):
        store = only_if(accumulate=False)
        common = {"op": op, "elements": COPIED, "index_elements": INDICES, "layout": layout}
        kernel(name="rows", supports=both(store, rows_apply), rank=costs.rows_rank, guarantee=any_guarantee, **common)(
            _store_rows
        )
        kernel(name="elements", supports=store, rank=costs.elements_rank, guarantee=any_guarantee, **common)(
            _store_elements
        )
        kernel(
            name="ordered_last",
            supports=both(store, ordered_applies),
            rank=costs.ordered_rank,
            guarantee=last_guarantee,
            numerics=lambda desc: f"ordered-last.{desc.element}.v1",
            **common,
        )(_ordered_last)
    for op in (*SUMS, "index_put"):
        add = only_if(accumulate=True)
        common = {"op": op, "index_elements": INDICES, "layout": layout}
        kernel(
            name="atomic_rows",
            elements=ADDED,
            supports=both(add, rows_apply, atomics_apply),
            rank=costs.atomic_rows_rank,
            guarantee=atomic_guarantee,
            numerics=sum_numerics("atomic"),
            **common,
        )(_atomic_rows)
        kernel(
            name="atomic_elements",
            elements=ADDED,
            supports=both(add, atomics_apply),
            rank=costs.atomic_elements_rank,
            guarantee=atomic_guarantee,
            numerics=sum_numerics("atomic"),
            **common,
        )(_atomic_elements)
        kernel(
            name="atomic_f32",
            elements=HALF,
            supports=add,
            rank=costs.atomic_f32_rank,
            guarantee=wide_atomic_guarantee,
            workspace=_wide_atomic_workspace,
            **common,
        )(_atomic_f32)
        kernel(
            name="ordered_sum",
            elements=ADDED,
            supports=both(add, ordered_applies),
            rank=costs.ordered_rank,
            priority=1,
            guarantee=ordered_guarantee,
            numerics=sum_numerics("ordered-sum"),
            **common,
        )(_ordered_sum)


_register()
