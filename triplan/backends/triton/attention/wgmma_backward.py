"""Kernel ``wgmma`` of the backward op: a launch for dq, delta and lse of each row, one for dk and dv; no atomics."""

from __future__ import annotations

import math
from collections.abc import Mapping

from triplan.backends.runtime.gluon import gl
from triplan.backends.runtime.launch import Arg, Copy, Int, Launch, Scalar, Scratch, TensorMap
from triplan.backends.triton.attention import arguments
from triplan.backends.triton.attention.arguments import pointer
from triplan.backends.triton.attention.costs import Pace, backward_us
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
from triplan.backends.triton.attention.wgmma_backward_dq_kernels import attention_wgmma_dq_kernel
from triplan.backends.triton.attention.wgmma_backward_kernels import attention_wgmma_dkdv_kernel
from triplan.descriptors import AttentionBackwardDescriptor
from triplan.sku import ElementKind, Support, Target

#: Rows of a tile that one warpgroup multiplies.
ROWS = 64
#: Slots of the rings of the launch for dk and dv, by the width of a head: as many as shared memory holds.
STAGES = {64: 4, 128: 3}
DQ_STAGES = 2
#: Slots of K and V there: the second loads the next tile early. On one H100, 128 wide heads were faster with one.
SLOTS = {64: 2, 128: 1}
#: Constants of the launch for dk and dv of all heads and rows.
WHOLE = {"first_head": 0, "member_begin": 0, "block_begin": 0, "CONTINUES": False, "ENDS": True}
#: By width of a head, by least squares over bench/results/anywhere-attention-* and attention-*.
PACES = {64: Pace(2.0, 0.0, 662.0, start_us=1.5), 128: Pace(4.2, 0.0, 813.0)}


def tiles_of(desc: AttentionBackwardDescriptor) -> int:
    """Tiles of queries per head."""
    return math.ceil(desc.queries / TILE)


def key_tiles(desc: AttentionBackwardDescriptor) -> int:
    return math.ceil(desc.keys / TILE)


def rows_bytes(desc: AttentionBackwardDescriptor) -> int:
    """Bytes of one f32 per query, with the queries of each head padded to whole tiles."""
    return desc.batch * desc.heads * tiles_of(desc) * TILE * 4


def workspace(desc: AttentionBackwardDescriptor, target: Target) -> int:
    """Bytes of sum(dout * out) and of lse in base-2 logarithms."""
    return 2 * rows_bytes(desc)


def row_map(desc: AttentionBackwardDescriptor, offset: int) -> TensorMap:
    """The tensor map of ``rows_bytes`` in the workspace, in blocks of ROWS queries of one head."""
    length = tiles_of(desc) * TILE
    shared = gl.NVMMASharedLayout.get_default_for([1, ROWS], gl.float32)
    copy = Copy(offset, (desc.batch * desc.heads, length), (length, 1))
    return TensorMap("lse", ElementKind.F32, (1, ROWS), shared=shared, copy=copy)


def supports(desc: AttentionBackwardDescriptor, target: Target) -> Support:
    if desc.operand("lse").numel == 0:
        return Support.no("there are no queries, and TMA maps no empty tensor")
    if rows_bytes(desc) >= 2**33:
        return Support.no(f"{desc.batch * desc.heads * desc.queries} rows; it counts fewer than 2**31")
    found = arguments.supports(desc, lambda d: max(tiles_of(d) * d.heads, key_tiles(d) * d.key_heads) * d.batch * 2)
    return can_map(desc) and found


def rank(desc: AttentionBackwardDescriptor, target: Target) -> float:
    """Estimated microseconds."""
    width = width_of(desc)
    return backward_us(desc, target, (TILE, TILE), (TILE, ROWS), (width, width), PACES[width], persistent=True)


def keys_launch(
    desc: AttentionBackwardDescriptor,
    target: Target,
    heads: int,
    rows: dict[str, Arg],
    constexprs: Mapping[str, object],
) -> Launch:
    """The launch for dk and dv of ``heads`` key heads. ``rows``, ``constexprs``: which heads and rows, and ``ds``."""
    width, tiles = width_of(desc), key_tiles(desc)
    programs = min(tiles * heads, target.sm_count)
    fitting = section_heads(desc, desc.queries * desc.group)
    return Launch(
        attention_wgmma_dkdv_kernel,
        programs,
        {
            **{name: tensor_map(name, desc.element, ROWS, width) for name in ("q", "k", "v", "dout", "dk", "dv")},
            "delta": row_map(desc, 0),
            "lse2": row_map(desc, rows_bytes(desc)),
            "scale": scale_of(desc),
            "group": Int(desc.group),
            "shift": Int(shift_of(desc)),
            "tiles": Int(tiles),
            "heads": Int(heads),
            **order_of(tiles, heads, fitting, programs, desc.causal, in_turns=True),
            "of_sequence": Int(desc.key_heads),
            **rows,
        },
        {"SLOTS": SLOTS[width], "WIDTH": width, "STAGES": STAGES[width], "CAUSAL": desc.causal, **constexprs},
        num_warps=4,
        overlaps=True,
    )


def scale_of(desc: AttentionBackwardDescriptor) -> Scalar:
    return Scalar("scale", ElementKind.F32, desc.head_dim**-0.5)


@hopper_entry(AttentionBackwardDescriptor, "wgmma", supports=supports, rank=rank, workspace=workspace)
def wgmma_backward(desc: AttentionBackwardDescriptor, target: Target) -> list[Launch]:
    width, tiles = width_of(desc), tiles_of(desc)
    heads = desc.batch * desc.heads

    def maps(height: int, *names: str) -> dict[str, Arg]:
        return {name: tensor_map(name, desc.element, height, width) for name in names}

    of_keys = keys_launch(
        desc,
        target,
        desc.batch * desc.key_heads,
        {"blocks": Int(tiles * (TILE // ROWS)), "member_end": Int(desc.group), "ds": None, "sums": None},
        {**WHOLE, "keys": 0, "STORES": False},
    )
    programs = min(tiles * heads, target.sm_count)
    of_queries = Launch(
        attention_wgmma_dq_kernel,
        programs,
        {
            **maps(ROWS, "q", "out", "dout", "dq"),
            **maps(TILE, "k", "v"),
            "scale": scale_of(desc),
            "group": Int(desc.group),
            "shift": Int(shift_of(desc)),
            "lse": pointer(desc.operand("lse")),
            "delta": Scratch(0, ElementKind.F32),
            "lse2": Scratch(rows_bytes(desc), ElementKind.F32),
            "queries": Int(desc.queries),
            "tiles": Int(tiles),
            "heads": Int(heads),
            **order_of(tiles, heads, section_heads(desc, desc.keys) * desc.group, programs, desc.causal, in_turns=True),
            "of_sequence": Int(desc.heads),
            "keys": Int(desc.keys),
        },
        {"WIDTH": width, "STAGES": DQ_STAGES, "CAUSAL": desc.causal},
        num_warps=4,
    )
    return [of_queries, of_keys]
