"""Entry ``elements``: gathers and stores of operands of any strides, one point per lane."""

from __future__ import annotations

from triplan.backends.triton.indexing.copies import copy_us, register
from triplan.backends.triton.indexing.geometry import geometry
from triplan.backends.triton.indexing.registration import always
from triplan.backends.triton.indexing.traversals import elements_launch
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import Target

#: Time relative to ``rows``, where both apply. Untuned.
SLOWER = 1.5


def rank(desc: IndexingDescriptor, target: Target) -> float:
    return SLOWER * copy_us(geometry(desc))


register("elements", elements_launch, rank, always)
