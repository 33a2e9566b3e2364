"""The kernel table's rows that sum over sorted segments: deterministic, and faster than atomics on large problems.

Indices are sorted in the workspace; then each slot of the table adds its contributions in ascending order, in f32 for
half types, and writes once. Reading contributions and writing sums is all the traffic that there is, and no element of
the table is fought over.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from triplan.backends.runtime.launch import Launch
from triplan.backends.table import Preparation, kernel
from triplan.backends.triton.common.fill import fill_launch, fold_launch
from triplan.backends.triton.common.offsets import I32_LIMIT
from triplan.backends.triton.indexing import costs
from triplan.backends.triton.indexing.entries import (
    ADDED,
    INDICES,
    SUMS,
    both,
    layout,
    only_if,
    outputs,
    sum_tolerance,
    zeroed,
)
from triplan.backends.triton.indexing.geometry import geometry
from triplan.backends.triton.indexing.launches import status_launch
from triplan.backends.triton.indexing.segments import (
    SCANNED,
    largest_grid,
    scanned_grid,
    scanned_launch,
    sum_launches,
)
from triplan.backends.triton.indexing.sorting import CHUNK, buffers, sort_launches, view
from triplan.descriptors.bad_indices import NO_BAD_INDEX
from triplan.sku import (
    SUPPORTED,
    Duplicates,
    ElementKind,
    MathPrecision,
    PrecisionGuarantee,
    Support,
    Target,
)


def idle(desc: Any) -> bool:
    """Whether there is nothing to add, so that only ``status`` and an output to be filled are left."""
    return geometry(desc).idle


# --- what may be said of it ---


def additions(count: int) -> int:
    """The most additions that one of ``count`` contributions passes through: its chunk, its group, the groups, KEEP."""
    chunks = -(-count // CHUNK)
    return min(count, CHUNK) + min(chunks, CHUNK) + -(-chunks // CHUNK) + 1


@lru_cache(maxsize=1024)
def _guarantee(element: ElementKind, count: int) -> PrecisionGuarantee:
    integer = not element.is_floating_point  # addition modulo 2^n is associative: order cannot show
    return PrecisionGuarantee(
        math_precision=MathPrecision.EXACT if integer else MathPrecision(element.compute.value),
        accumulator=element.compute,
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=True,
        order_invariant=integer,
        duplicates=Duplicates.SUM,
        tolerance=sum_tolerance(element, element.compute, count, additions(count)),
    )


def sorted_guarantee(desc: Any) -> Mapping[str, PrecisionGuarantee]:
    return outputs(desc, _guarantee(desc.element, geometry(desc).duplicates_possible))


def sorted_numerics(desc: Any) -> str:
    kind = "sorted-sum" if desc.element.is_floating_point else "sum-modulo"
    return f"{kind}.{desc.element}.v1"


# --- when it applies and what it costs ---


def sorted_applies(desc: Any, target: Target) -> Support:
    s = view(desc)
    if max(s.slots + 1, s.count, s.outer) >= I32_LIMIT:
        return Support.no(f"keys have 31 bits; the problem has {s.slots} keys and {s.count} contributions")
    programs = 0 if idle(desc) else largest_grid(desc)
    return SUPPORTED if programs < 2**31 else Support.no(f"needs {programs} programs; a grid holds fewer than 2**31")


def _sorted_workspace(desc: Any, target: Target) -> int:
    return 0 if idle(desc) else buffers(desc).nbytes


def _sorted_sum(desc: Any, target: Target) -> list[Launch]:
    if idle(desc):
        return [*status_launch(desc), *zeroed(desc)]
    return [*status_launch(desc), *sort_launches(desc), *sum_launches(desc)]


def _prepared_size(desc: Any, target: Target) -> int:
    return 0 if idle(desc) else buffers(desc, stored=True).stored_nbytes


def _prepare(desc: Any, target: Target) -> list[Launch]:
    if idle(desc):
        return []
    status = buffers(desc, stored=True).status
    reset = [] if status is None else [fill_launch(status, 1, NO_BAD_INDEX)]
    return [*reset, *sort_launches(desc, stored=True)]


def _prepared_sum(desc: Any, target: Target) -> list[Launch]:
    if idle(desc):
        return _sorted_sum(desc, target)
    status = buffers(desc, stored=True).status
    # What the sort found of bad indices holds for every run.
    report = [] if status is None else [fold_launch(status, desc.operand("status"), keep=False)]
    return [*report, *sum_launches(desc, stored=True)]


def scanned_applies(desc: Any, target: Target) -> Support:
    s = view(desc)
    if s.g.full:
        return Support.no("scans one index a slice; here the index differs between elements of a slice")
    if s.count > SCANNED:
        return Support.no(f"looks at all of at most {SCANNED} contributions; the problem has {s.count}")
    if not (support := sorted_applies(desc, target)):
        return support
    programs = scanned_grid(desc) if not idle(desc) else 0
    return SUPPORTED if programs < 2**31 else Support.no(f"needs {programs} programs; a grid holds fewer than 2**31")


def _scanned_workspace(desc: Any, target: Target) -> int:
    return 0 if idle(desc) else -(-4 * view(desc).count // 16) * 16


def _scanned_sum(desc: Any, target: Target) -> list[Launch]:
    before = [*status_launch(desc), *zeroed(desc)]
    return before if idle(desc) else [*before, scanned_launch(desc)]


def _register() -> None:
    for op in (*SUMS, "index_put"):
        add = only_if(accumulate=True)
        common: dict[str, Any] = {
            "op": op,
            "elements": ADDED,
            "index_elements": INDICES,
            "guarantee": sorted_guarantee,
            "numerics": sorted_numerics,
            "layout": layout,
        }
        kernel(
            name="sorted_sum",
            supports=both(add, sorted_applies),
            rank=costs.sorted_rank,
            workspace=_sorted_workspace,
            preparation=Preparation(_prepared_size, _prepare, _prepared_sum),
            **common,
        )(_sorted_sum)
        if op in ("gather_backward", "scatter_add"):
            continue  # their index differs between elements
        kernel(
            name="scanned_sum",
            supports=both(add, scanned_applies),
            rank=costs.scanned_rank,
            workspace=_scanned_workspace,
            **common,
        )(_scanned_sum)


_register()
