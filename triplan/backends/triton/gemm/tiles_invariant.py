"""Kernel ``tiles_invariant``: ``tiles`` with one tile for every number of rows, so that a row keeps its bits.

The tile fixes the order in which products are accumulated. It may depend on everything but the batch extents: m, or n
where a gradient is computed as its transpose.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from triplan.backends.runtime.launch import Launch
from triplan.backends.table import kernel
from triplan.backends.triton.gemm import tiles
from triplan.backends.triton.gemm.entries import ELEMENTS, for_products
from triplan.backends.triton.gemm.guarantees import invariant_guarantee
from triplan.backends.triton.gemm.matrices import is_elementwise, lacks_unit_stride, layout, vector_elements
from triplan.backends.triton.gemm.tile_costs import tile_us
from triplan.backends.triton.gemm.tile_shapes import Tile, is_turned, max_accumulators, tiles_for
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import MathPrecision, Target

#: Factor on the cost: if ``tiles`` would launch the same tile, it ranks first, because it promises less.
RANK_MARGIN = 1.001
#: The factor without the batch's rows: B, or A where the product is the transpose of a gradient.
Fixed = Literal["a", "b"]


def _is_elementwise(desc: MatrixProductDescriptor, fixed: Fixed) -> bool:
    """Whether the tile is one for elementwise access, judged by k and the ``fixed`` factor alone: what the other
    factor's layout promises can change with the number of rows."""
    width = vector_elements(desc.element.itemsize)
    return lacks_unit_stride(desc) or is_elementwise(desc.operand(fixed)) or bool(desc.k % width)


def invariant_tile(desc: MatrixProductDescriptor, target: Target, fixed: Fixed = "b") -> Tile:
    """The tile for every m (every n if A is ``fixed``): 64 by 128 if there is one, else the largest."""
    found = tiles_for(desc, target, _is_elementwise(desc, fixed), is_turned(desc.operand(fixed)))
    return next((t for t in found if t.m == 64 and t.n == 128), found[0])


def tile_class(desc: MatrixProductDescriptor, fixed: Fixed = "b") -> str:
    """All that ``invariant_tile`` depends on besides the multiplicands: equal ids then mean one tile."""
    elementwise = _is_elementwise(desc, fixed)
    turned = desc.multiplicands is MathPrecision.TF32 and not elementwise and is_turned(desc.operand(fixed))
    # "apart": elementwise access; "lines": vector loads. Ids keep these names: a new name would be a new id.
    return f"{'apart' if elementwise else 'lines'}-{max_accumulators(desc, elementwise)}{'-turned' * turned}"


def numerics(desc: MatrixProductDescriptor) -> str:
    """Equal for products whose rows are accumulated in the same order."""
    return f"gemm-tiles-invariant.{desc.multiplicands}.{desc.out}.{desc.epilogue}.{tile_class(desc)}.v2"


def rank(desc: MatrixProductDescriptor, target: Target) -> float:
    """Estimated microseconds."""
    return tile_us(desc, invariant_tile(desc, target), target) * RANK_MARGIN


@for_products(
    partial(
        kernel,
        name="tiles_invariant",
        elements=ELEMENTS,
        supports=tiles.supports,
        rank=rank,
        guarantee=invariant_guarantee,
        numerics=numerics,
        layout=layout,
    )
)
def tiles_invariant(desc: MatrixProductDescriptor, target: Target) -> list[Launch]:
    return tiles.launches(desc, invariant_tile(desc, target))
