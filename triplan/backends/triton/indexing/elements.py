"""Entry ``elements``: gathers and stores of operands of any strides, one point per lane."""

from __future__ import annotations

from triplan.backends.triton.common.card import LAUNCH_US
from triplan.backends.triton.indexing.copies import copy_us, register
from triplan.backends.triton.indexing.geometry import geometry
from triplan.backends.triton.indexing.registration import always
from triplan.backends.triton.indexing.traversals import elements_launch
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import Target

# From ``bench anywhere indexing``: seeds 1 to 3 on an H200, seed 4 on an H100.
#: Microseconds that a program of ``rows`` takes longer to its first access.
SOONER_US = 0.3
#: Microseconds of an element, besides moving it: where one index serves a row, each lane reads it and its own address.
ELEMENT_US = 0.95e-6
#: Time relative to ``rows``, where every element has an index.
SLOWER = 1.05


def rank(desc: IndexingDescriptor, target: Target) -> float:
    g = geometry(desc)
    moved = copy_us(g) - LAUNCH_US
    if not g.full:
        return LAUNCH_US - SOONER_US + moved + ELEMENT_US * g.numel
    return LAUNCH_US - SOONER_US + SLOWER * moved


register("elements", elements_launch, rank, always)
