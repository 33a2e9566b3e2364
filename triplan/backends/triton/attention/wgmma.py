"""Kernel ``wgmma``: attention on Hopper by TMA and wgmma, warp-specialised and persistent."""

from __future__ import annotations

import math
from dataclasses import dataclass

from triplan.backends.runtime.launch import Int, Launch, Scalar
from triplan.backends.triton.attention import arguments
from triplan.backends.triton.attention.arguments import PRODUCTS, cost_us, pointer
from triplan.backends.triton.attention.entries import hopper_entry
from triplan.backends.triton.attention.tiles import TILE_US
from triplan.backends.triton.attention.tma import (
    TILE,
    order_of,
    section_heads,
    shift_of,
    supports as can_map,
    tensor_map,
    width_of,
)
from triplan.backends.triton.attention.wgmma_kernels import attention_wgmma_kernel
from triplan.descriptors import AttentionDescriptor
from triplan.sku import ElementKind, Support, Target

#: The widest head whose accumulators fit registers.
WIDEST = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """How heads of a padded width lie in shared memory: in ``chunk`` columns, blocks of ``block`` keys in rings of
    ``stages`` slots, ``ahead`` tiles of queries."""

    chunk: int
    block: int
    stages: int
    ahead: int


#: By the padded width of a head: as much as registers and shared memory hold.
SHAPES = {
    64: Shape(64, 128, 2, 2),
    128: Shape(128, 128, 2, 2),
    192: Shape(64, 64, 3, 1),
    256: Shape(128, 64, 2, 1),
}
#: TFLOP/s by width of a head, about those in ``bench/results/attention-nvidia-h200.csv``; of wide heads, of an H200.
TERAFLOPS = {64: 430.0, 128: 640.0, 192: 660.0, 256: 690.0}
#: Microseconds more than a kernel without warps of several kinds takes to begin and to end, by width of a head. Set by
#: hand, from 2 to 512 queries on an H100; untuned for wide heads.
START_US = {64: 1.0, 128: 2.5, 192: 3.0, 256: 3.0}


def tiles_of(desc: AttentionDescriptor) -> int:
    """Tiles of queries per head."""
    return math.ceil(desc.queries / TILE)


def chunks_of(desc: AttentionDescriptor) -> tuple[int, int]:
    """Chunks of a key and of a value. TMA fills columns beyond them with 0."""
    chunk = SHAPES[width_of(desc)].chunk
    return math.ceil(desc.head_dim / chunk), math.ceil(desc.values / chunk)


def supports(desc: AttentionDescriptor, target: Target) -> Support:
    return can_map(desc, WIDEST) and arguments.supports(desc, lambda d: tiles_of(d) * d.batch * d.heads)


def rank(desc: AttentionDescriptor, target: Target) -> float:
    """Estimated microseconds."""
    width, (of_keys, of_values) = width_of(desc), chunks_of(desc)
    loaded = (of_keys + of_values) / 2 * SHAPES[width].chunk
    begun_us = START_US[width] + TILE_US * tiles_of(desc) * desc.batch * desc.heads / target.sm_count
    return begun_us + cost_us(desc, target, PRODUCTS, TERAFLOPS[width], TILE, loaded)


# Besides the values, a row's bits depend only on blocks of keys, which begin at multiples of their number of keys.
@hopper_entry(AttentionDescriptor, "wgmma", supports=supports, rank=rank)
def wgmma(desc: AttentionDescriptor, target: Target) -> list[Launch]:
    lse = desc.operand("lse")
    if lse.numel == 0:
        return []
    shape, heads = SHAPES[width_of(desc)], desc.batch * desc.heads
    of_keys, of_values = chunks_of(desc)
    programs = min(tiles_of(desc) * heads, target.sm_count)
    fitting = section_heads(desc, desc.keys) * desc.group
    rows = {"q": TILE // 2, "k": shape.block, "v": shape.block, "out": TILE // 2}
    return [
        Launch(
            attention_wgmma_kernel,
            programs,
            {
                **{name: tensor_map(name, desc.element, n, shape.chunk) for name, n in rows.items()},
                "lse": pointer(lse),
                "scale": Scalar("scale", ElementKind.F32, desc.head_dim**-0.5),
                "tiles": Int(tiles_of(desc)),
                "heads": Int(heads),
                **order_of(tiles_of(desc), heads, fitting, programs, desc.causal),
                "of_sequence": Int(desc.heads),
                "group": Int(desc.group),
                "keys": Int(desc.keys),
                "shift": Int(shift_of(desc)),
            },
            {
                "WIDTH": shape.chunk,
                "CHUNKS": of_keys,
                "VALUES": of_values,
                "BLOCK": shape.block,
                "STAGES": shape.stages,
                "AHEAD": shape.ahead,
                "CAUSAL": desc.causal,
                "TREE": width_of(desc) == 64,
            },
            num_warps=4,
        )
    ]
