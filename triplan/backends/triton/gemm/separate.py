"""Kernel ``separate`` of the backward op: each wanted gradient as a product of its own, then the sums of columns.

The products differ in shape: with many rows, that of db has few tiles and a long k. Each is computed by the kernel of
gemm that is the cheapest for it, of those that read any layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from triplan.backends.runtime.launch import Launch
from triplan.backends.table import Build, kernel
from triplan.backends.triton.gemm import column_sums, fma, gemv, outer, repacked, split_k, tiles
from triplan.backends.triton.gemm.entries import BACKWARD, ELEMENTS
from triplan.backends.triton.gemm.guarantees import backward_guarantee
from triplan.backends.triton.gemm.matrices import backward_layout
from triplan.backends.triton.gemm.products import gradient_products
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
)


@fact
def way_of(desc: GemmDescriptor, target: Target, ways: tuple[Way, ...]) -> Way:
    """The cheapest kernel that supports a product; the first if none does."""
    supported = (way for way in ways if way.supports(desc, target))
    return min(supported, key=lambda way: way.rank(desc, target), default=ways[0])


def supports(desc: GemmBackwardDescriptor, target: Target, ways: tuple[Way, ...] = WAYS) -> Support:
    """Whether a kernel takes every product."""
    each = (way_of(p.desc, target, ways).supports(p.desc, target) for p in gradient_products(desc).values())
    return next((s for s in each if not s), SUPPORTED)


def rank(desc: GemmBackwardDescriptor, target: Target, ways: tuple[Way, ...] = WAYS) -> float:
    """Estimated microseconds."""
    each = (way_of(p.desc, target, ways).rank(p.desc, target) for p in gradient_products(desc).values())
    return column_sums.cost_us(desc) + sum(each)


def workspace(desc: GemmBackwardDescriptor, target: Target, ways: tuple[Way, ...] = WAYS) -> int:
    """Bytes of what products or sums of columns need, which take turns."""
    each = (way_of(p.desc, target, ways).workspace(p.desc, target) for p in gradient_products(desc).values())
    return max((column_sums.workspace(desc), *each))


def launches(desc: GemmBackwardDescriptor, target: Target, ways: tuple[Way, ...] = WAYS) -> list[Launch]:
    """The products, then the sums of columns."""
    found: list[Launch] = []
    for p in gradient_products(desc).values():
        found += [p.on_operands(x) for x in way_of(p.desc, target, ways).build(p.desc, target)]
    return [*found, *column_sums.launches(desc)]


def guarantee(desc: GemmBackwardDescriptor) -> Mapping[str, PrecisionGuarantee]:
    return backward_guarantee(desc, column_sums.roundings(desc))


@kernel(
    op=BACKWARD,
    name="separate",
    version=4,
    elements=ELEMENTS,
    supports=supports,
    rank=rank,
    workspace=workspace,
    guarantee=guarantee,
    layout=backward_layout,
)
def separate(desc: GemmBackwardDescriptor, target: Target) -> list[Launch]:
    return launches(desc, target)
