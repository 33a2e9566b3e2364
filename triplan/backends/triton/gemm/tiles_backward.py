"""Kernel ``tiles`` of the backward op: gemm's ``tiles`` once for each wanted gradient, then the sums of columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from triplan.backends.runtime.launch import Launch
from triplan.backends.table import kernel
from triplan.backends.triton.gemm import column_sums, tiles
from triplan.backends.triton.gemm.entries import BACKWARD, ELEMENTS
from triplan.backends.triton.gemm.guarantees import backward_guarantee
from triplan.backends.triton.gemm.matrices import backward_layout
from triplan.backends.triton.gemm.products import Product, gradient_products
from triplan.backends.triton.gemm.tile_costs import cheapest_tile
from triplan.backends.triton.gemm.tile_shapes import Tile
from triplan.descriptors import GemmBackwardDescriptor
from triplan.sku import SUPPORTED, PrecisionGuarantee, Support, Target


def launches(desc: GemmBackwardDescriptor, tile_of: Callable[[Product], Tile]) -> list[Launch]:
    """Every wanted gradient as a product in the tile that ``tile_of`` gives, and the sums of columns."""
    found: list[Launch] = []
    for p in gradient_products(desc).values():
        found += [p.on_operands(x) for x in tiles.launches(p.desc, tile_of(p))]
    return [*found, *column_sums.launches(desc)]


def supports(desc: GemmBackwardDescriptor, target: Target) -> Support:
    """Whether ``tiles`` takes every product."""
    refused = (s for p in gradient_products(desc).values() if not (s := tiles.supports(p.desc, target)))
    return next(refused, SUPPORTED)


def rank(desc: GemmBackwardDescriptor, target: Target) -> float:
    """Estimated microseconds with the cheapest tiles."""
    return column_sums.cost_us(desc) + sum(tiles.rank(p.desc, target) for p in gradient_products(desc).values())


def workspace(desc: GemmBackwardDescriptor, target: Target) -> int:
    """Bytes of the partial sums of columns."""
    return column_sums.workspace(desc)


def guarantee(desc: GemmBackwardDescriptor) -> Mapping[str, PrecisionGuarantee]:
    return backward_guarantee(desc, column_sums.roundings(desc))


@kernel(
    op=BACKWARD,
    name="tiles",
    elements=ELEMENTS,
    supports=supports,
    rank=rank,
    workspace=workspace,
    guarantee=guarantee,
    layout=backward_layout,
)
def tiles_backward(desc: GemmBackwardDescriptor, target: Target) -> list[Launch]:
    return launches(desc, lambda p: cheapest_tile(p.desc, target))
