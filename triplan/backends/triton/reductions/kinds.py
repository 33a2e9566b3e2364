"""What each op of reductions accumulates, how, and in which elements."""

from __future__ import annotations

import math
from typing import NamedTuple

import triton.language as tl

from triplan.backends.triton.common.offsets import TL
from triplan.backends.triton.reductions import shared_kernels as do
from triplan.descriptors.reductions import ReductionProblem
from triplan.sku import ElementKind

#: Triton's types of accumulators and results.
TYPES = {
    **TL,
    ElementKind.F16: tl.float16,
    ElementKind.BF16: tl.bfloat16,
    ElementKind.U8: tl.uint8,
    ElementKind.BOOL: tl.int8,
}
#: Accumulations with two accumulators.
PAIRS = (do.ARGMAX, do.ARGMIN, do.MOMENTS, do.EXPONENTIALS, do.ENDS)
POSITIONS = (do.ARGMAX, do.ARGMIN)
EXTREMA = (do.MAX, do.MIN, do.ENDS, *POSITIONS)
#: Those whose accumulators hold no count and no position, so that they can be moved.
TURNED = (do.SUM, do.PRODUCT, do.MAX, do.MIN, do.EXPONENTIALS, do.ENDS)


class Kind(NamedTuple):
    """The kernels' constants for an op: how elements are accumulated, mapped before that, and finished after it."""

    accumulates: tl.constexpr
    maps: tl.constexpr = do.PLAIN
    finish: tl.constexpr = do.KEEP

    def compute(self, desc: ReductionProblem) -> ElementKind:
        """The element of the first accumulator."""
        element = desc.element
        if element.is_floating_point and self.maps is not do.NONZERO:
            return ElementKind.F64 if ElementKind.F64 in (element, desc.result) else ElementKind.F32
        if self.accumulates in (do.SUM, do.PRODUCT) or (element is ElementKind.I64 and self.maps is not do.NONZERO):
            return ElementKind.I64
        return ElementKind.I32

    def second(self, compute: ElementKind) -> ElementKind | None:
        """The element of the second accumulator; None if there is no second one. ``compute``: that of the first."""
        if self.accumulates not in PAIRS:
            return None
        return ElementKind.I64 if self.accumulates in POSITIONS else compute

    def identity(self, compute: ElementKind) -> float | int:
        """The neutral element of the accumulation."""
        if self.accumulates not in (*EXTREMA, do.EXPONENTIALS):
            return 1 if self.accumulates is do.PRODUCT else 0
        low = self.accumulates in (do.MAX, do.ARGMAX, do.EXPONENTIALS)
        if compute.is_floating_point:
            return -math.inf if low else math.inf
        if self.maps is do.NONZERO:
            return 0 if low else 1
        largest = (1 << 8 * compute.itemsize - 1) - 1
        return -largest - 1 if low else largest


KINDS = {
    "sum": Kind(do.SUM),
    "mean": Kind(do.SUM, finish=do.MEAN),
    "prod": Kind(do.PRODUCT),
    "amax": Kind(do.MAX),
    "amin": Kind(do.MIN),
    "max": Kind(do.ARGMAX),
    "min": Kind(do.ARGMIN),
    "argmax": Kind(do.ARGMAX, finish=do.POSITION),
    "argmin": Kind(do.ARGMIN, finish=do.POSITION),
    "any": Kind(do.MAX, do.NONZERO, do.TRUTH),
    "all": Kind(do.MIN, do.NONZERO, do.TRUTH),
    "count_nonzero": Kind(do.SUM, do.NONZERO),
    "var": Kind(do.MOMENTS, finish=do.VARIANCE),
    "std": Kind(do.MOMENTS, finish=do.DEVIATION),
    "var_mean": Kind(do.MOMENTS, finish=do.VARIANCE),
    "std_mean": Kind(do.MOMENTS, finish=do.DEVIATION),
    "aminmax": Kind(do.ENDS),
    "logsumexp": Kind(do.EXPONENTIALS, finish=do.LOGARITHM),
}
#: vector_norm, by order.
NORMS = {1: Kind(do.SUM, do.ABSOLUTE), 2: Kind(do.SUM, do.SQUARE, do.ROOT)}
OTHER_NORM = Kind(do.SUM, do.POWER, do.INVERSE_POWER)


def kind_of(desc: ReductionProblem) -> Kind:
    if desc.op != "vector_norm":
        return KINDS[desc.reduction]
    return NORMS.get(int(desc.order), OTHER_NORM) if desc.order == int(desc.order) else OTHER_NORM
