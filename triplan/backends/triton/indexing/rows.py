"""Entry ``rows``: gathers and stores of packed operands, by tiles of whole rows."""

from __future__ import annotations

from triplan.backends.runtime.launch import power_of_two_in
from triplan.backends.triton.common.card import LAUNCH_US
from triplan.backends.triton.indexing import points
from triplan.backends.triton.indexing.copies import copy_us, register, stores_us
from triplan.backends.triton.indexing.geometry import geometry
from triplan.backends.triton.indexing.registration import STORES, rows_apply
from triplan.backends.triton.indexing.traversals import rows_launch, rows_tile
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import Target

#: Bytes of the widest access of a lane.
VECTOR_BYTES = 16
#: Microseconds of an access of one lane: a vector, or where rows begin anywhere an element; or the index of a row. From
#: ``bench anywhere indexing``, seeds 1, 2, 12, 13 and 51 on an H200: embeddings of 23 to 16385 elements of one or two
#: bytes.
ACCESS_US = 0.8e-6
#: Lanes of a program.
LANES = 128


def rank(desc: IndexingDescriptor, target: Target) -> float:
    """By bytes, by stores to sectors, or by the accesses of lanes, also of those behind the end of a row: each lane
    reads the index of each row that it has elements of."""
    g = geometry(desc)
    inner, cols = g.fold[2], rows_tile(desc, points.STORE if desc.op in STORES else points.GATHER)[1]
    lanes = -(-inner // cols) * cols / max(inner, 1)
    moved = copy_us(g) - LAUNCH_US
    if g.full:
        if desc.op in STORES:
            moved = max(moved, stores_us(g, g.numel))
        return LAUNCH_US + lanes * moved
    vector = min(power_of_two_in(inner), max(VECTOR_BYTES // desc.element.itemsize, 1))
    accesses = g.numel * lanes / vector * (1 + min(LANES * vector / cols, 1))
    return LAUNCH_US + max(moved, ACCESS_US * accesses)


register("rows", rows_launch, rank, rows_apply)
