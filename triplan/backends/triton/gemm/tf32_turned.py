"""Kernel ``tf32_turned``: products of tf32 on Hopper by wgmma, where a factor lies along C.

wgmma reads tf32 from shared memory along k alone. But its first factor may be in registers, which can come from any
layout. If the other one lies along C, too, it is transposed on its way into shared memory. Where k is cut, a second
launch adds the pieces, as in ``split_k``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch, power_of_two_in
from triplan.backends.table import Configuration, kernel
from triplan.backends.triton.common.card import BYTES_PER_US, MAX_THREAD_REGISTERS, SM_REGISTERS
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.gemm.arguments import epilogue_arguments, extent, pointer, product_arguments
from triplan.backends.triton.gemm.entries import for_products
from triplan.backends.triton.gemm.guarantees import guarantee
from triplan.backends.triton.gemm.matrices import I32_COUNTER_LIMIT, is_elementwise, layout, unit_axis, vector_elements
from triplan.backends.triton.gemm.split_k import Split, padded_columns, pieces_bytes, sum_launch, sum_us
from triplan.backends.triton.gemm.tf32_turned_kernels import tf32_turned_kernel
from triplan.backends.triton.gemm.tile_costs import combined
from triplan.backends.triton.gemm.tile_shapes import Tile, is_turned, programs_of
from triplan.descriptors import Operand
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import ArchSku, MathPrecision, Support, Target
from triplan.sku.facts import fact

#: Tiles, of m lines of X (see ``tf32_turned_kernel``) by n of Y.
TILES = (Tile(128, 128, 32, 8, 3), Tile(64, 128, 32, 4, 3))
#: The same where X is A: the addresses of a C whose columns lie across threads would spill.
TILES_OF_A = (Tile(256, 128, 32, 8, 4), *TILES)
#: The same where Y passes through registers.
TILES_HELD = (Tile(128, 256, 32, 8, 4),)
#: Programs that a multiprocessor holds, by their lines of X in tiles of 128 lines of Y; of others it holds one.
RESIDENT = {128: 2, 64: 3}
#: Pieces that k may be cut into, beside those whose programs are whole waves: so many, and pieces at most.
PIECES, WAVES, MOST_PIECES = (1, 2, 4, 8), (1, 2, 3), 128
#: Least extent of a piece along k.
LEAST_DEPTH = 256
#: What beginning and writing a tile takes, as an extent of k. Untuned.
WRITING_K = 192
#: Microseconds outside the steps along k, of the kernel and of each wave of tiles but the first. Untuned.
FIXED_US, BETWEEN_US = 3.0, 3.0
#: Microseconds of 1e6 floating-point operations on one multiprocessor. Untuned.
MFLOP_US = 0.46
#: Factor on it for an X that is loaded one element at a time. Untuned.
SINGLE = 1.2
#: Exponent p of the p-norm that combines the limits.
LIMITS_POWER = 2.4


def x_is_b(desc: MatrixProductDescriptor) -> bool:
    """Whether B is the factor in registers: A lies along k."""
    return not is_turned(desc.operand("a"))


def _factors(desc: MatrixProductDescriptor) -> tuple[Operand, Operand]:
    """X and Y."""
    a, b = desc.operand("a"), desc.operand("b")
    return (b, a) if x_is_b(desc) else (a, b)


def _is_held(desc: MatrixProductDescriptor) -> bool:
    """Whether Y passes through registers: both factors lie along C."""
    return is_turned(_factors(desc)[1])


def _is_summed(desc: MatrixProductDescriptor, split: Split) -> bool:
    """Whether a second launch writes C: it sums pieces, or spares this one an epilogue whose registers would spill."""
    return desc.reads_c0 or desc.saves_pre or desc.activation in ("gelu", "silu") or split.count(desc.k) > 1


def _partial_bytes(desc: MatrixProductDescriptor, split: Split) -> int:
    """Exact bytes of the partial sums."""
    return pieces_bytes(desc, split.count(desc.k), padded_columns(desc)) if _is_summed(desc, split) else 0


def _resident(desc: MatrixProductDescriptor, tile: Tile) -> int:
    """Programs that a multiprocessor holds."""
    x, y = (tile.n, tile.m) if x_is_b(desc) else (tile.m, tile.n)
    return RESIDENT.get(x, 1) if y == 128 else 1


def launches(desc: MatrixProductDescriptor, split: Split) -> list[Launch]:
    """``tf32_turned_kernel``, and the sums of its pieces; nothing for an empty C."""
    if desc.operand("c").numel == 0:
        return []
    tile, summed, x = split.tile, _is_summed(desc, split), _factors(desc)[0]
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
    each = SM_REGISTERS // (32 * tile.warps * _resident(desc, tile))
    launch = Launch(
        tf32_turned_kernel,
        split.count(desc.k) * programs_of(desc, tile),
        {
            **args,
            **epilogue,
            **cut,
            "products": Int(math.prod(desc.lead)) if desc.lead else None,
            "columns": extent(leading, desc.sums.itemsize) if summed else None,
        },
        {
            **constants,
            **known,
            "STAGES": tile.stages,
            "WARPS": tile.warps,
            "X_IS_B": x_is_b(desc),
            "Y_HELD": _is_held(desc),
            "X_VECTOR": 1 if is_elementwise(x) else vector_elements(x.element.itemsize),
        },
        num_warps=tile.warps,
        overlaps=True,
        max_registers=min(each // 8 * 8, MAX_THREAD_REGISTERS),
    )
    return [launch, sum_launch(desc, split.count(desc.k), leading)] if summed else [launch]


def split_us(desc: MatrixProductDescriptor, split: Split, target: Target) -> float:
    """Estimated microseconds."""
    tile, pieces = split.tile, split.count(desc.k)
    resident = _resident(desc, tile)
    waves = -(-pieces * programs_of(desc, tile) // (target.sm_count * resident))
    slower = SINGLE if is_elementwise(_factors(desc)[0]) else 1.0
    depth = split.depth(desc.k) + WRITING_K
    computed = waves * resident * 2e-6 * tile.m * tile.n * depth * MFLOP_US * slower
    computed += max(waves - 1, 0) * BETWEEN_US
    c = desc.operand("c")
    streamed = sum(o.numel * o.element.itemsize for o in (*_factors(desc), c)) / BYTES_PER_US
    found = FIXED_US + combined(computed, streamed, power=LIMITS_POWER)
    return found + sum_us(desc, pieces, target) if _is_summed(desc, split) else found


@fact
def splits_of(desc: MatrixProductDescriptor, target: Target) -> tuple[Split, ...]:
    """Every tile with every number of pieces that suits it."""
    found = []
    for tile in TILES_HELD if _is_held(desc) else TILES if x_is_b(desc) else TILES_OF_A:
        placed = Tile(tile.n, tile.m, tile.k, tile.warps, tile.stages) if x_is_b(desc) else tile
        slots, programs = target.sm_count * _resident(desc, placed), max(programs_of(desc, placed), 1)
        most = min(MOST_PIECES, desc.k // LEAST_DEPTH)
        pieces = {1, *(p for p in (*PIECES, *(w * slots // programs for w in WAVES)) if 1 < p <= most)}
        found += [Split(placed, p) for p in sorted(pieces)]
    return tuple(found)


@fact
def cheapest(desc: MatrixProductDescriptor, target: Target) -> Split:
    """The split of the lowest estimate; of equal ones that of the fewest pieces."""
    return min(splits_of(desc, target), key=lambda split: (split_us(desc, split, target), split.pieces))


def supports(desc: MatrixProductDescriptor, target: Target) -> Support:
    """Whether tf32 may be multiplied on Hopper, a factor lies along C, and 31 bits count everything."""
    if target.arch is not ArchSku.SM90A or target.interpret:
        return Support.no("runs on sm90a, not in the interpreter")
    if desc.multiplicands is not MathPrecision.TF32:
        return Support.no(f"multiplies as {desc.multiplicands}, not as tf32")
    if None in (unit_axis(desc.operand("a")), unit_axis(desc.operand("b"))):
        return Support.no("a factor has no unit stride")
    if not is_turned(_factors(desc)[0]):
        return Support.no("both factors lie along k, as other kernels read them")
    x, y = _factors(desc)
    if is_elementwise(y) or (is_elementwise(x) and not _is_held(desc)):
        return Support.no("addresses of single elements would spill")
    if desc.k == 0:
        return Support.no("k is 0: there is nothing to multiply")
    if max(desc.m, desc.n, desc.k) >= I32_COUNTER_LIMIT:
        return Support.no("extents are counted in 31 bits")
    return fits_grid(max(programs_of(desc, s.tile) * s.pieces for s in splits_of(desc, target)))


def rank(desc: MatrixProductDescriptor, target: Target) -> float:
    """Estimated microseconds of the cheapest split."""
    return split_us(desc, cheapest(desc, target), target)


def workspace(desc: MatrixProductDescriptor, target: Target) -> int:
    """Bytes of the partial sums."""
    return workspace_with(desc, cheapest(desc, target))


def workspace_with(desc: MatrixProductDescriptor, split: Split) -> int:
    return 0 if desc.operand("c").numel == 0 else _partial_bytes(desc, split)


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
        name="tf32_turned",
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
def tf32_turned(desc: MatrixProductDescriptor, target: Target) -> list[Launch]:
    return launches(desc, cheapest(desc, target))
