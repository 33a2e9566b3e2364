"""Kernel ``wgmma``: attention on Hopper by TMA and wgmma, warp-specialised and persistent."""

from __future__ import annotations

import math
from dataclasses import dataclass

from triplan.backends.runtime.launch import Int, Launch, Scalar
from triplan.backends.triton.attention import arguments
from triplan.backends.triton.attention.arguments import pointer
from triplan.backends.triton.attention.costs import Pace, forward_us
from triplan.backends.triton.attention.entries import hopper_entry
from triplan.backends.triton.attention.tma import (
    TILE,
    is_invariant,
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
#: By width of a head, by least squares over bench/results/anywhere-attention-* and attention-*. Of 128 and 256 more, by
#: as much as bases of exponentials that stay behind maxima gained since, with 4096 and 16384 keys.
PACES = {
    64: Pace(1.4, 0.0, 509.0, start_us=1.6),
    128: Pace(1.7, 0.0, 752.0, start_us=1.7),
    192: Pace(1.7, 0.0, 700.0, start_us=1.7),
    256: Pace(2.6, 0.0, 790.0, start_us=1.3),
}


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
    shape = SHAPES[width_of(desc)]
    key, value = (n * shape.chunk for n in chunks_of(desc))
    return forward_us(desc, target, (TILE, shape.block), (key, value), PACES[width_of(desc)], persistent=True)


def numerics(desc: AttentionDescriptor) -> str | None:
    """Has the chunks of a value: by these the bases of exponentials lag or not, and so lse has other bits."""
    if not is_invariant(desc):
        return None
    return f"attention-wgmma.{desc.element}.{width_of(desc)}.{chunks_of(desc)[1]}.{desc.causal:d}.v2"


# Besides the values, a row's bits depend only on blocks of keys, which begin at multiples of their number of keys.
@hopper_entry(AttentionDescriptor, "wgmma", supports=supports, rank=rank, numerics=numerics, version=2)
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
