"""Entry ``rows``: gathers and stores of packed operands, by tiles of whole rows."""

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
from triplan.backends.triton.indexing.registration import COPIED, GATHERS, STORES, entry, rows_apply
from triplan.backends.triton.indexing.traversals import rows_launch
from triplan.descriptors import IndexingDescriptor
from triplan.sku import Target


def rank(desc: IndexingDescriptor, target: Target) -> float:
    return copy_us(geometry(desc))


@entry(
    "rows",
    GATHERS,
    elements=COPIED,
    supports=rows_apply,
    rank=rank,
    guarantee=gather_guarantee,
    numerics=gather_numerics,
)
def gather(desc: IndexingDescriptor, target: Target) -> list[Launch]:
    return copy_launches(desc, points.gather_point, rows_launch)


@entry("rows", STORES, elements=COPIED, supports=rows_apply, rank=rank, guarantee=any_guarantee)
def store(desc: IndexingDescriptor, target: Target) -> list[Launch]:
    return copy_launches(desc, points.store_point, rows_launch)
