"""Entry ``fixed_scaled``: sums of f16, bf16 and f32 in units of the largest contribution to each element.

A first pass finds, by an integer maximum, the largest biased exponent E of the contributions to each element. A second
adds them as integers in units of q = 2**(E - 127 - (V - 1)), where the V value bits are what the count of contributions
leaves of 63. A term is below 2**(E - 126) = 2**V q and is rounded to a multiple of q, so it is off by at most
q / 2 = 2**-V * 2**(E - 127), and 2**(E - 127) is at most the largest |x| of that element. (Where E = 1, all terms are
multiples of 2**-149, and so of q: none is off.) Together n terms are off by at most n * 2**-V * max|x|.

V is 40 for fewer than 2**23 contributions (f32 has 24 bits: what is within a factor of 2**16 of the largest is exact),
else 32 for fewer than 2**31. The bits may differ between these two classes, so the numerics id names the class; within
one, nothing depends on the count.
"""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.runtime.launch import Int, Launch, Scratch
from triplan.backends.triton.indexing import fixed_point as fixed, fixed_point_kernels as kernels
from triplan.backends.triton.indexing.points import single
from triplan.backends.triton.indexing.registration import HALF, SUMS, entry
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import ElementKind, PrecisionGuarantee, Support, Target

#: Bits of a significand of f32, the leading one among them.
SIGNIFICAND_BITS = 24
#: Every finite f32 is m * 2**(E - 150), with an integer m below 2**24.
EXPONENT_BIAS = 150


def value_bits(desc: IndexingDescriptor) -> int:
    """V: the bits of a term of the largest exponent."""
    return fixed.SUM_BITS - fixed.headroom(desc)


def applies(desc: IndexingDescriptor, target: Target) -> Support:
    return fixed.fewer_than(fixed.HEADROOM[-1], desc)


def guarantee(desc: IndexingDescriptor) -> Mapping[str, PrecisionGuarantee]:
    return fixed.fixed_guarantee(desc, value_bits(desc))


def numerics(desc: IndexingDescriptor) -> str:
    return f"fixed-sum.{desc.element}.{value_bits(desc)}.v1"


def rank(desc: IndexingDescriptor, target: Target) -> float:
    return fixed.fixed_us(desc, exact=False)


def workspace(desc: IndexingDescriptor, target: Target) -> int:
    return fixed.scratchpad(desc, exact=False).nbytes


@entry(
    "fixed_scaled",
    SUMS,
    elements=(*HALF, "f32"),
    supports=applies,
    rank=rank,
    priority=3,
    guarantee=guarantee,
    numerics=numerics,
    workspace=workspace,
)
def launches(desc: IndexingDescriptor, target: Target) -> list[Launch]:
    pad = fixed.scratchpad(desc, exact=False)
    exponents = Scratch(pad.marks, ElementKind.I32)
    room = value_bits(desc) - SIGNIFICAND_BITS  # bits below those of the largest term's significand
    return fixed.fixed_launches(
        desc,
        exact=False,
        scale=-EXPONENT_BIAS - room,
        passes=[
            (single(kernels.largest_point), exponents),
            (single(kernels.aligned_point), (pad.sums, exponents, Int(room))),
        ],
    )
