"""What the entries that accumulate share: the guarantee of a sum of floats or integers, and what precedes it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.bounds import EXACT, compounded, flushed, guarantee, of_outputs, tolerance
from triplan.backends.triton.common.fill import fill_launch
from triplan.backends.triton.common.offsets import bits
from triplan.backends.triton.indexing.geometry import geometry
from triplan.backends.triton.indexing.traversals import status_launches
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import Duplicates, ElementKind, MathPrecision, PrecisionGuarantee, Tolerance
from triplan.sku.facts import fact

# --- guarantees ---


def sum_tolerance(element: ElementKind, accumulator: ElementKind, terms: int, additions: int) -> Tolerance:
    """The worst case of a floating-point sum of ``terms``, each of which passes through at most ``additions``.

    Three more roundings are for alpha, its product and the product's conversion. The worst case occurs where a large
    sum absorbs small terms. The float64 reference, with which the tolerance compares, adds its terms one after another
    and is off by ``terms`` roundings of its own.
    """
    roundings = (additions + 3) * math.log1p(accumulator.unit_roundoff)
    in_reference = (terms + 1) * math.log1p(ElementKind.F64.unit_roundoff)
    # Atomics in f32 flush subnormal numbers; elsewhere only results below the smallest one are lost.
    lost = (terms + 3) * flushed(accumulator)
    return tolerance(element, accumulator, per_term=compounded(roundings + in_reference), lost=(lost,))


@fact
def _sum_guarantee(
    element: ElementKind, accumulator: ElementKind, ordered: bool, terms: int, additions: int
) -> PrecisionGuarantee:
    if not element.is_floating_point:  # addition modulo 2^n is associative: no order changes a bit
        return guarantee(
            accumulator, EXACT, math_precision=MathPrecision.EXACT, batch=True, order=True, duplicates=Duplicates.SUM
        )
    return guarantee(
        accumulator,
        sum_tolerance(element, accumulator, terms, additions),
        math_precision=MathPrecision(element.compute.value),
        deterministic=ordered,
        batch=ordered,
        duplicates=Duplicates.SUM,
    )


def sum_guarantee(
    desc: IndexingDescriptor, accumulator: ElementKind, ordered: bool, additions: int | None = None
) -> Mapping[str, PrecisionGuarantee]:
    """The guarantee of a sum kept in ``accumulator``.

    ``ordered``: the order depends on nothing but the contributions to one element. ``additions``: the most that a
    contribution passes through; by default one for each contribution, as in recursive summation.
    """
    terms = geometry(desc).most_contributions
    found = _sum_guarantee(desc.element, accumulator, ordered, terms, terms if additions is None else additions)
    return of_outputs(desc, found)


def sum_numerics(desc: IndexingDescriptor, kind: str | None) -> str | None:
    """The ``numerics_id`` of a sum of floats in the order ``kind`` (None: in no fixed order), or of integers."""
    if not desc.element.is_floating_point:
        return f"sum-modulo.{desc.element}.v1"
    return None if kind is None else f"{kind}.{desc.element}.v1"


# --- launches ---


def zero_launches(desc: IndexingDescriptor) -> list[Launch]:
    """Fill the table with zeros, where the op does not add to what it holds."""
    g = geometry(desc)
    if g.keeps or g.table.numel == 0:
        return []
    return [fill_launch(bits(g.table), g.table.numel, 0, g.table)]


def first_launches(desc: IndexingDescriptor) -> list[Launch]:
    """The launches before additions to the table itself; the only ones where the problem is idle."""
    return [*status_launches(desc), *zero_launches(desc)]
