"""Kernel ``wgmma_wide`` of the backward op: wide heads on Hopper, in three launches without atomics: delta and lse of
each row; dk and dv; dq.

Eight products, where the mathematics has five: dk, dv and dq are accumulated by different warpgroups, whose registers
hold one accumulator of 64 rows each, and each of them computes the scores anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch
from triplan.backends.triton.attention import arguments, wgmma_stored
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
from triplan.backends.triton.attention.wgmma_backward import ROWS, row_map, rows_bytes, scale_of, tiles_of
from triplan.backends.triton.attention.wgmma_wide_dq_kernels import attention_wgmma_wide_dq_kernel
from triplan.backends.triton.attention.wgmma_wide_kernels import attention_wgmma_wide_dkdv_kernel
from triplan.descriptors import AttentionBackwardDescriptor
from triplan.sku import ElementKind, Support, Target

#: The narrowest head, exclusive: both accumulators of narrower ones fit one warpgroup, which ``wgmma`` has.
NARROWEST = 128
#: The widest head, whose accumulator of 64 rows takes 128 registers of each thread of a warpgroup.
WIDEST = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """How heads of a padded width lie in shared memory: in ``chunk`` columns, blocks of 64 rows of Q and dout in rings
    of ``stages`` slots; in the launch for dq, blocks of K in ``of_keys`` slots and of V in ``of_values``."""

    chunk: int
    stages: int
    of_keys: int
    of_values: int


#: By the padded width of a head: as much as shared memory holds.
SHAPES = {192: Shape(64, 3, 3, 2), 256: Shape(256, 2, 2, 1)}
#: By the padded width of a head, by least squares over bench/results/attention-* and copies of heads of 129 and 231
#: elements, of an H200.
PACES = {192: Pace(2.1, 0.0, 712.0, start_us=1.6), 256: Pace(1.6, 0.0, 768.0, start_us=1.6)}


def key_tiles(desc: AttentionBackwardDescriptor) -> int:
    """Tiles of 64 keys."""
    return math.ceil(desc.keys / ROWS)


def chunks_of(desc: AttentionBackwardDescriptor) -> tuple[int, int]:
    """Chunks of a key and of a value. TMA fills columns beyond them with 0."""
    chunk = SHAPES[width_of(desc)].chunk
    return math.ceil(desc.head_dim / chunk), math.ceil(desc.values / chunk)


def workspace(desc: AttentionBackwardDescriptor, target: Target) -> int:
    """Bytes of sum(dout * out) and of lse in base-2 logarithms."""
    return 2 * rows_bytes(desc)


def supports(desc: AttentionBackwardDescriptor, target: Target) -> Support:
    if max(desc.head_dim, desc.values) <= NARROWEST:
        return Support.no(f"heads of {desc.head_dim} and {desc.values} elements; it takes wider ones than {NARROWEST}")
    if desc.operand("lse").numel == 0:
        return Support.no("there are no queries, and TMA maps no empty tensor")
    if rows_bytes(desc) >= 2**33:
        return Support.no(f"{desc.batch * desc.heads * desc.queries} rows; it counts fewer than 2**31")
    found = arguments.supports(desc, lambda d: max(tiles_of(d) * d.heads, key_tiles(d) * d.key_heads) * d.batch * 2)
    return can_map(desc, WIDEST) and found


def rank(desc: AttentionBackwardDescriptor, target: Target) -> float:
    """Estimated microseconds."""
    width = width_of(desc)
    key, value = (n * SHAPES[width].chunk for n in chunks_of(desc))
    found = backward_us(desc, target, (TILE, ROWS), (ROWS, ROWS), (key, value), PACES[width], persistent=True)
    return wgmma_stored.rows_us(desc) + found


@hopper_entry(AttentionBackwardDescriptor, "wgmma_wide", supports=supports, rank=rank, workspace=workspace)
def wgmma_wide(desc: AttentionBackwardDescriptor, target: Target) -> list[Launch]:
    return [wgmma_stored.rows_launch(desc), _keys_launch(desc, target), _queries_launch(desc, target)]


def _maps(desc: AttentionBackwardDescriptor, *names: str) -> dict[str, Arg]:
    return {name: tensor_map(name, desc.element, ROWS, SHAPES[width_of(desc)].chunk) for name in names}


def _constants(desc: AttentionBackwardDescriptor) -> dict[str, object]:
    of_keys, of_values = chunks_of(desc)
    chunk = SHAPES[width_of(desc)].chunk
    return {"WIDTH": chunk, "CHUNKS": of_keys, "VALUES": of_values, "CAUSAL": desc.causal}


def _keys_launch(desc: AttentionBackwardDescriptor, target: Target) -> Launch:
    tiles, heads = key_tiles(desc), desc.batch * desc.key_heads
    programs = min(tiles * heads, target.sm_count)
    fitting = section_heads(desc, desc.queries * desc.group)
    return Launch(
        attention_wgmma_wide_dkdv_kernel,
        programs,
        {
            **_maps(desc, "q", "k", "v", "dout", "dk", "dv"),
            "delta": row_map(desc, 0),
            "lse2": row_map(desc, rows_bytes(desc)),
            "scale": scale_of(desc),
            "group": Int(desc.group),
            "shift": Int(shift_of(desc) // ROWS),
            "tiles": Int(tiles),
            "heads": Int(heads),
            **order_of(tiles, heads, fitting, programs, desc.causal, in_turns=True),
            "of_sequence": Int(desc.key_heads),
            "count": Int(tiles * heads),
            "programs": Int(programs),
            "blocks": Int(math.ceil(desc.queries / ROWS)),
        },
        {**_constants(desc), "STAGES": SHAPES[width_of(desc)].stages},
        num_warps=4,
        overlaps=True,
    )


def _queries_launch(desc: AttentionBackwardDescriptor, target: Target) -> Launch:
    tiles, heads, shape = tiles_of(desc), desc.batch * desc.heads, SHAPES[width_of(desc)]
    programs = min(tiles * heads, target.sm_count)
    fitting = section_heads(desc, desc.keys) * desc.group
    return Launch(
        attention_wgmma_wide_dq_kernel,
        programs,
        {
            **_maps(desc, "q", "k", "v", "dout", "dq"),
            "delta": Scratch(0, ElementKind.F32),
            "lse2": Scratch(rows_bytes(desc), ElementKind.F32),
            "scale": scale_of(desc),
            "group": Int(desc.group),
            "shift": Int(shift_of(desc)),
            "tiles": Int(tiles),
            "heads": Int(heads),
            **order_of(tiles, heads, fitting, programs, desc.causal, in_turns=True),
            "of_sequence": Int(desc.heads),
            "keys": Int(desc.keys),
        },
        {**_constants(desc), "KEY_STAGES": shape.of_keys, "STAGES": shape.of_values},
        num_warps=4,
        overlaps=True,
    )
