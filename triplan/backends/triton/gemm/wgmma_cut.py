"""Kernel ``wgmma_cut``: ``wgmma`` with the tiles of the last wave cut along k, as ``cuts`` says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from triplan.backends.runtime.launch import Int, Launch
from triplan.backends.table import Configuration
from triplan.backends.triton.gemm import cuts
from triplan.backends.triton.gemm.cuts import Cut
from triplan.backends.triton.gemm.entries import for_products, hopper_kernel
from triplan.backends.triton.gemm.guarantees import guarantee
from triplan.backends.triton.gemm.matrices import layout
from triplan.backends.triton.gemm.rings import WRITING_K, Ring, limited_us, rings_of, tile_us, tiles_in
from triplan.backends.triton.gemm.tile_costs import activation_us
from triplan.backends.triton.gemm.tma import supports as maps
from triplan.backends.triton.gemm.wgmma import ring_launch
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import SUPPORTED, Support, Target
from triplan.sku.facts import fact

#: Least steps along k of a part. Untuned.
LEAST_STEPS = 4
#: Part of the time of ``wgmma`` that a cut may be estimated to take: of near ties the launch without a workspace.
WORTH = 0.97


@fact
def cuts_of(desc: MatrixProductDescriptor, target: Target) -> tuple[Cut[Ring], ...]:
    """Each ring whose tiles two warpgroups share, cut in each way."""
    rings = (ring for ring in rings_of(desc, target, specialised=True) if ring.is_plain and not ring.pingpong)
    return tuple(
        cut
        for ring in rings
        for cut in cuts.cuts_of(ring, tiles_in(desc, ring), target.sm_count, -(-desc.k // ring.k), LEAST_STEPS)
    )


def cut_us(desc: MatrixProductDescriptor, cut: Cut[Ring], target: Target) -> float:
    """Estimated microseconds of both launches."""
    sms, ring, items = target.sm_count, cut.tile, cut.rest * cut.parts
    rounds = math.ceil(items / sms)
    whole_us = tile_us(ring, desc.k) + activation_us(desc, ring.m * ring.n)
    # Accumulators are twice as long as elements of C, which ``tile_us`` has written.
    part_us = tile_us(ring, cut.depth * ring.k + WRITING_K, min(items / sms, 1.0))
    waves = cut.whole / sms + rounds * cut.depth * ring.k / desc.k
    return limited_us(desc, ring, waves, cut.whole / sms * whole_us + rounds * part_us) + cuts.sum_us(cut)


@fact
def cheapest_cut(desc: MatrixProductDescriptor, target: Target) -> Cut[Ring]:
    """The cut of the lowest estimate; of equal ones that of the fewest parts."""
    return min(cuts_of(desc, target), key=lambda cut: (cut_us(desc, cut, target), cut.parts))


def launches(desc: MatrixProductDescriptor, cut: Cut[Ring], target: Target) -> list[Launch]:
    """Both launches; nothing for an empty C."""
    if desc.operand("c").numel == 0:
        return []
    args = {**cuts.arguments(cut), "parts": Int(cut.parts), "depth": Int(cut.depth)}
    return [ring_launch(desc, cut.tile, target, cut.items, args), cuts.sum_launch(desc, cut, cut.tile.group)]


def supports(desc: MatrixProductDescriptor, target: Target, roomy: bool = False) -> Support:
    """Whether TMA can read and write the operands (``roomy``: see ``tma``), and there is a tile to cut."""
    if not (found := maps(desc, target, roomy)):
        return found
    if desc.symmetric:
        return Support.no("cuts no tiles of a symmetric c, of which wgmma computes the lower triangle")
    if not cuts_of(desc, target):
        return Support.no(f"every wave of tiles is full, or k = {desc.k} has too few steps to be cut")
    return SUPPORTED


def rank(desc: MatrixProductDescriptor, target: Target) -> float:
    """Estimated microseconds with the cheapest cut, and what it has to save."""
    return cut_us(desc, cheapest_cut(desc, target), target) / WORTH


def workspace(desc: MatrixProductDescriptor, target: Target) -> int:
    """Bytes of the parts of the cheapest cut."""
    return cheapest_cut(desc, target).nbytes


def configurations(desc: MatrixProductDescriptor, target: Target) -> Mapping[str, Configuration]:
    """Each cut."""
    return {
        str(cut): Configuration(cut_us(desc, cut, target), partial(launches, desc, cut, target), cut.nbytes)
        for cut in cuts_of(desc, target)
    }


@for_products(
    partial(
        hopper_kernel,
        name="wgmma_cut",
        version=2,
        supports=supports,
        rank=rank,
        workspace=workspace,
        guarantee=guarantee,
        layout=layout,
        configurations=configurations,
    )
)
def wgmma_cut(desc: MatrixProductDescriptor, target: Target) -> list[Launch]:
    return launches(desc, cheapest_cut(desc, target), target)
