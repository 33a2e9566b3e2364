"""Kernel ``wgmma_cut``: ``wgmma`` with the tiles of the last wave cut along k, so that all multiprocessors share them.

A first launch computes the full waves of tiles, and then parts of the tiles that are left, whose sums it writes into
the workspace. A second one adds the parts in a fixed order and applies the epilogue. To add them within one launch,
programs would have to wait for flags, which nothing resets before a run: a workspace holds anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch
from triplan.backends.table import Configuration
from triplan.backends.triton.common.card import MAX_THREAD_REGISTERS
from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.gemm.arguments import epilogue_arguments, extent, pointer
from triplan.backends.triton.gemm.entries import for_products, hopper_kernel
from triplan.backends.triton.gemm.guarantees import guarantee
from triplan.backends.triton.gemm.matrices import layout
from triplan.backends.triton.gemm.rings import WRITING_K, Ring, limited_us, rings_of, tile_us, tiles_in
from triplan.backends.triton.gemm.split_k import SUM_ELEMENTS
from triplan.backends.triton.gemm.tile_costs import activation_us
from triplan.backends.triton.gemm.tma import supports as maps
from triplan.backends.triton.gemm.wgmma import ring_launch
from triplan.backends.triton.gemm.wgmma_cut_kernels import parts_kernel
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import SUPPORTED, ElementKind, Support, Target
from triplan.sku.facts import fact

#: Most parts of a tile: the second kernel loads one element of each at a time.
MOST_PARTS = 16
#: Fewest parts that are tried in any case, and rounds of all multiprocessors that parts may fill.
FEW_PARTS, ROUNDS = (2, 3, 4), (1, 2, 3)
#: Least steps along k of a part. Untuned.
LEAST_STEPS = 4
#: Microseconds that the second launch takes, and writing parts beside steps; bytes of parts per microsecond. Least
#: squares of logarithms over the cuts of 20 products on an H200, relative to ``wgmma``, by a run that is not published.
PARTS_US, PARTS_BYTES_PER_US = 5.0, 1e7
#: Part of the time of ``wgmma`` that a cut may be estimated to take: of near ties the launch without a workspace.
WORTH = 0.97


@dataclass(frozen=True, slots=True)
class Cut:
    """A ring, and how its tiles are cut.

    Attributes:
        ring: two warpgroups share each of its tiles.
        whole: tiles that are computed as a whole, in full waves.
        rest: tiles that are cut.
        parts: into how many parts along k.
        depth: steps of a part; of the last one some may lie beyond k, but not all.
    """

    ring: Ring
    whole: int
    rest: int
    parts: int
    depth: int

    def __str__(self) -> str:
        return f"{self.ring} x{self.parts}"

    @property
    def items(self) -> int:
        """What the programs of the first launch share: whole tiles and parts."""
        return self.whole + self.rest * self.parts

    @property
    def nbytes(self) -> int:
        """Exact bytes of the parts' accumulators."""
        return self.rest * self.parts * self.ring.m * self.ring.n * ElementKind.F32.itemsize


@fact
def cuts_of(desc: MatrixProductDescriptor, target: Target) -> tuple[Cut, ...]:
    """Each ring with few parts, and with as many as fill few rounds of the multiprocessors.

    Parts have equal depths, so that the last ones of a count may have nothing left: these are dropped.
    """
    found = []
    for ring in rings_of(desc, target, specialised=True):
        rest = tiles_in(desc, ring) % target.sm_count
        if ring.pingpong or rest == 0 or not ring.is_plain:
            continue
        steps = -(-desc.k // ring.k)
        most = min(steps // LEAST_STEPS, MOST_PARTS)
        counts = {min(parts, most) for parts in (*FEW_PARTS, *(n * target.sm_count // rest for n in ROUNDS))}
        for depth in sorted({-(-steps // parts) for parts in counts if parts > 1}, reverse=True):
            found.append(Cut(ring, tiles_in(desc, ring) - rest, rest, -(-steps // depth), depth))
    return tuple(found)


def sum_us(cut: Cut) -> float:
    """Estimated microseconds of the second launch, and of writing what it reads."""
    return PARTS_US + 2 * cut.nbytes / PARTS_BYTES_PER_US


def cut_us(desc: MatrixProductDescriptor, cut: Cut, target: Target) -> float:
    """Estimated microseconds of both launches."""
    sms, ring, items = target.sm_count, cut.ring, cut.rest * cut.parts
    rounds = math.ceil(items / sms)
    whole_us = tile_us(ring, desc.k) + activation_us(desc, ring.m * ring.n)
    # Accumulators are twice as long as elements of C, which ``tile_us`` has written.
    part_us = tile_us(ring, cut.depth * ring.k + WRITING_K, min(items / sms, 1.0))
    waves = cut.whole / sms + rounds * cut.depth * ring.k / desc.k
    return limited_us(desc, ring, waves, cut.whole / sms * whole_us + rounds * part_us) + sum_us(cut)


@fact
def cheapest_cut(desc: MatrixProductDescriptor, target: Target) -> Cut:
    """The cut of the lowest estimate; of equal ones that of the fewest parts."""
    return min(cuts_of(desc, target), key=lambda cut: (cut_us(desc, cut, target), cut.parts))


def sum_launch(desc: MatrixProductDescriptor, cut: Cut) -> Launch:
    """C's tiles that are cut, from their parts."""
    ring = cut.ring
    rows = SUM_ELEMENTS // ring.n
    epilogue, constants = epilogue_arguments(desc)
    return Launch(
        parts_kernel,
        cut.rest * (ring.m // rows),
        {
            **epilogue,
            "partial": Scratch(0, ElementKind.F32),
            "c": pointer(desc.operand("c")),
            "m": extent(desc.m, desc.element.itemsize),
            "n": extent(desc.n, desc.element.itemsize),
            "whole": Int(cut.whole),
            "rest": Int(cut.rest),
            "parts": Int(cut.parts),
        },
        {
            **constants,
            "ROWS": rows,
            "TILE_M": ring.m,
            "TILE_N": ring.n,
            "GROUP_M": ring.group,
            "MOST_PARTS": ceil_power(cut.parts),
        },
        overlaps=True,
        max_registers=MAX_THREAD_REGISTERS,
    )


def launches(desc: MatrixProductDescriptor, cut: Cut, target: Target) -> list[Launch]:
    """Both launches; nothing for an empty C."""
    if desc.operand("c").numel == 0:
        return []
    args: dict[str, Arg] = {
        "partial": Scratch(0, ElementKind.F32),
        "whole": Int(cut.whole),
        "parts": Int(cut.parts),
        "depth": Int(cut.depth),
    }
    return [ring_launch(desc, cut.ring, target, cut.items, args), sum_launch(desc, cut)]


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
