"""Kernel ``integer_tiles``: ``tiles`` for i8, exact in i32. It shares the cost model and configurations of tiles."""

from __future__ import annotations

from functools import partial

from triplan.backends.runtime.launch import Launch
from triplan.backends.table import kernel
from triplan.backends.triton.gemm import tiles
from triplan.backends.triton.gemm.entries import for_products
from triplan.backends.triton.gemm.guarantees import integer_guarantee
from triplan.backends.triton.gemm.matrices import layout
from triplan.backends.triton.gemm.tile_costs import cheapest_tile
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import Support, Target

#: Largest k for which the sum of k products of i8 values, each at most 2**14 in magnitude, always fits i32.
MAX_K = (2**31 - 1) // 2**14


def supports(desc: MatrixProductDescriptor, target: Target) -> Support:
    """Whether no sum can leave i32: Triton's ``mma.sync`` of i8 saturates (``.satfinite``) instead of wrapping."""
    if desc.k > MAX_K:
        return Support.no(f"k = {desc.k}: a sum of more than {MAX_K} products of i8 can leave i32")
    return tiles.supports(desc, target)


def numerics(desc: MatrixProductDescriptor) -> str:
    """Exact results depend on the epilogue alone."""
    return f"gemm-integers.{desc.epilogue}.v1"


@for_products(
    partial(
        kernel,
        name="integer_tiles",
        elements=("i8",),
        supports=supports,
        rank=tiles.rank,
        guarantee=integer_guarantee,
        numerics=numerics,
        layout=layout,
        configurations=tiles.configurations,
    )
)
def integer_tiles(desc: MatrixProductDescriptor, target: Target) -> list[Launch]:
    return tiles.launches(desc, cheapest_tile(desc, target))
