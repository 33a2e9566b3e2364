"""Kernel ``tiles``: a matrix product with one tile of C per program, read through pointers at any strides."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from triplan.backends.runtime.launch import Launch
from triplan.backends.table import Configuration, kernel
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.gemm import tiles_kernels as kernels
from triplan.backends.triton.gemm.arguments import epilogue_arguments, max_registers, pointer, product_arguments
from triplan.backends.triton.gemm.entries import ELEMENTS, for_products
from triplan.backends.triton.gemm.guarantees import guarantee
from triplan.backends.triton.gemm.matrices import layout
from triplan.backends.triton.gemm.tile_costs import cheapest_tile, tile_us
from triplan.backends.triton.gemm.tile_shapes import Tile, programs_of, tiles_of
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import Support, Target


def launches(desc: MatrixProductDescriptor, tile: Tile) -> list[Launch]:
    """``tiles_kernel`` with one tile per program; nothing for an empty C."""
    c = desc.operand("c")
    if c.numel == 0:
        return []
    args, constants = product_arguments(desc, tile)
    epilogue, epilogue_constants = epilogue_arguments(desc)
    return [
        Launch(
            kernels.tiles_kernel,
            programs_of(desc, tile),
            {"c": pointer(c), **args, **epilogue},
            {**constants, **epilogue_constants},
            num_warps=tile.warps,
            num_stages=tile.stages,
            max_registers=max_registers(desc, tile),
        )
    ]


def supports(desc: MatrixProductDescriptor, target: Target) -> Support:
    """Whether there are tiles to choose from, and the grid has room for every one."""
    most = max((programs_of(desc, tile) for tile in tiles_of(desc, target)), default=-1)  # 0 for an empty C
    if most < 0:
        return Support.no(f"no tile fits {target.shared_memory} bytes of shared memory")
    return fits_grid(most)


def rank(desc: MatrixProductDescriptor, target: Target) -> float:
    """Estimated microseconds with the cheapest tile."""
    return tile_us(desc, cheapest_tile(desc, target), target)


def configurations(desc: MatrixProductDescriptor, target: Target) -> Mapping[str, Configuration]:
    """Each tile that suits ``desc``."""
    return {
        str(tile): Configuration(tile_us(desc, tile, target), partial(launches, desc, tile))
        for tile in tiles_of(desc, target)
    }


@for_products(
    partial(
        kernel,
        name="tiles",
        version=11,
        elements=ELEMENTS,
        supports=supports,
        rank=rank,
        guarantee=guarantee,
        layout=layout,
        configurations=configurations,
    )
)
def tiles(desc: MatrixProductDescriptor, target: Target) -> list[Launch]:
    return launches(desc, cheapest_tile(desc, target))
