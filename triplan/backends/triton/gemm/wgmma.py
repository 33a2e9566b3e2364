"""Kernel ``wgmma``: a matrix product on Hopper by TMA and wgmma, warp-specialised and persistent.

One warp loads, two or three warpgroups multiply, and the tiles are dealt to one program per multiprocessor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from triplan.backends.runtime.launch import Arg, Counter, Int, Launch
from triplan.backends.table import Configuration
from triplan.backends.triton.gemm.entries import for_products, hopper_kernel
from triplan.backends.triton.gemm.guarantees import guarantee
from triplan.backends.triton.gemm.matrices import is_row_major, layout
from triplan.backends.triton.gemm.rings import (
    Ring,
    cheapest_ring,
    has_one_round,
    lower,
    meeting_rounds,
    ring_us,
    rings_of,
    tiles_in,
)
from triplan.backends.triton.gemm.tma import common_arguments, operand_maps, shared_layout, supports, tensor_map
from triplan.backends.triton.gemm.wgmma_kernels import wgmma_kernel
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import Target

#: Arguments of ``wgmma_kernel`` that are None where no tile is cut along k (``wgmma_cut``).
CUT_ARGUMENTS = ("partial", "whole", "parts", "depth")
#: Constexprs of ``wgmma_kernel`` that are None without a batch.
BATCH_CONSTEXPRS = ("A_EACH", "B_EACH", "A_SHARED", "B_SHARED", "C_SHARED")


def _batch_constexprs(desc: MatrixProductDescriptor, ring: Ring) -> dict[str, object]:
    """Whether each factor has a matrix per product, and the layouts of blocks as matrices; all None without a batch."""
    if not desc.lead:
        return dict.fromkeys(BATCH_CONSTEXPRS)
    each = {f"{name.upper()}_EACH": int(0 not in desc.operand(name).layout.zero_axes) for name in "ab"}
    maps = operand_maps(desc, ring).items()
    return {**each, **{f"{name.upper()}_SHARED": shared_layout(m.block[1:], m.element) for name, m in maps}}


def launches(desc: MatrixProductDescriptor, ring: Ring, target: Target) -> list[Launch]:
    """``wgmma_kernel`` with one program per multiprocessor, or per tile if there are fewer; nothing for an empty C."""
    if desc.operand("c").numel == 0:
        return []
    return [ring_launch(desc, ring, target, tiles_in(desc, ring), dict.fromkeys(CUT_ARGUMENTS))]


def ring_launch(
    desc: MatrixProductDescriptor, ring: Ring, target: Target, items: int, cut: Mapping[str, Arg]
) -> Launch:
    """``wgmma_kernel`` over so many ``items``: tiles, or as ``cut``, its arguments of ``CUT_ARGUMENTS``, says."""
    args, constants = common_arguments(desc, ring)
    programs = min(items, target.sm_count)
    rounds = meeting_rounds(items, programs, desc.k)
    b = desc.operand("b")
    rest = tensor_map("b", b.element, ring.k, ring.rest, is_row_major(b)) if ring.rest else None
    return Launch(
        wgmma_kernel,
        programs,
        {
            **args,
            "batch": Int(math.prod(desc.lead)),
            **cut,
            "counter": Counter(),
            "rounds": Int(rounds),
            "b_rest": rest,
        },
        {
            **constants,
            "PIECES": ring.pieces,
            "BUFFERS": ring.buffers,
            "LOWER": lower(desc, ring),
            **_batch_constexprs(desc, ring),
        },
        num_warps=4,
        overlaps=has_one_round(items, programs),
    )


def rank(desc: MatrixProductDescriptor, target: Target) -> float:
    """Estimated microseconds with the cheapest ring."""
    return ring_us(desc, cheapest_ring(desc, target, specialised=True), target)


def configurations(desc: MatrixProductDescriptor, target: Target) -> Mapping[str, Configuration]:
    """Each ring that fits."""
    return {
        str(ring): Configuration(ring_us(desc, ring, target), partial(launches, desc, ring, target))
        for ring in rings_of(desc, target, specialised=True)
    }


@for_products(
    partial(
        hopper_kernel,
        name="wgmma",
        supports=supports,
        rank=rank,
        guarantee=guarantee,
        layout=layout,
        configurations=configurations,
    )
)
def wgmma(desc: MatrixProductDescriptor, target: Target) -> list[Launch]:
    return launches(desc, cheapest_ring(desc, target, specialised=True), target)
