"""Entry ``fixed_f16``: exact sums of f16, rounded once.

Every finite f16 is a multiple of 2**-24 below 2**16, so x * 2**24 is an integer below 2**40. With fewer than 2**23
contributions to an element the 64-bit sum of these integers is exact.
"""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.runtime.launch import Arg, Launch, Scratch
from triplan.backends.triton.indexing import fixed_point as fixed, fixed_point_kernels as kernels
from triplan.backends.triton.indexing.points import single
from triplan.backends.triton.indexing.registration import SUMS, entry
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import ElementKind, PrecisionGuarantee, Support, Target

#: Exponent of the smallest subnormal f16: the unit of the sums.
UNIT = -24


def applies(desc: IndexingDescriptor, target: Target) -> Support:
    return fixed.fewer_than(fixed.HEADROOM[0], desc)


def guarantee(desc: IndexingDescriptor) -> Mapping[str, PrecisionGuarantee]:
    return fixed.fixed_guarantee(desc, None)


def numerics(desc: IndexingDescriptor) -> str:
    return f"fixed-sum.{desc.element}.exact.v1"


def rank(desc: IndexingDescriptor, target: Target) -> float:
    return fixed.fixed_us(desc, exact=True)


def workspace(desc: IndexingDescriptor, target: Target) -> int:
    return fixed.scratchpad(desc, exact=True).nbytes


@entry(
    "fixed_f16",
    SUMS,
    elements=("f16",),
    supports=applies,
    rank=rank,
    priority=2,
    guarantee=guarantee,
    numerics=numerics,
    workspace=workspace,
)
def launches(desc: IndexingDescriptor, target: Target) -> list[Launch]:
    pad = fixed.scratchpad(desc, exact=True)
    # The flags are bytes, but atomics take words.
    table: Arg = (pad.sums, Scratch(pad.marks, ElementKind.I32))
    return fixed.fixed_launches(desc, exact=True, scale=UNIT, passes=[(single(kernels.exact_point), table)])
