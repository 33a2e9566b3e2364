"""Kernel ``mma``: products of f32 as tf32 on Hopper by ``mma.sync``, of factors that lie along C; k is cut into pieces.

The factors of a gradient of weights lie so, and k is long. wgmma reads tf32 from shared memory along k alone, and both
would be copied first. ``mma.sync`` reads registers, at two thirds of wgmma's speed. Triton's own products by it, those
of ``split_k``, have smaller tiles, which the L2 cache cannot feed. A second launch adds the pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from triplan.backends.runtime.launch import Launch
from triplan.backends.table import Configuration, kernel
from triplan.backends.triton.common.card import BYTES_PER_US
from triplan.backends.triton.common.tiles import combined
from triplan.backends.triton.gemm import split_k
from triplan.backends.triton.gemm.entries import for_products
from triplan.backends.triton.gemm.guarantees import guarantee
from triplan.backends.triton.gemm.matrices import is_elementwise, layout, unit_axis, vector_elements
from triplan.backends.triton.gemm.mma_kernels import mma_kernel
from triplan.backends.triton.gemm.split_k import Split
from triplan.backends.triton.gemm.tile_shapes import Tile, programs_of
from triplan.descriptors import Operand
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import ArchSku, MathPrecision, Support, Target
from triplan.sku.facts import fact

#: The tile, 64 by 64 elements for each warp; and that where a factor is copied one element at a time, which has half as
#: many addresses.
TILE, TILE_SINGLE = Tile(128, 128, 32, 4, 3), Tile(128, 128, 16, 4, 5)
#: Programs that a multiprocessor holds: a thread has up to 255 registers.
RESIDENT = 2
#: Waves of programs that k may be cut for.
WAVES = (1, 2, 3, 4)
#: Least extent of a piece along k. Untuned.
LEAST_DEPTH = 128
#: Microseconds outside the steps along k, of the kernel and of each wave of tiles but the first. These costs are set by
#: hand, from products of 0.8 to 140 GFLOP on an H200 that are not published.
FIXED_US, BETWEEN_US = 8.0, 6.0
#: Microseconds of 1e6 floating-point operations on one multiprocessor.
MFLOP_US = 0.59
#: Microseconds of copying 1000 elements one at a time, on one multiprocessor.
SINGLE_US = 0.12
#: m * n / (m + n) of the largest C. Of a larger one wgmma, which is half as fast again, saves more of the 2 * m * n
#: operations at each k than the copies of m + n elements take, each of which passes memory twice.
LARGEST = 640
#: Exponent p of the p-norm that combines the limits.
LIMITS_POWER = 2.4


def _factors(desc: MatrixProductDescriptor) -> tuple[Operand, Operand]:
    return desc.operand("a"), desc.operand("b")


def tile_for(desc: MatrixProductDescriptor) -> Tile:
    return TILE_SINGLE if any(map(is_elementwise, _factors(desc))) else TILE


def launches(desc: MatrixProductDescriptor, split: Split) -> list[Launch]:
    """Those of ``split_k``, with ``mma_kernel`` as the first; nothing for an empty C."""
    vectors = (1 if is_elementwise(o) else vector_elements(o.element.itemsize) for o in _factors(desc))
    constants = {"STAGES": split.tile.stages, **dict(zip(("A_VECTOR", "B_VECTOR"), vectors, strict=True))}
    found = split_k.launches(desc, split)
    for first in found[:1]:
        known = {x: v for x, v in first.constexprs.items() if x not in ("WHOLE_K", "PRECISION")}
        found[0] = replace(first, kernel=mma_kernel, constexprs={**known, **constants})
    return found


def split_us(desc: MatrixProductDescriptor, split: Split, target: Target) -> float:
    """Estimated microseconds."""
    tile, pieces, depth = split.tile, split.count(desc.k), split.depth(desc.k)
    waves = -(-pieces * programs_of(desc, tile) // (target.sm_count * RESIDENT))
    steps = waves * RESIDENT * depth  # of k, on a multiprocessor
    single = sum(extent for o, extent in zip(_factors(desc), (tile.m, tile.n), strict=True) if is_elementwise(o))
    computed, copied = steps * 2e-6 * tile.m * tile.n * MFLOP_US, steps * 1e-3 * single * SINGLE_US
    streamed = sum(o.nbytes for o in (*_factors(desc), desc.operand("c"))) / BYTES_PER_US
    found = FIXED_US + max(waves - 1, 0) * BETWEEN_US + combined(computed, copied, streamed, power=LIMITS_POWER)
    return found + split_k.sum_us(desc, pieces, target)


@fact
def splits_of(desc: MatrixProductDescriptor, target: Target) -> tuple[Split, ...]:
    """Of whole waves, as far as k is long enough; and k as it is."""
    tile, most = tile_for(desc), max(desc.k // LEAST_DEPTH, 1)
    programs = max(programs_of(desc, tile), 1)
    full = (waves * target.sm_count * RESIDENT // programs for waves in WAVES)
    return tuple(Split(tile, n) for n in sorted({1, *(min(max(n, 1), most) for n in full)}))


@fact
def cheapest(desc: MatrixProductDescriptor, target: Target) -> Split:
    """The split of the lowest estimate; of equal ones that of the fewest pieces."""
    return min(splits_of(desc, target), key=lambda split: (split_us(desc, split, target), split.pieces))


def supports(desc: MatrixProductDescriptor, target: Target) -> Support:
    """Whether tf32 is multiplied on Hopper, the factors lie along C, and 31 bits count everything."""
    if target.arch is not ArchSku.SM90A or target.interpret:
        return Support.no("runs on sm90a, not in the interpreter")
    if desc.multiplicands is not MathPrecision.TF32:
        return Support.no(f"multiplies as {desc.multiplicands}, not as tf32")
    if tuple(map(unit_axis, _factors(desc))) != (0, 1):
        return Support.no("A is not column-major, or B not row-major")
    if desc.m * desc.n > LARGEST * (desc.m + desc.n):
        return Support.no("C is so large that copies of the factors, for wgmma, save more than they take")
    if desc.k == 0:
        return Support.no("k is 0: there is nothing to multiply")
    most = max(split.pieces for split in splits_of(desc, target))
    return split_k.are_counted(desc, most * programs_of(desc, tile_for(desc)))


def rank(desc: MatrixProductDescriptor, target: Target) -> float:
    """Estimated microseconds of the cheapest split."""
    return split_us(desc, cheapest(desc, target), target)


def workspace(desc: MatrixProductDescriptor, target: Target) -> int:
    """Bytes of the partial sums."""
    return split_k.partial_bytes(desc, cheapest(desc, target))


def configurations(desc: MatrixProductDescriptor, target: Target) -> Mapping[str, Configuration]:
    """Each split."""
    return {
        str(split): Configuration(
            split_us(desc, split, target), partial(launches, desc, split), split_k.partial_bytes(desc, split)
        )
        for split in splits_of(desc, target)
    }


@for_products(
    partial(
        kernel,
        name="mma",
        version=2,
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
