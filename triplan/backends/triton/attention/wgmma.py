"""Kernel ``wgmma``: attention on Hopper by TMA and wgmma, warp-specialised and persistent."""

from __future__ import annotations

import math

from triplan.backends.runtime.launch import Int, Launch, Scalar
from triplan.backends.triton.attention import arguments
from triplan.backends.triton.attention.arguments import PRODUCTS, cost_us, pointer
from triplan.backends.triton.attention.entries import hopper_entry
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

#: Keys of a block, and slots of the K and V rings.
BLOCK, STAGES = 128, 2
#: TFLOP/s by width of a head, about those in ``bench/results/attention-nvidia-h200.csv``.
TERAFLOPS = {64: 430.0, 128: 640.0}
#: Microseconds more than a kernel without warps of several kinds takes to begin and to end, by width of a head. Set by
#: hand, from 2 to 512 queries on an H100.
START_US = {64: 1.0, 128: 2.5}


def tiles_of(desc: AttentionDescriptor) -> int:
    """Tiles of queries per head."""
    return math.ceil(desc.queries / TILE)


def supports(desc: AttentionDescriptor, target: Target) -> Support:
    return can_map(desc) and arguments.supports(desc, lambda d: tiles_of(d) * d.batch * d.heads)


def rank(desc: AttentionDescriptor, target: Target) -> float:
    """Estimated microseconds."""
    width = width_of(desc)
    return START_US[width] + cost_us(desc, target, PRODUCTS, TERAFLOPS[width], TILE, width)


# Besides the values, a row's bits depend only on blocks of keys ending at multiples of BLOCK.
@hopper_entry(AttentionDescriptor, "wgmma", supports=supports, rank=rank)
def wgmma(desc: AttentionDescriptor, target: Target) -> list[Launch]:
    lse = desc.operand("lse")
    if lse.numel == 0:
        return []
    width, heads = width_of(desc), desc.batch * desc.heads
    programs = min(tiles_of(desc) * heads, target.sm_count)
    fitting = section_heads(desc, desc.keys) * desc.group
    rows = {"q": TILE // 2, "k": BLOCK, "v": BLOCK, "out": TILE // 2}
    return [
        Launch(
            attention_wgmma_kernel,
            programs,
            {
                **{name: tensor_map(name, desc.element, n, width) for name, n in rows.items()},
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
            {"WIDTH": width, "BLOCK": BLOCK, "STAGES": STAGES, "CAUSAL": desc.causal, "TREE": width == 64},
            num_warps=4,
        )
    ]
