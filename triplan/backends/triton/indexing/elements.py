"""Entry ``elements``: gathers and stores of operands of any strides, one point per lane."""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.indexing import points_kernels as points
from triplan.backends.triton.indexing.copies import (
    any_guarantee,
    copy_launches,
    copy_us,
    gather_guarantee,
    gather_numerics,
)
from triplan.backends.triton.indexing.geometry import geometry
from triplan.backends.triton.indexing.registration import COPIED, GATHERS, STORES, entry
from triplan.backends.triton.indexing.traversals import elements_launch
from triplan.descriptors import IndexingDescriptor
from triplan.sku import Target

#: Time relative to ``rows``, where both apply. Untuned.
SLOWER = 1.5


def rank(desc: IndexingDescriptor, target: Target) -> float:
    return SLOWER * copy_us(geometry(desc))


@entry("elements", GATHERS, elements=COPIED, rank=rank, guarantee=gather_guarantee, numerics=gather_numerics)
def gather(desc: IndexingDescriptor, target: Target) -> list[Launch]:
    return copy_launches(desc, points.gather_point, elements_launch)


@entry("elements", STORES, elements=COPIED, rank=rank, guarantee=any_guarantee)
def store(desc: IndexingDescriptor, target: Target) -> list[Launch]:
    return copy_launches(desc, points.store_point, elements_launch)
