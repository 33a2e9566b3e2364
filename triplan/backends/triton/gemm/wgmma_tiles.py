"""Kernel ``wgmma_tiles``: a matrix product on Hopper by TMA and wgmma, one tile per program, without a loading warp.

Its smaller tiles suit few rows of A. It starts faster than ``wgmma``, and takes no batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from triplan.backends.runtime.launch import Launch
from triplan.backends.table import Configuration
from triplan.backends.triton.gemm.entries import hopper_kernel
from triplan.backends.triton.gemm.guarantees import guarantee
from triplan.backends.triton.gemm.matrices import layout
from triplan.backends.triton.gemm.rings import Ring, cheapest_ring, ring_us, rings_of, tiles_in
from triplan.backends.triton.gemm.tma import common_arguments, supports
from triplan.backends.triton.gemm.wgmma_tiles_kernels import wgmma_tiles_kernel
from triplan.descriptors import GemmDescriptor
from triplan.sku import Target


def launches(desc: GemmDescriptor, ring: Ring) -> list[Launch]:
    """``wgmma_tiles_kernel`` with one program per tile; nothing for an empty C."""
    if desc.operand("c").numel == 0:
        return []
    args, constants = common_arguments(desc, ring)
    args.pop("c0_batch")
    return [
        Launch(
            wgmma_tiles_kernel,
            tiles_in(desc, ring),
            args,
            {**constants, "BLOCK_M": ring.m},
            num_warps=ring.m // 16,
            overlaps=True,
        )
    ]


def rank(desc: GemmDescriptor, target: Target) -> float:
    """Estimated microseconds with the cheapest ring."""
    return ring_us(desc, cheapest_ring(desc, target, specialised=False), target)


def configurations(desc: GemmDescriptor, target: Target) -> Mapping[str, Configuration]:
    """Each ring that fits."""
    return {
        str(ring): Configuration(ring_us(desc, ring, target), partial(launches, desc, ring))
        for ring in rings_of(desc, target, specialised=False)
    }


@hopper_kernel(
    op="gemm",
    name="wgmma_tiles",
    supports=supports,
    rank=rank,
    guarantee=guarantee,
    layout=layout,
    configurations=configurations,
)
def wgmma_tiles(desc: GemmDescriptor, target: Target) -> list[Launch]:
    return launches(desc, cheapest_ring(desc, target, specialised=False))
