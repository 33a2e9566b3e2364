"""Kernel ``split_k``: a matrix product with k cut into pieces, for products with fewer tiles than multiprocessors.

A first launch writes each piece's partial sums into the workspace, a second one adds the pieces in a fixed order
and applies the epilogue. There are no atomics, so the bits are the same on every run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from triplan.backends.runtime.launch import Int, Launch, Scratch, power_of_two_in
from triplan.backends.table import Configuration, kernel
from triplan.backends.triton.common.card import MAX_THREAD_REGISTERS
from triplan.backends.triton.common.offsets import TL, ceil_power
from triplan.backends.triton.gemm import split_k_kernels as kernels
from triplan.backends.triton.gemm.arguments import epilogue_arguments, extent, pointer, product_arguments
from triplan.backends.triton.gemm.entries import ELEMENTS, for_products
from triplan.backends.triton.gemm.guarantees import guarantee
from triplan.backends.triton.gemm.matrices import (
    I32_COUNTER_LIMIT,
    has_elementwise_access,
    is_elementwise,
    is_row_major,
    lacks_unit_stride,
    layout,
    loads_single_halves,
    stride_multiple,
    unit_axis,
    vector_elements,
)
from triplan.backends.triton.gemm.tile_costs import stray_us, tile_us
from triplan.backends.triton.gemm.tile_shapes import SHALLOW_TF32X3, Tile, programs_of, tiles_of
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import SUPPORTED, ArchSku, MathPrecision, Support, Target
from triplan.sku.facts import fact

#: Pieces that k may be cut into.
PIECES = (2, 4, 8, 16, 32, 64, 128)
#: Pieces whose sums a thread of the second kernel loads at a time. Each power of two up to it is one binary.
PIECES_AT_ONCE = 16
#: Threads of a program that share an element of C at most, where there are more pieces. Untuned.
MOST_PARTS = 16
#: Microseconds of the second kernel for each further round of loads, and of the sums of threads that share an element:
#: a passage through shared memory. Untuned.
ROUND_US, SHARED_US = 0.6, 0.1
#: Most rows of a tile. Taller tiles serve products that fill the card anyhow; but where halves are loaded one by one,
#: or as words, they load each element less often.
MAX_TILE_ROWS, MAX_TILE_ROWS_ELEMENTWISE = 64, 128
#: Most accumulators per thread of tf32x3 with elementwise access, and of f32 without unit stride. More spill.
MAX_ACCUMULATORS_ELEMENTWISE = 16
#: Registers of a thread with which a multiprocessor holds four programs of 4 warps; and rows of a tile for which these
#: suffice where halves are loaded one by one, of a row-major B whose rows begin anywhere. (Of a column-major one each
#: element has an address of its own; of rows that begin at even elements Triton gives a thread pairs, and spills.)
FOUR_PROGRAMS_REGISTERS, FOUR_PROGRAMS_ROWS = 128, 16
#: Elements of C per program of the second kernel, 16 bytes per thread of 4 warps; and its fewest and most columns.
SUM_ELEMENTS, SUM_COLUMNS = 512, (8, 128)
#: Microseconds of the second launch. On sm90a both launches are placed while the one ahead of them ends, which saves
#: 0.3 us more than the second one takes; but two launches cost more host time than one, so some cost is kept: as much
#: as gives near ties to kernels of one launch.
SUM_LAUNCH_US = {ArchSku.SM90A: 0.5, ArchSku.SM80: 0.8, ArchSku.CPU: 0.8}
#: Bytes of partial sums per microsecond that pass the L2 cache. Fitted, as in ``tile_costs``.
PARTIAL_BYTES_PER_US = 3.6e6
#: Rows of partial sums are rounded up to whole vectors if that adds at most such a part of them. Untuned.
MOST_PADDING = 1 / 16


@dataclass(frozen=True, slots=True)
class Split:
    """A tile, and the number of pieces that k is cut into if it is long enough."""

    tile: Tile
    pieces: int

    def __str__(self) -> str:
        return f"{self.tile} x{self.pieces}"

    def depth(self, k: int) -> int:
        """Extent of a piece along k: whole steps of the tile."""
        steps = -(-k // self.tile.k)
        return max(-(-steps // self.pieces), 1) * self.tile.k

    def count(self, k: int) -> int:
        """Pieces that are not empty; 1 for k = 0."""
        return max(-(-k // self.depth(k)), 1)


def splits_with(tiles: Iterable[Tile], k: int) -> list[Split]:
    """Each tile with every number of pieces that ``k`` is long enough for, and with the fewest in any case."""
    return [Split(t, p) for t in tiles for p in PIECES if p == PIECES[0] or t.k * p <= k]


def _factors_alone(desc: MatrixProductDescriptor) -> MatrixProductDescriptor:
    """The problem of the first kernel, which reads the factors and writes packed sums: only the second one's registers
    hold an epilogue, or addresses of a C without unit stride."""
    layouts = {name: layout for name, layout in desc.layouts if name in ("a", "b")}
    return desc.replace(epilogue="identity", reads_c0=False, saves_pre=False, symmetric=False, layouts=layouts)


@fact
def splits_of(desc: MatrixProductDescriptor, target: Target) -> tuple[Split, ...]:
    """Every split of the tiles that are not too large."""
    desc = _factors_alone(desc)
    spills = (desc.multiplicands is MathPrecision.TF32X3 and has_elementwise_access(desc)) or (
        desc.multiplicands is MathPrecision.F32 and lacks_unit_stride(desc)
    )
    found = (t for t in tiles_of(desc, target) if not spills or t.accumulators <= MAX_ACCUMULATORS_ELEMENTWISE)
    loaded = desc.element.itemsize == 2 and any(is_elementwise(desc.operand(name)) for name in "ab")
    most = MAX_TILE_ROWS_ELEMENTWISE if loaded else MAX_TILE_ROWS
    # A shallow tile is for programs of many steps; pieces of k have few.
    return tuple(splits_with((t for t in found if t.m <= most and t != SHALLOW_TF32X3), desc.k))


@fact
def cheapest_split(desc: MatrixProductDescriptor, target: Target) -> Split:
    """The split of the lowest estimate; of equal ones that of the fewest pieces."""
    return min(splits_of(desc, target), key=lambda split: (split_us(desc, split, target), split.pieces))


def split_us(desc: MatrixProductDescriptor, split: Split, target: Target) -> float:
    """Estimated microseconds of both kernels."""
    both = tile_us(desc, split.tile, target, split.pieces) + sum_us(desc, split.pieces, target)
    return both + stray_us(desc.operand("c"))


def padded_columns(desc: MatrixProductDescriptor) -> int:
    """The columns of C, rounded up to whole vectors if this adds little: partial sums of an odd n are then written and
    read in vectors."""
    width = vector_elements(desc.sums.itemsize)
    padded = -(-desc.n // width) * width
    return padded if padded - desc.n <= MOST_PADDING * desc.n else desc.n


def sum_us(desc: MatrixProductDescriptor, pieces: int, target: Target) -> float:
    """Estimated microseconds of the second kernel, and of writing what it reads."""
    written_and_read = 2 * pieces * desc.operand("c").numel * desc.sums.itemsize
    later = (pieces - 1) // (PIECES_AT_ONCE * MOST_PARTS) * ROUND_US + (_parts(pieces) > 1) * SHARED_US
    return SUM_LAUNCH_US[target.arch] + later + written_and_read / PARTIAL_BYTES_PER_US


def pieces_bytes(desc: MatrixProductDescriptor, pieces: int, leading: int) -> int:
    """Exact bytes of the partial sums of so many pieces, whose rows are ``leading`` elements apart."""
    return pieces * math.prod(desc.lead) * desc.m * leading * desc.sums.itemsize


def _leading(desc: MatrixProductDescriptor) -> int:
    """Elements from one row of partial sums to the next."""
    # FMAs of a column-major B have no registers for vector stores.
    spills = desc.multiplicands is MathPrecision.F32 and unit_axis(desc.operand("b")) == 0
    return desc.n if spills else padded_columns(desc)


def partial_bytes(desc: MatrixProductDescriptor, split: Split) -> int:
    """Exact bytes of the partial sums."""
    return pieces_bytes(desc, split.count(desc.k), _leading(desc))


def _parts(pieces: int) -> int:
    """Threads of the second kernel that share an element of C."""
    return min(ceil_power(-(-pieces // PIECES_AT_ONCE)), MOST_PARTS)


def _sum_block(desc: MatrixProductDescriptor, pieces: int) -> tuple[int, int]:
    """Rows and columns of C per program of the second kernel."""
    elements, (least, most) = SUM_ELEMENTS // _parts(pieces), SUM_COLUMNS
    turned = unit_axis(desc.operand("c")) == 0
    columns = max(min(elements // ceil_power(desc.m) if turned else ceil_power(desc.n), most, elements), least)
    return elements // columns, columns


def _sum_programs(desc: MatrixProductDescriptor, pieces: int) -> int:
    rows, columns = _sum_block(desc, pieces)
    return math.prod(desc.lead) * -(-desc.m // rows) * -(-desc.n // columns)


def sum_launch(desc: MatrixProductDescriptor, pieces: int, leading: int) -> Launch:
    """c from ``pieces`` partial products, which the workspace begins with, in a fixed order; rows of these are
    ``leading`` elements apart."""
    c, compute = desc.operand("c"), desc.sums
    slab = math.prod(desc.lead) * desc.m * leading
    epilogue, constants = epilogue_arguments(desc)
    rows, columns = _sum_block(desc, pieces)
    return Launch(
        kernels.pieces_kernel,
        _sum_programs(desc, pieces),
        {
            "m": extent(desc.m, desc.element.itemsize),
            "n": extent(desc.n, desc.element.itemsize),
            **epilogue,
            "partial": Scratch(0, compute),
            "c": pointer(c),
            "pieces": Int(pieces),
            "slab": replace(extent(slab, compute.itemsize), wide=True),
            "leading": None if leading == desc.n else extent(leading, compute.itemsize),
        },
        {
            **constants,
            "BLOCK_M": rows,
            "BLOCK_N": columns,
            "MOST_PIECES": min(ceil_power(pieces), PIECES_AT_ONCE),
            "PARTS": _parts(pieces),
            "ACC": TL[compute],
        },
        overlaps=True,
        max_registers=MAX_THREAD_REGISTERS,  # left alone, ptxas keeps three loads in flight, to take 32 registers
    )


def _max_registers(desc: MatrixProductDescriptor, tile: Tile) -> int:
    """Registers of a thread that ptxas may use in the first kernel. Left alone, it takes more than four programs have,
    where a step waits in registers: only other programs hide that."""
    b = desc.operand("b")
    single = loads_single_halves(desc) and is_row_major(b) and stride_multiple(b) == 1
    return FOUR_PROGRAMS_REGISTERS if single and tile.m <= FOUR_PROGRAMS_ROWS else MAX_THREAD_REGISTERS


def launches(desc: MatrixProductDescriptor, split: Split) -> list[Launch]:
    """Both kernels; nothing for an empty C."""
    c = desc.operand("c")
    if c.numel == 0:
        return []
    pieces, depth, compute, leading = split.count(desc.k), split.depth(desc.k), desc.sums, _leading(desc)
    args, constants = product_arguments(desc, split.tile)
    return [
        Launch(
            kernels.split_kernel,
            pieces * programs_of(desc, split.tile),
            {
                **args,
                "partial": Scratch(0, compute),
                "products": Int(math.prod(desc.lead)) if desc.lead else None,
                "leading": None if leading == desc.n else extent(leading, compute.itemsize),
                "depth": Int(depth, divisibility=power_of_two_in(depth)),
            },
            constants,
            num_warps=split.tile.warps,
            num_stages=split.tile.stages,
            overlaps=True,
            max_registers=_max_registers(desc, split.tile),
        ),
        sum_launch(desc, pieces, leading),
    ]


def supports(desc: MatrixProductDescriptor, target: Target) -> Support:
    """Whether i32 counts the programs of both launches, and the steps along k."""
    programs = [programs_of(desc, split.tile) for split in splits_of(desc, target)]
    if not programs:
        return Support.no(f"no tile fits {target.shared_memory} bytes of shared memory")
    return are_counted(desc, max(PIECES[-1] * max(programs), _sum_programs(desc, PIECES[-1])))


def are_counted(desc: MatrixProductDescriptor, programs: int) -> Support:
    """Whether i32 counts up to so many programs, and the steps along k."""
    if programs < 2**31 and desc.k < I32_COUNTER_LIMIT:
        return SUPPORTED
    return Support.no(f"up to {programs} programs, k = {desc.k}: both are counted in 31 bits")


def rank(desc: MatrixProductDescriptor, target: Target) -> float:
    """Estimated microseconds with the cheapest split."""
    return split_us(desc, cheapest_split(desc, target), target)


def workspace(desc: MatrixProductDescriptor, target: Target) -> int:
    """Bytes of the partial sums."""
    return partial_bytes(desc, cheapest_split(desc, target))


def configurations(desc: MatrixProductDescriptor, target: Target) -> Mapping[str, Configuration]:
    """Each split that suits ``desc``."""
    return {
        str(split): Configuration(
            split_us(desc, split, target), partial(launches, desc, split), partial_bytes(desc, split)
        )
        for split in splits_of(desc, target)
    }


@for_products(
    partial(
        kernel,
        name="split_k",
        version=12,
        elements=ELEMENTS,
        supports=supports,
        rank=rank,
        workspace=workspace,
        guarantee=guarantee,
        layout=layout,
        configurations=configurations,
    )
)
def split_k(desc: MatrixProductDescriptor, target: Target) -> list[Launch]:
    return launches(desc, cheapest_split(desc, target))
