"""Entry ``ordered_last``: stores in ascending order of position, so that the last write to an element wins."""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.common.offsets import bits
from triplan.backends.triton.indexing import ordered, steps_kernels
from triplan.backends.triton.indexing.copies import last_guarantee
from triplan.backends.triton.indexing.registration import COPIED, STORES, entry
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import Target


def numerics(desc: IndexingDescriptor) -> str:
    return f"ordered-last.{desc.element}.v1"


@entry(
    "ordered_last",
    STORES,
    elements=COPIED,
    supports=ordered.applies,
    rank=ordered.rank,
    guarantee=last_guarantee,
    numerics=numerics,
)
def launches(desc: IndexingDescriptor, target: Target) -> list[Launch]:
    return ordered.ordered_launches(desc, steps_kernels.last_step, bits, desc.element.bits)
