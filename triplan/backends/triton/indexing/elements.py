"""Entry ``elements``: gathers and stores of operands of any strides, one point per lane."""

from __future__ import annotations

from triplan.backends.triton.common.card import LAUNCH_US
from triplan.backends.triton.indexing.copies import copy_us, register
from triplan.backends.triton.indexing.geometry import geometry
from triplan.backends.triton.indexing.registration import always
from triplan.backends.triton.indexing.traversals import elements_launch
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import Target

# Fitted to ``bench anywhere indexing --seed 1`` on an H200.
#: Microseconds that a program of ``rows`` takes longer to its first access.
SOONER_US = 0.3
#: Time relative to ``rows`` where one index serves a row, and where every element has one.
SLOWER, SLOWER_FULL = 1.4, 1.05


def rank(desc: IndexingDescriptor, target: Target) -> float:
    g = geometry(desc)
    moved = copy_us(g) - LAUNCH_US
    return LAUNCH_US - SOONER_US + (SLOWER_FULL if g.full else SLOWER) * moved


register("elements", elements_launch, rank, always)
