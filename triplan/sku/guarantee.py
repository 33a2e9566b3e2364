"""PrecisionGuarantee: what a kernel promises about its results before a launch. Tests prove each promise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from triplan.sku.element import Element, ElementKind
from triplan.sku.facts import fact
from triplan.sku.kinds import Duplicates, MathPrecision
from triplan.sku.model import FrozenModel

__all__ = ["PrecisionGuarantee", "Tolerance"]

_NonNegative = Annotated[float, Field(ge=0, strict=False)]


class Tolerance(FrozenModel):
    """|got - ref| <= rtol * |ref| + ctol * sum|terms| + underflow, with the float64 reference and its sum|terms|.

    ``rtol`` bounds the rounding of the result, ``ctol`` the rounding of the accumulation. (No fixed absolute tolerance
    is right under cancellation.) ``underflow`` is an absolute bound near the smallest subnormal number: it covers
    results too small for the element, and hardware that flushes subnormal numbers. All zero means bit-exact.
    """

    rtol: _NonNegative = 0.0
    ctol: _NonNegative = 0.0
    underflow: _NonNegative = 0.0

    @property
    def exact(self) -> bool:
        return self.rtol == 0 and self.ctol == 0 and self.underflow == 0


class PrecisionGuarantee(FrozenModel):
    """The numerical contract of one output.

    Attributes:
        math_precision: precision of the multiplicands (``exact`` where nothing is computed).
        accumulator: element in which sums are accumulated.
        deterministic: the same inputs on the same device give the same bits on every run.
        bit_stable_on_same_hardware: so do all processes and all devices of the same model, with the same compiler
            version and tuning table; on the CPU, with the same number of threads.
        batch_invariant: the bits of one row or segment depend neither on the number of others in the batch, nor on its
            position, nor on which plan of the same ``numerics_id`` ran it.
        order_invariant: the bits do not depend on the order in which contributions arrive.
        duplicates: what repeated indices do; None if no index can repeat a destination.
        tolerance: distance from the float64 reference. Tests enforce exactly this bound.
    """

    math_precision: MathPrecision
    accumulator: Element
    deterministic: bool
    bit_stable_on_same_hardware: bool
    batch_invariant: bool
    order_invariant: bool
    duplicates: Duplicates | None = None
    tolerance: Tolerance = Tolerance()

    @classmethod
    @fact
    def exact(cls, element: ElementKind) -> PrecisionGuarantee:
        """The guarantee of an op that computes nothing, such as a copy: all bits are exact."""
        return cls(
            math_precision=MathPrecision.EXACT,
            accumulator=element,
            deterministic=True,
            bit_stable_on_same_hardware=True,
            batch_invariant=True,
            order_invariant=True,
        )

    @classmethod
    def weakest(cls, guarantees: Iterable[PrecisionGuarantee]) -> PrecisionGuarantee:
        """What holds for every one of ``guarantees`` (at least one)."""
        gs = list(guarantees)
        if len(gs) == 1:
            return gs[0]  # nearly every op; validating a copy would take a quarter of select's time
        precisions, duplicates = list(MathPrecision), list(Duplicates)
        accumulator = max((g.accumulator for g in gs), key=lambda e: e.unit_roundoff)
        named = [g.duplicates for g in gs if g.duplicates is not None]
        return cls(
            math_precision=max((g.math_precision for g in gs), key=precisions.index),
            accumulator=accumulator,
            deterministic=all(g.deterministic for g in gs),
            bit_stable_on_same_hardware=all(g.bit_stable_on_same_hardware for g in gs),
            batch_invariant=all(g.batch_invariant for g in gs),
            order_invariant=all(g.order_invariant for g in gs),
            duplicates=max(named, key=duplicates.index) if named else None,
            tolerance=Tolerance(
                rtol=max(g.tolerance.rtol for g in gs),
                ctol=max(g.tolerance.ctol for g in gs),
                underflow=max(g.tolerance.underflow for g in gs),
            ),
        )
