"""The kernel table's row ``split_k`` for matrix products: k in pieces, for products with few tiles.

Partial sums lie in the workspace, one matrix a piece, and are added in the order of the pieces: no atomics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

from triplan.backends.runtime.launch import Int, Launch, Scratch, power_of_two_in
from triplan.backends.table import Configuration, kernel
from triplan.backends.triton.gemm import launches as launching
from triplan.backends.triton.gemm import split_k_kernels as kernels
from triplan.backends.triton.gemm.costs import pieces_us
from triplan.backends.triton.gemm.launches import Tile
from triplan.backends.triton.gemm.tiles import ELEMENTS, guarantee, layout
from triplan.descriptors import MatrixProductDescriptor
from triplan.sku import SUPPORTED, ElementKind, Support, Target

#: Into how many pieces k may be cut: each power of two is a binary of the second kernel.
PIECES = (2, 4, 8, 16)
#: Rows of a tile at most, by size of an element: taller ones are of products that fill the card, or have no registers
#: for wide operands.
MOST_ROWS = {2: 64, 4: 32, 8: 32}
#: What a program of the second kernel adds up: 16 bytes a thread of 4 warps.
SUM_M, SUM_N = 4, 128


@dataclass(frozen=True, slots=True)
class Split:
    """A tile, and into how many pieces k is cut, if it is long enough."""

    tile: Tile
    pieces: int

    def __str__(self) -> str:
        return f"{self.tile} x{self.pieces}"

    def depth(self, k: int) -> int:
        """Extent of a piece: whole steps of the tile."""
        steps = -(-k // self.tile.k)
        return max(-(-steps // self.pieces), 1) * self.tile.k

    def of(self, k: int) -> int:
        """Pieces that hold something; 1 for an empty k."""
        return max(-(-k // self.depth(k)), 1)


def cuts(tiles: Iterable[Tile], k: int) -> list[Split]:
    """Each tile with every number of pieces that ``k`` is long enough for, and with the fewest in any case."""
    return [Split(t, p) for t in tiles for p in PIECES if p == PIECES[0] or t.k * p <= k]


@lru_cache(maxsize=4096)
def splits_of(desc: MatrixProductDescriptor, target: Target) -> tuple[Split, ...]:
    """Every cut of every tile that is not too tall."""
    most = MOST_ROWS[desc.element.itemsize]
    return tuple(cuts((t for t in launching.tiles_of(desc, target) if t.m <= most), desc.k))


@lru_cache(maxsize=4096)
def chosen_split(desc: MatrixProductDescriptor, target: Target) -> Split:
    """The cheapest."""
    return min(splits_of(desc, target), key=lambda split: (split_us(desc, split, target), split.pieces))


def split_us(desc: MatrixProductDescriptor, split: Split, target: Target) -> float:
    """Estimated microseconds of both kernels."""
    return launching.tile_us(desc, split.tile, target, split.pieces) + pieces_us(desc, split.pieces, target)


def partial_bytes(desc: MatrixProductDescriptor, split: Split) -> int:
    """Exact bytes of the partial sums."""
    return split.of(desc.k) * desc.operand("c").numel * desc.sums.itemsize


def split_launch(desc: MatrixProductDescriptor, split: Split) -> list[Launch]:
    """Both kernels; nothing for an empty C."""
    c = desc.operand("c")
    if c.numel == 0:
        return []
    products, pieces, compute = math.prod(desc.lead), split.of(desc.k), desc.sums
    args, constants = launching.product_arguments(desc, split.tile)
    depth = split.depth(desc.k)
    of_c, c_known = launching.epilogue_arguments(desc)
    extents = {name: args[name] for name in ("m", "n")}
    return [
        Launch(
            kernels.split_kernel,
            pieces * launching.programs_of(desc, split.tile),
            {
                **args,
                "partial": Scratch(0, compute),
                "products": Int(products) if desc.lead else None,
                "depth": Int(depth, divisibility=power_of_two_in(depth)),
            },
            constants,
            num_warps=split.tile.warps,
            num_stages=split.tile.stages,
            overlaps=True,
            max_registers=launching.MAX_REGISTERS,
        ),
        Launch(
            kernels.pieces_kernel,
            products * -(-desc.m // SUM_M) * -(-desc.n // SUM_N),
            {
                **extents,
                **of_c,
                "partial": Scratch(0, compute),
                "c": launching.pointer(c),
                "pieces": Int(pieces),
                "slab": Int(c.numel, wide=True, divisibility=16 if c.numel % 16 == 0 else 1),
            },
            {
                **c_known,
                "BLOCK_M": SUM_M,
                "BLOCK_N": SUM_N,
                "MOST_PIECES": 1 << (pieces - 1).bit_length(),
                "ACC": launching.accumulator(desc),
            },
            overlaps=True,
            max_registers=launching.MAX_REGISTERS if compute is ElementKind.F64 else None,
        ),
    ]


# --- row ---


def split_rank(desc: MatrixProductDescriptor, target: Target) -> float:
    return split_us(desc, chosen_split(desc, target), target)


def split_applies(desc: MatrixProductDescriptor, target: Target) -> Support:
    most = PIECES[-1] * max(launching.programs_of(desc, split.tile) for split in splits_of(desc, target))
    sums = math.prod(desc.lead) * -(-desc.m // SUM_M) * -(-desc.n // SUM_N)
    if max(most, sums) < 2**31 and desc.k < launching.COUNTED:
        return SUPPORTED
    return Support.no(f"up to {max(most, sums)} programs for k = {desc.k}; both are counted in 31 bits")


def split_workspace(desc: MatrixProductDescriptor, target: Target) -> int:
    return partial_bytes(desc, chosen_split(desc, target))


def split_k(desc: MatrixProductDescriptor, target: Target) -> list[Launch]:
    return split_launch(desc, chosen_split(desc, target))


def split_configurations(desc: MatrixProductDescriptor, target: Target) -> Mapping[str, Configuration]:
    return {
        str(split): Configuration(
            split_us(desc, split, target), partial(split_launch, desc, split), partial_bytes(desc, split)
        )
        for split in splits_of(desc, target)
    }


for _op in ("gemm", "batched_gemm"):
    _row = kernel(
        op=_op,
        name="split_k",
        elements=ELEMENTS,
        guarantee=guarantee,
        layout=layout,
        supports=split_applies,
        rank=split_rank,
        workspace=split_workspace,
        configurations=split_configurations,
    )
    _row(split_k)
