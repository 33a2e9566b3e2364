"""Entry ``ordered_sum``: sums in ascending order of position, without scratch."""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.offsets import values
from triplan.backends.triton.indexing import ordered, steps_kernels
from triplan.backends.triton.indexing.registration import ADDED, SUMS, entry
from triplan.backends.triton.indexing.sums import sum_guarantee, sum_numerics
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import PrecisionGuarantee, Target


def guarantee(desc: IndexingDescriptor) -> Mapping[str, PrecisionGuarantee]:
    return sum_guarantee(desc, desc.element.compute, ordered=True)


def numerics(desc: IndexingDescriptor) -> str | None:
    return sum_numerics(desc, "ordered-sum")


@entry(
    "ordered_sum",
    SUMS,
    elements=ADDED,
    supports=ordered.applies,
    rank=ordered.rank,
    priority=1,
    guarantee=guarantee,
    numerics=numerics,
)
def launches(desc: IndexingDescriptor, target: Target) -> list[Launch]:
    return ordered.ordered_launches(desc, steps_kernels.add_step, values, desc.element.compute)
