"""What ``python -m bench gemm --sweep`` tries: every tile and ring of every row that has some hope."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import triplan as tp
from triplan.backends.runtime.launch import Launch
from triplan.backends.triton.gemm import rings as gemm_rings
from triplan.backends.triton.gemm import split_k, tiles, wgmma, wgmma_backward, wgmma_tiles
from triplan.backends.triton.gemm.rings import Ring
from triplan.backends.triton.gemm.tile_costs import tile_us
from triplan.backends.triton.gemm.tile_shapes import Tile, tiles_of
from triplan.descriptors import MatrixProductDescriptor, MultiplyingDescriptor

#: Configurations of a row that a sweep leaves out: those that its own cost model takes for this many times as slow.
HOPELESS, HOPELESS_SPLIT = 2.5, 1.35
#: Rows of tiles dealt together, beside the row's own choice.
GROUPS = (2, 4, 8, 16)
#: Tiles that no row takes today. What keeps most loads on their way is for a sweep to find: by rows of A at most.
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
#: And those that are written nearly as long as they are multiplied.
SHALLOW_K = 256
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
Product = MatrixProductDescriptor


def pinned(desc: MultiplyingDescriptor, row: str, target: tp.Target) -> tp.Plan[Any, Any] | None:
    try:
        return tp.plan(desc, preference=tp.PlanPreference(deterministic=False, kernel=row), target=target)
    except tp.Unsupported:
        return None


@dataclass(frozen=True)
class Configuration:
    """Launches of a row that stands for all of its kind in a sweep, and the workspace they need."""

    row: str
    name: str
    launches: list[Launch]
    workspace: int = 0

    @property
    def contestant(self) -> str:
        return f"{self.row} {self.name}"


def configurations(desc: MultiplyingDescriptor, target: tp.Target) -> Iterator[Configuration]:
    """``desc`` by every tile and ring, but for those that are estimated to be far slower than the best."""
    if isinstance(desc, tp.GemmBackwardDescriptor):
        yield from backward_configurations(desc, target)
        return
    assert isinstance(desc, Product)
    few: tuple[Tile, ...] = next((found for rows, found in FEW_ROWS.items() if desc.m <= rows), ())
    tried = few or (SHALLOW if desc.k <= SHALLOW_K else ())
    known, size = tiles_of(desc, target), desc.element.itemsize
    fitting = [t for t in tried if t not in known and t.shared_bytes(size) <= target.shared_memory]
    by_tiles = [
        Configuration("tiles", str(tile), tiles.launches(desc, tile))
        for tile in promising([*known, *fitting], lambda tile: tile_us(desc, tile, target))
    ]
    yield from by_tiles
    if few:
        splits = [*split_k.splits_of(desc, target), *split_k.splits_with(fitting, desc.k)]
        by_splits = [
            Configuration("split_k", str(s), split_k.launches(desc, s), split_k.partial_bytes(desc, s))
            for s in promising(splits, lambda s: split_k.split_us(desc, s, target), HOPELESS_SPLIT)
        ]
        yield from by_splits
    if pinned(desc, "wgmma", target) is None:
        return
    kinds = (True, False) if desc.op == "gemm" else (True,)
    rings = promising(
        [ring for specialised in kinds for ring in gemm_rings.rings_of(desc, target, specialised)],
        lambda ring: gemm_rings.ring_us(desc, ring, target),
    )
    for ring in rings:
        yield configuration(desc, ring, target)
    for group in GROUPS:  # the same binary
        if group != rings[0].group:
            yield configuration(desc, replace(rings[0], group=group), target)


def configuration(desc: Product, ring: Ring, target: tp.Target) -> Configuration:
    if ring.specialised:
        return Configuration("wgmma", str(ring), wgmma.launches(desc, ring, target))
    assert isinstance(desc, tp.GemmDescriptor)
    return Configuration("wgmma_tiles", str(ring), wgmma_tiles.launches(desc, ring))


def backward_configurations(desc: tp.GemmBackwardDescriptor, target: tp.Target) -> Iterator[Configuration]:
    """Both products in one launch, by rings, with the columns' sums beside them and apart; by the best also in other
    groups."""
    if pinned(desc, "wgmma", target) is None:
        return
    every = wgmma_backward.configurations(desc, target)
    for name in promising([*every], lambda name: every[name].cost):
        yield Configuration("wgmma", name, [*every[name].build()], every[name].workspace)
    best = wgmma_backward.cheapest_ring(desc, target)
    for ring in (replace(best, group=group) for group in GROUPS if group != best.group):  # the same binary
        launches = wgmma_backward.launches(desc, ring, target)
        workspace = wgmma_backward.workspace_with(desc, ring, target)
        yield Configuration("wgmma", str(ring), launches, workspace)


def promising(all_of: Sequence[T], estimate: Callable[[T], float], hopeless: float = HOPELESS) -> list[T]:
    """The cheapest first, by a row's own cost model, down to those that are hopeless."""
    costs = {x: estimate(x) for x in all_of}
    return sorted((x for x in costs if costs[x] <= hopeless * min(costs.values())), key=lambda x: costs[x])


def configured(desc: MultiplyingDescriptor, c: Configuration, target: tp.Target) -> tp.Plan[Any, Any]:
    """A plan that runs ``c``: of a row that is in the table for as long as it takes to select it."""
    base = next(row for row in tp.TABLE.rows(desc.op) if row.name == c.row)
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
        _ = found.launches, found.workspace_size()  # asked of the row while it is there
        return found
    finally:
        tp.TABLE.unregister(desc.op, name)
