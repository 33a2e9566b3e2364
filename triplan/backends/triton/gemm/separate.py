"""Kernel ``separate`` of the backward op: each wanted gradient as a product of its own, then the sums of columns.

The products differ in shape: with many rows, that of db has few tiles and a long k. Each is computed by the kernel of
gemm that is the cheapest for it, of those that read any layout. Both read dc: where no vectors can read it as it lies,
they may share a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from triplan.backends.runtime.launch import Launch
from triplan.backends.table import Build, kernel
from triplan.backends.triton.gemm import column_sums, copies, fma, gemv, mma, outer, repacked, split_k, tiles
from triplan.backends.triton.gemm.copies import MatrixCopy
from triplan.backends.triton.gemm.entries import BACKWARD, ELEMENTS
from triplan.backends.triton.gemm.guarantees import backward_guarantee
from triplan.backends.triton.gemm.matrices import backward_layout, is_elementwise, unit_axis
from triplan.backends.triton.gemm.products import Product, gradient_products
from triplan.descriptors import GemmBackwardDescriptor, GemmDescriptor
from triplan.sku import SUPPORTED, PrecisionGuarantee, Support, Target
from triplan.sku.facts import fact


class Way(NamedTuple):
    """A kernel of gemm, as the kernel table has it."""

    supports: Callable[[Any, Target], Support]
    rank: Callable[[Any, Target], float]
    workspace: Callable[[Any, Target], int]
    build: Build


def no_workspace(desc: GemmDescriptor, target: Target) -> int:
    """Of a kernel that needs none."""
    return 0


WAYS = (
    Way(tiles.supports, tiles.rank, no_workspace, tiles.tiles),
    Way(split_k.supports, split_k.rank, split_k.workspace, split_k.split_k),
    Way(gemv.supports, gemv.rank, gemv.workspace, gemv.gemv),
    Way(outer.supports, outer.rank, no_workspace, outer.outer),
    Way(fma.supports, fma.rank, fma.workspace, fma.fma),
    Way(repacked.supports, repacked.rank, repacked.workspace, repacked.repacked),
    Way(mma.supports, mma.rank, mma.workspace, mma.mma),
)


#: A shared copy of dc is made if the estimate with it is at most such a part of that without. Untuned.
SHARED_WORTH = 0.97


@fact
def way_of(desc: GemmDescriptor, target: Target, ways: tuple[Way, ...]) -> Way:
    """The cheapest kernel that supports a product; the first if none does."""
    supported = (way for way in ways if way.supports(desc, target))
    return min(supported, key=lambda way: way.rank(desc, target), default=ways[0])


def _products_us(desc: GemmBackwardDescriptor, target: Target, ways: tuple[Way, ...]) -> float:
    """Estimated microseconds of the products; infinite if no kernel takes one of them."""
    found = [(p.desc, way_of(p.desc, target, ways)) for p in gradient_products(desc).values()]
    return sum(way.rank(product, target) if way.supports(product, target) else math.inf for product, way in found)


@fact
def shared(desc: GemmBackwardDescriptor, target: Target, ways: tuple[Way, ...]) -> tuple[MatrixCopy, ...]:
    """dc, if both products are estimated to be faster by more than a copy of it takes."""
    dc = desc.operand("dc")
    if not (desc.wants_da and desc.wants_db and is_elementwise(dc)) or 0 in (desc.m, desc.n, desc.k):
        return ()
    copy = MatrixCopy(dc, 0 if unit_axis(dc) == 0 else 1)
    others = _products_us(copies.of_copies(desc, (copy,)), target, ways) + copy.cost_us
    worth = others < SHARED_WORTH * _products_us(desc, target, ways)
    return (copy,) if worth and copies.counted((copy,)) else ()


def products_of(desc: GemmBackwardDescriptor, target: Target, ways: tuple[Way, ...]) -> Iterable[Product]:
    """The products, on the copy of dc if they share one."""
    return gradient_products(copies.of_copies(desc, shared(desc, target, ways))).values()


def supports(desc: GemmBackwardDescriptor, target: Target, ways: tuple[Way, ...] = WAYS) -> Support:
    """Whether a kernel takes every product."""
    each = (way_of(p.desc, target, ways).supports(p.desc, target) for p in products_of(desc, target, ways))
    return next((s for s in each if not s), SUPPORTED)


def rank(desc: GemmBackwardDescriptor, target: Target, ways: tuple[Way, ...] = WAYS) -> float:
    """Estimated microseconds."""
    each = (way_of(p.desc, target, ways).rank(p.desc, target) for p in products_of(desc, target, ways))
    return column_sums.cost_us(desc) + sum(copy.cost_us for copy in shared(desc, target, ways)) + sum(each)


def workspace(desc: GemmBackwardDescriptor, target: Target, ways: tuple[Way, ...] = WAYS) -> int:
    """Bytes of the copy of dc and of what the products need, or of the sums of columns: these take turns."""
    each = (way_of(p.desc, target, ways).workspace(p.desc, target) for p in products_of(desc, target, ways))
    products = copies.workspace_bytes(shared(desc, target, ways)) + max(each, default=0)
    return max(column_sums.workspace(desc), products)


def launches(desc: GemmBackwardDescriptor, target: Target, ways: tuple[Way, ...] = WAYS) -> list[Launch]:
    """The products, then the sums of columns."""
    found: list[Launch] = []
    for p in products_of(desc, target, ways):
        found += [p.on_operands(x) for x in way_of(p.desc, target, ways).build(p.desc, target)]
    return [*copies.around(shared(desc, target, ways), found), *column_sums.launches(desc)]


def guarantee(desc: GemmBackwardDescriptor) -> Mapping[str, PrecisionGuarantee]:
    return backward_guarantee(desc, column_sums.roundings(desc))


@kernel(
    op=BACKWARD,
    name="separate",
    version=18,
    elements=ELEMENTS,
    supports=supports,
    rank=rank,
    workspace=workspace,
    guarantee=guarantee,
    layout=backward_layout,
)
def separate(desc: GemmBackwardDescriptor, target: Target) -> list[Launch]:
    return launches(desc, target)
