"""Kernel ``mma``: products of f32 as tf32 on Hopper by ``mma.sync``, in large tiles, however the factors lie.

wgmma reads tf32 from shared memory along k alone; a factor that lies along C would be copied first. ``mma.sync`` reads
registers, at two thirds of wgmma's speed. Triton's own products by it (``tiles``) have small tiles on Hopper, which the
L2 cache cannot feed. Where k is cut, a second launch adds the pieces, as in ``split_k``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch, power_of_two_in
from triplan.backends.table import Configuration, kernel
from triplan.backends.triton.common.card import BYTES_PER_US, MAX_THREAD_REGISTERS
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.gemm.arguments import epilogue_arguments, extent, pointer, product_arguments
from triplan.backends.triton.gemm.entries import for_products
from triplan.backends.triton.gemm.guarantees import guarantee
from triplan.backends.triton.gemm.matrices import (
    I32_COUNTER_LIMIT,
    is_elementwise,
    is_row_major,
    layout,
    unit_axis,
    vector_elements,
)
from triplan.backends.triton.gemm.mma_kernels import mma_kernel
from triplan.backends.triton.gemm.split_k import Split, padded_columns, pieces_bytes, sum_launch, sum_us
from triplan.backends.triton.gemm.tile_costs import combined
from triplan.backends.triton.gemm.tile_shapes import Tile, programs_of
from triplan.backends.triton.gemm.tma import ACTIVATIONS
from triplan.descriptors import Operand
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import ArchSku, MathPrecision, Support, Target
from triplan.sku.facts import fact

#: Tiles of 64 by 64 elements for each warp, whose 255 registers a thread leave a multiprocessor 8 warps.
TILES = (Tile(128, 256, 32, 8, 4), Tile(128, 128, 32, 4, 3), Tile(64, 128, 32, 2, 2))
#: The same where elements are copied one by one: half as many addresses, of which two warps would have too many.
TILES_SINGLE = (Tile(128, 256, 16, 8, 6), Tile(128, 128, 16, 4, 5), Tile(64, 128, 16, 4, 4))
#: Of tf32x3, tiles of 64 by 32 for each warp: the parts of factors take registers.
TILES_PARTS = (Tile(128, 128, 32, 8, 4), Tile(64, 128, 32, 4, 3))
TILES_PARTS_SINGLE = (Tile(128, 128, 16, 8, 6), Tile(64, 128, 16, 4, 5))
#: Rows of C for a warp.
WARP_M = 64
#: Warps that a multiprocessor holds.
RESIDENT_WARPS = 8
#: Pieces that k may be cut into, beside those whose programs are whole waves: so many, and pieces at most.
PIECES, WAVES, MOST_PIECES = (1, 2, 4, 8), (1, 2, 3, 4), 128
#: Least extent of a piece along k.
LEAST_DEPTH = 128
#: Microseconds outside the steps along k, of the kernel and of each wave of tiles but the first. Untuned.
FIXED_US, BETWEEN_US = 3.0, 3.0
#: Microseconds of 1e6 floating-point operations on one multiprocessor. Untuned.
MFLOP_US = {MathPrecision.TF32: 0.46, MathPrecision.TF32X3: 1.5}
#: Factor on it for each factor that is loaded one element at a time. Untuned.
SINGLE = 1.1
#: Exponent p of the p-norm that combines the limits.
LIMITS_POWER = 2.4


def _factors(desc: MatrixProductDescriptor) -> tuple[Operand, Operand]:
    return desc.operand("a"), desc.operand("b")


def _vector(o: Operand) -> int:
    """Elements of a load."""
    return 1 if is_elementwise(o) else vector_elements(o.element.itemsize)


def _is_summed(desc: MatrixProductDescriptor, split: Split) -> bool:
    """Whether a second launch writes C: it sums pieces, or spares this one an epilogue whose registers would spill."""
    heavy = desc.reads_c0 or desc.saves_pre or desc.activation == "gelu" or unit_axis(desc.operand("c")) is None
    return heavy or split.count(desc.k) > 1


def launches(desc: MatrixProductDescriptor, split: Split) -> list[Launch]:
    """``mma_kernel``, and the sums of its pieces; nothing for an empty C."""
    if desc.operand("c").numel == 0:
        return []
    tile, summed, (a, b) = split.tile, _is_summed(desc, split), _factors(desc)
    args, constants = product_arguments(desc, tile)
    del constants["WHOLE_K"], constants["PRECISION"]
    cut: dict[str, Arg] = {"c": pointer(desc.operand("c")), "depth": None}
    result, leading = desc, padded_columns(desc)
    if summed:
        plain = {"epilogue": "identity", "reads_c0": False, "saves_pre": False, "symmetric": False, "layouts": {}}
        result = desc.replace(n=leading, **plain)
        depth = split.depth(desc.k)
        cut = {"c": Scratch(0, desc.sums), "depth": Int(depth, divisibility=power_of_two_in(depth))}
    epilogue, known = epilogue_arguments(result)
    if summed:
        slab = desc.m * leading
        epilogue["c_batch"] = Int(slab, wide=True, divisibility=power_of_two_in(slab))
        del epilogue["alpha"]
        known["alpha"] = 1.0
    launch = Launch(
        mma_kernel,
        split.count(desc.k) * programs_of(desc, tile),
        {
            **args,
            **epilogue,
            **cut,
            "products": Int(math.prod(desc.lead)) if desc.lead else None,
            "columns": extent(leading, desc.sums.itemsize) if summed and leading != desc.n else None,
        },
        {
            **constants,
            **known,
            "STAGES": tile.stages,
            "WARPS_M": tile.m // WARP_M,
            "WARPS_N": tile.warps * WARP_M // tile.m,
            "A_ROWS": is_row_major(a),
            "B_ROWS": is_row_major(b),
            "A_VECTOR": _vector(a),
            "B_VECTOR": _vector(b),
            "TWO_PARTS": desc.multiplicands is MathPrecision.TF32X3,
            "ACTIVATION": ACTIVATIONS[result.activation],
        },
        num_warps=tile.warps,
        overlaps=True,
        max_registers=MAX_THREAD_REGISTERS,
    )
    return [launch, sum_launch(desc, split.count(desc.k), leading)] if summed else [launch]


def split_us(desc: MatrixProductDescriptor, split: Split, target: Target) -> float:
    """Estimated microseconds."""
    tile, pieces = split.tile, split.count(desc.k)
    resident = RESIDENT_WARPS // tile.warps
    waves = -(-pieces * programs_of(desc, tile) // (target.sm_count * resident))
    rate = MFLOP_US[desc.multiplicands] * SINGLE ** sum(_vector(o) == 1 for o in _factors(desc))
    computed = waves * resident * 2e-6 * tile.m * tile.n * split.depth(desc.k) * rate
    streamed = sum(o.nbytes for o in (*_factors(desc), desc.operand("c"))) / BYTES_PER_US
    found = FIXED_US + max(waves - 1, 0) * BETWEEN_US + combined(computed, streamed, power=LIMITS_POWER)
    return found + sum_us(desc, pieces, target) if _is_summed(desc, split) else found


def _tiles(desc: MatrixProductDescriptor) -> tuple[Tile, ...]:
    single = 1 in map(_vector, _factors(desc))
    if desc.multiplicands is MathPrecision.TF32X3:
        return TILES_PARTS_SINGLE if single else TILES_PARTS
    return TILES_SINGLE if single else TILES


@fact
def splits_of(desc: MatrixProductDescriptor, target: Target) -> tuple[Split, ...]:
    """Every tile with every number of pieces that suits it."""
    found: list[Split] = []
    for tile in _tiles(desc):
        slots, programs = target.sm_count * RESIDENT_WARPS // tile.warps, max(programs_of(desc, tile), 1)
        most = min(MOST_PIECES, desc.k // LEAST_DEPTH)
        full = (waves * slots // programs for waves in WAVES)
        found += [Split(tile, n) for n in sorted({1, *(n for n in (*PIECES, *full) if 1 < n <= most)})]
    return tuple(found)


@fact
def cheapest(desc: MatrixProductDescriptor, target: Target) -> Split:
    """The split of the lowest estimate; of equal ones that of the fewest pieces."""
    return min(splits_of(desc, target), key=lambda split: (split_us(desc, split, target), split.pieces))


def supports(desc: MatrixProductDescriptor, target: Target) -> Support:
    """Whether tf32 may be multiplied on Hopper, the factors have unit strides, and 31 bits count everything."""
    if target.arch is not ArchSku.SM90A or target.interpret:
        return Support.no("runs on sm90a, not in the interpreter")
    if desc.multiplicands not in (MathPrecision.TF32, MathPrecision.TF32X3):
        return Support.no(f"multiplies as {desc.multiplicands}, not as tf32")
    if None in map(unit_axis, _factors(desc)):
        return Support.no("a factor has no unit stride")
    if desc.k == 0:
        return Support.no("k is 0: there is nothing to multiply")
    if max(desc.m, desc.n, desc.k) >= I32_COUNTER_LIMIT:
        return Support.no("extents are counted in 31 bits")
    return fits_grid(max(programs_of(desc, split.tile) * split.pieces for split in splits_of(desc, target)))


def rank(desc: MatrixProductDescriptor, target: Target) -> float:
    """Estimated microseconds of the cheapest split."""
    return split_us(desc, cheapest(desc, target), target)


def workspace(desc: MatrixProductDescriptor, target: Target) -> int:
    """Bytes of the partial sums."""
    return workspace_with(desc, cheapest(desc, target))


def workspace_with(desc: MatrixProductDescriptor, split: Split) -> int:
    if desc.operand("c").numel == 0 or not _is_summed(desc, split):
        return 0
    return pieces_bytes(desc, split.count(desc.k), padded_columns(desc))


def configurations(desc: MatrixProductDescriptor, target: Target) -> Mapping[str, Configuration]:
    """Each split."""
    return {
        str(split): Configuration(
            split_us(desc, split, target), partial(launches, desc, split), workspace_with(desc, split)
        )
        for split in splits_of(desc, target)
    }


@for_products(
    partial(
        kernel,
        name="mma",
        elements=("f32",),
        archs=(ArchSku.SM90A,),
        features=("gluon",),
        interpretable=False,
        supports=supports,
        rank=rank,
        workspace=workspace,
        guarantee=guarantee,
        layout=layout,
        configurations=configurations,
    )
)
def mma(desc: MatrixProductDescriptor, target: Target) -> list[Launch]:
    return launches(desc, cheapest(desc, target))
