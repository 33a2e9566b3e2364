"""Entry ``rows``: gathers and stores of packed operands, by tiles of whole rows."""

from __future__ import annotations

from triplan.backends.triton.indexing.copies import copy_us, register
from triplan.backends.triton.indexing.geometry import geometry
from triplan.backends.triton.indexing.registration import rows_apply
from triplan.backends.triton.indexing.traversals import rows_launch
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import Target


def rank(desc: IndexingDescriptor, target: Target) -> float:
    return copy_us(geometry(desc))


register("rows", rows_launch, rank, rows_apply)
