"""Kernel ``tiles_invariant`` of the backward op: gemm's ``tiles_invariant`` once for each wanted gradient.

A row of da then keeps its bits whatever the number of rows. db and dbias sum over the rows, so with either no kernel is
batch-invariant.
"""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.runtime.launch import Launch
from triplan.backends.table import kernel
from triplan.backends.triton.gemm import column_sums, tiles
from triplan.backends.triton.gemm.entries import BACKWARD, ELEMENTS
from triplan.backends.triton.gemm.guarantees import backward_guarantee
from triplan.backends.triton.gemm.matrices import backward_layout
from triplan.backends.triton.gemm.products import Product, gradient_products
from triplan.backends.triton.gemm.tile_costs import tile_us
from triplan.backends.triton.gemm.tile_shapes import Tile
from triplan.backends.triton.gemm.tiles_invariant import RANK_MARGIN, invariant_tile, tile_class
from triplan.descriptors import GemmBackwardDescriptor
from triplan.sku import SUPPORTED, PrecisionGuarantee, Support, Target


def _tile(p: Product, target: Target) -> Tile:
    return invariant_tile(p.desc, target, p.fixed)


def supports(desc: GemmBackwardDescriptor, target: Target) -> Support:
    """Whether ``tiles`` takes every product."""
    refused = (s for p in gradient_products(desc).values() if not (s := tiles.supports(p.desc, target)))
    return next(refused, SUPPORTED)


def rank(desc: GemmBackwardDescriptor, target: Target) -> float:
    """Estimated microseconds."""
    each = (tile_us(p.desc, _tile(p, target), target) for p in gradient_products(desc).values())
    return RANK_MARGIN * (column_sums.cost_us(desc) + sum(each))


def workspace(desc: GemmBackwardDescriptor, target: Target) -> int:
    """Bytes of the partial sums of columns."""
    return column_sums.workspace(desc)


def guarantee(desc: GemmBackwardDescriptor) -> Mapping[str, PrecisionGuarantee]:
    return backward_guarantee(desc, column_sums.roundings(desc), invariant=True)


def numerics(desc: GemmBackwardDescriptor) -> str:
    """Equal for gradients whose rows of da are accumulated in the same order."""
    da = gradient_products(desc).get("da")
    how = "" if da is None else f".{tile_class(da.desc, da.fixed)}-{da.fixed}"
    return f"gemm-backward-tiles-invariant.{desc.multiplicands}.{desc.out}{how}.v2"


@kernel(
    op=BACKWARD,
    name="tiles_invariant",
    version=3,
    elements=ELEMENTS,
    supports=supports,
    rank=rank,
    workspace=workspace,
    guarantee=guarantee,
    numerics=numerics,
    layout=backward_layout,
)
def tiles_invariant_backward(desc: GemmBackwardDescriptor, target: Target) -> list[Launch]:
    found: list[Launch] = []
    for p in gradient_products(desc).values():
        found += [p.on_operands(x) for x in tiles.launches(p.desc, _tile(p, target))]
    return [*found, *column_sums.launches(desc)]
