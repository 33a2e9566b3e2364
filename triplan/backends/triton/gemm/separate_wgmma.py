"""Kernel ``separate_wgmma`` of the backward op: ``separate``, with the kernels that read by TMA among its choices.

Where TMA can map every matrix, ``wgmma`` has both products in one launch. Here each product has what suits it: one may
need copies (``realigned``), while the other is a matrix times a vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from triplan.backends.runtime.launch import Launch
from triplan.backends.table import Configuration
from triplan.backends.triton.gemm import realigned, separate, tma, wgmma, wgmma_cut, wgmma_tiles
from triplan.backends.triton.gemm.entries import BACKWARD, hopper_kernel
from triplan.backends.triton.gemm.matrices import backward_layout
from triplan.backends.triton.gemm.separate import Way, no_workspace
from triplan.descriptors import GemmBackwardDescriptor
from triplan.sku import Support, Target


def _tma_ways(cuts: bool) -> tuple[Way, ...]:
    """The kernels that read by TMA; without ``cuts`` their tiles are whole, so that only copies need workspace."""
    cut = Way(wgmma_cut.supports, wgmma_cut.rank, wgmma_cut.workspace, wgmma_cut.wgmma_cut)
    return (
        Way(tma.supports, wgmma.rank, no_workspace, wgmma.wgmma),
        Way(tma.supports, wgmma_tiles.rank, no_workspace, wgmma_tiles.wgmma_tiles),
        *([cut] if cuts else []),
        Way(
            realigned.supports,
            partial(realigned.rank, cuts=cuts),
            partial(realigned.workspace, cuts=cuts),
            partial(realigned.launches, cuts=cuts),
        ),
    )


TMA_WAYS = _tma_ways(cuts=True)
WAYS = (*separate.WAYS, *TMA_WAYS)
WHOLE_WAYS = (*separate.WAYS, *_tma_ways(cuts=False))


def supports(desc: GemmBackwardDescriptor, target: Target) -> Support:
    """Whether a product is to be read by TMA, and a kernel takes every product."""
    chosen = [separate.way_of(p.desc, target, WAYS) for p in separate.products_of(desc, target, WAYS)]
    if not any(way in TMA_WAYS for way in chosen):
        return Support.no("for every product a kernel without TMA is estimated to be faster: as separate")
    return separate.supports(desc, target, WAYS)


def configurations(desc: GemmBackwardDescriptor, target: Target) -> Mapping[str, Configuration]:
    """If tiles of a product are cut, also with whole ones, which need less workspace."""
    found = {
        name: Configuration(
            separate.rank(desc, target, ways),
            partial(separate.launches, desc, target, ways),
            separate.workspace(desc, target, ways),
        )
        for name, ways in (("cut tiles", WAYS), ("whole tiles", WHOLE_WAYS))
    }
    return found if found["whole tiles"].workspace < found["cut tiles"].workspace else {}


@hopper_kernel(
    op=BACKWARD,
    name="separate_wgmma",
    version=16,
    supports=supports,
    rank=partial(separate.rank, ways=WAYS),
    workspace=partial(separate.workspace, ways=WAYS),
    guarantee=separate.guarantee,
    layout=backward_layout,
    configurations=configurations,
)
def separate_wgmma(desc: GemmBackwardDescriptor, target: Target) -> list[Launch]:
    return separate.launches(desc, target, WAYS)
