"""Tiles of the last wave that are cut along k, so that all multiprocessors share them; and the launch that adds parts.

A first launch computes the full waves of tiles, and then parts of the tiles that are left, whose sums it writes into
the workspace. A second one adds the parts in a fixed order and applies the epilogue. To add them within one launch,
programs would have to wait for flags, which nothing resets before a run: a workspace holds anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch
from triplan.backends.triton.common.card import MAX_THREAD_REGISTERS
from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.gemm.arguments import epilogue_arguments, extent, pointer
from triplan.backends.triton.gemm.cuts_kernels import parts_kernel
from triplan.backends.triton.gemm.rings import Ring
from triplan.backends.triton.gemm.split_k import SUM_ELEMENTS
from triplan.backends.triton.gemm.tile_shapes import Tile
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import ElementKind

#: Most parts of a tile: the second kernel loads one element of each at a time.
MOST_PARTS = 16
#: Fewest parts that are tried in any case, and rounds of all multiprocessors that parts may fill.
FEW_PARTS, ROUNDS = (2, 3, 4), (1, 2, 3)
#: Microseconds that the second launch takes, and writing parts beside steps; bytes of parts per microsecond. Least
#: squares of logarithms over the cuts of 20 products on an H200, relative to ``wgmma``, by a run that is not published.
PARTS_US, PARTS_BYTES_PER_US = 5.0, 1e7

T = TypeVar("T", Ring, Tile)


@dataclass(frozen=True, slots=True)
class Cut(Generic[T]):
    """A tile of C, and how tiles are cut.

    Attributes:
        tile: its shape, and how it is computed.
        whole: tiles that are computed as a whole, in full waves.
        rest: tiles that are cut.
        parts: into how many parts along k.
        depth: steps of a part; of the last one some may lie beyond k, but not all.
    """

    tile: T
    whole: int
    rest: int
    parts: int
    depth: int

    def __str__(self) -> str:
        return f"{self.tile} cut {self.parts}"

    @property
    def items(self) -> int:
        """What the programs of the first launch share: whole tiles and parts."""
        return self.whole + self.rest * self.parts

    @property
    def nbytes(self) -> int:
        """Exact bytes of the parts' accumulators."""
        return self.rest * self.parts * self.tile.m * self.tile.n * ElementKind.F32.itemsize


def cuts_of(tile: T, tiles: int, slots: int, steps: int, least_steps: int) -> Iterator[Cut[T]]:
    """``tiles`` of ``steps`` along k on a card that has ``slots`` at a time, with few parts, and with as many as fill
    few rounds; of at least ``least_steps``.

    Parts have equal depths, so that the last ones of a count may have nothing left: these are dropped.
    """
    rest: int = tiles % slots
    if rest == 0:
        return
    most = min(steps // least_steps, MOST_PARTS)
    counts = {min(parts, most) for parts in (*FEW_PARTS, *(n * slots // rest for n in ROUNDS))}
    for depth in sorted({-(-steps // parts) for parts in counts if parts > 1}, reverse=True):
        yield Cut(tile, tiles - rest, rest, -(-steps // depth), depth)


def sum_us(cut: Cut[T]) -> float:
    """Estimated microseconds of the second launch, and of writing what it reads."""
    return PARTS_US + 2 * cut.nbytes / PARTS_BYTES_PER_US


def arguments(cut: Cut[T]) -> dict[str, Arg]:
    """The arguments of the first kernel that say where tiles are cut; it gets the depth in its own unit."""
    return {"partial": Scratch(0, ElementKind.F32), "whole": Int(cut.whole)}


def sum_launch(desc: MatrixProductDescriptor, cut: Cut[T], group: int) -> Launch:
    """C's tiles that are cut, from their parts; ``group`` rows of tiles are scheduled together."""
    tile = cut.tile
    rows = SUM_ELEMENTS // tile.n
    epilogue, constants = epilogue_arguments(desc)
    return Launch(
        parts_kernel,
        cut.rest * (tile.m // rows),
        {
            **epilogue,
            **arguments(cut),
            "c": pointer(desc.operand("c")),
            "m": extent(desc.m, desc.element.itemsize),
            "n": extent(desc.n, desc.element.itemsize),
            "rest": Int(cut.rest),
            "parts": Int(cut.parts),
        },
        {
            **constants,
            "ROWS": rows,
            "TILE_M": tile.m,
            "TILE_N": tile.n,
            "GROUP_M": group,
            "MOST_PARTS": ceil_power(cut.parts),
        },
        overlaps=True,
        max_registers=MAX_THREAD_REGISTERS,
    )
