"""The configurations that ``python -m bench gemm --sweep`` times: tiles, splits and rings of every kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import triplan as tp
from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.gemm import rings as gemm_rings, split_k, tiles, wgmma, wgmma_backward, wgmma_tiles
from triplan.backends.triton.gemm.rings import Ring
from triplan.backends.triton.gemm.tile_costs import tile_us
from triplan.backends.triton.gemm.tile_shapes import Tile, tiles_of
from triplan.descriptors.gemm import MatrixProductDescriptor, MultiplyingDescriptor

#: A sweep omits configurations that their cost model estimates at this many times the cheapest one.
MAX_RELATIVE_COST = 2.5
#: The same for ``split_k``, which has many.
MAX_RELATIVE_COST_SPLIT = 1.35
#: Rows of tiles dealt together that are tried beside the kernel's own choice.
GROUPS = (2, 4, 8, 16)
#: Tiles for few rows that no kernel uses today, by the most rows of A they are tried for: a sweep shows which of them
#: keeps the most loads in flight.
FEW_ROWS = {
    16: (
        Tile(16, 16, 256, 4, 4),
        Tile(16, 32, 64, 4, 6),
        Tile(16, 32, 128, 2, 4),
        Tile(16, 32, 256, 4, 3),
        Tile(16, 64, 64, 4, 6),
        Tile(16, 64, 256, 8, 3),
        Tile(16, 128, 64, 4, 4),
    ),
    64: (
        Tile(64, 32, 128, 4, 4),
        Tile(64, 64, 64, 4, 3),
        Tile(64, 64, 64, 4, 6),
        Tile(64, 128, 64, 4, 3),
        Tile(64, 128, 64, 8, 4),
        Tile(64, 128, 128, 8, 3),
    ),
}
#: k up to which ``SHALLOW`` is tried.
SHALLOW_K = 256
#: Tiles for products whose tiles take nearly as long to write as to multiply; no kernel uses them today.
SHALLOW = (
    Tile(128, 256, 64, 8, 2),
    Tile(128, 128, 64, 8, 2),
    Tile(128, 128, 64, 4, 2),
    Tile(128, 128, 128, 8, 1),
    Tile(128, 64, 64, 4, 2),
    Tile(64, 256, 64, 8, 2),
    Tile(64, 128, 64, 4, 2),
    Tile(64, 64, 128, 4, 1),
)

T = TypeVar("T")


def pinned(desc: MultiplyingDescriptor, kernel: str, target: tp.Target) -> tp.Plan[Any, Any] | None:
    """The plan of ``kernel``; None if it does not take ``desc``."""
    try:
        return tp.plan(desc, preference=tp.PlanPreference(deterministic=False, kernel=kernel), target=target)
    except tp.Unsupported:
        return None


@dataclass(frozen=True)
class Configuration:
    """One configuration of a kernel: its launches, and the workspace that they need."""

    kernel: str
    name: str
    launches: list[Launch]
    workspace: int = 0

    @property
    def contestant(self) -> str:
        return f"{self.kernel} {self.name}"


def configurations(desc: MultiplyingDescriptor, target: tp.Target) -> Iterator[Configuration]:
    """Every configuration of every kernel, but those that are estimated to be far slower than the cheapest."""
    if isinstance(desc, tp.GemmBackwardDescriptor):
        yield from _backward_configurations(desc, target)
        return
    assert isinstance(desc, MatrixProductDescriptor)
    few = next((found for rows, found in FEW_ROWS.items() if desc.m <= rows), ())
    tried: tuple[Tile, ...] = few or (SHALLOW if desc.k <= SHALLOW_K else ())
    known, itemsize = tiles_of(desc, target), desc.element.itemsize
    fitting = [t for t in tried if t not in known and t.shared_bytes(itemsize) <= target.shared_memory]
    for tile in _promising([*known, *fitting], lambda tile: tile_us(desc, tile, target)):
        yield Configuration("tiles", str(tile), tiles.launches(desc, tile))
    if few:
        splits = [*split_k.splits_of(desc, target), *split_k.splits_with(fitting, desc.k)]
        for split in _promising(splits, lambda s: split_k.split_us(desc, s, target), MAX_RELATIVE_COST_SPLIT):
            workspace = split_k.partial_bytes(desc, split)
            yield Configuration("split_k", str(split), split_k.launches(desc, split), workspace)
    if pinned(desc, "wgmma", target) is not None:
        yield from _ring_configurations(desc, target)


def _ring_configurations(desc: MatrixProductDescriptor, target: tp.Target) -> Iterator[Configuration]:
    """Every ring that has a chance; the cheapest one also with other groups, which need no other binary."""
    kinds = (True, False) if desc.op == "gemm" else (True,)
    rings = _promising(
        [ring for specialised in kinds for ring in gemm_rings.rings_of(desc, target, specialised)],
        lambda ring: gemm_rings.ring_us(desc, ring, target),
    )
    for ring in (*rings, *(replace(rings[0], group=group) for group in GROUPS if group != rings[0].group)):
        yield _ring_configuration(desc, ring, target)


def _ring_configuration(desc: MatrixProductDescriptor, ring: Ring, target: tp.Target) -> Configuration:
    if ring.specialised:
        return Configuration("wgmma", str(ring), wgmma.launches(desc, ring, target))
    assert isinstance(desc, tp.GemmDescriptor)
    return Configuration("wgmma_tiles", str(ring), wgmma_tiles.launches(desc, ring))


def _backward_configurations(desc: tp.GemmBackwardDescriptor, target: tp.Target) -> Iterator[Configuration]:
    """Both products in one launch, by ring, with column sums in that launch or separate; the cheapest ring also with
    other groups, which need no other binary."""
    if pinned(desc, "wgmma", target) is None:
        return
    every = wgmma_backward.configurations(desc, target)
    for name in _promising([*every], lambda name: every[name].cost):
        yield Configuration("wgmma", name, [*every[name].build()], every[name].workspace)
    cheapest = wgmma_backward.cheapest_ring(desc, target)
    for ring in (replace(cheapest, group=group) for group in GROUPS if group != cheapest.group):
        launches = wgmma_backward.launches(desc, ring, target)
        yield Configuration("wgmma", str(ring), launches, wgmma_backward.workspace_with(desc, ring, target))


def _promising(found: Sequence[T], estimate: Callable[[T], float], limit: float = MAX_RELATIVE_COST) -> list[T]:
    """Those estimated at up to ``limit`` times the cheapest, in ascending order."""
    costs = {x: estimate(x) for x in found}
    return sorted((x for x in costs if costs[x] <= limit * min(costs.values())), key=lambda x: costs[x])


def configured(desc: MultiplyingDescriptor, c: Configuration, target: tp.Target) -> tp.Plan[Any, Any]:
    """A plan that launches ``c``, by an entry that is in the kernel table while the plan is selected."""
    base = next(entry for entry in tp.TABLE.rows(desc.op) if entry.name == c.kernel)
    name = c.contestant
    tp.kernel(
        op=desc.op,
        name=name,
        elements=base.elements,
        guarantee=base.guarantee,
        rank=lambda desc, target: 0.0,
        workspace=lambda desc, target: c.workspace,
    )(lambda desc, target: c.launches)
    try:
        found = pinned(desc, name, target)
        assert found is not None
        _ = found.launches, found.workspace_size()  # the plan asks its entry for both lazily
        return found
    finally:
        tp.TABLE.unregister(desc.op, name)
