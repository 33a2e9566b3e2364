"""Kernel ``wgmma_stored`` of the backward op: dk, dv and ds by tiles of keys, then dq = ds @ k; no atomics.

Five products, where ``wgmma`` recomputes the scores for dq and has seven. ds is stored for a part at a time: as many
key heads as fit into BUDGET bytes, and if those would be too few to occupy the card, with some of the query heads of
each group, or some of their rows. Accumulators of dk and dv then wait in f32 for the next part, so that the bits are
those of one part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from triplan.backends.runtime.gluon import gl
from triplan.backends.runtime.launch import Arg, Copy, Int, Launch, Scratch, TensorMap
from triplan.backends.triton.attention import wgmma_backward
from triplan.backends.triton.attention.arguments import pointer, strides
from triplan.backends.triton.attention.costs import streamed_us
from triplan.backends.triton.attention.entries import hopper_entry
from triplan.backends.triton.attention.tma import (
    TILE,
    order_of,
    section_heads,
    shift_of,
    tensor_map,
    width_of,
)
from triplan.backends.triton.attention.wgmma_backward import (
    ROWS,
    key_tiles,
    keys_launch,
    rows_bytes,
    scale_of,
    tiles_of,
)
from triplan.backends.triton.attention.wgmma_stored_kernels import (
    attention_rows_kernel,
    attention_wgmma_stored_dq_kernel,
)
from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import ceil_power
from triplan.descriptors import AttentionBackwardDescriptor
from triplan.sku import ElementKind, Support, Target
from triplan.sku.facts import fact

#: Bytes of ds and of waiting accumulators.
BUDGET = 288 * 10**6
#: Rows of a tile of dq, in blocks of 64.
BLOCKS = 4
#: Bytes of ds of a tile of keys and a block of rows.
BLOCK_BYTES = TILE * ROWS * 2
#: Slots of the ring of dq's launch, by the width of a head: as many as shared memory holds.
DQ_STAGES = {64: 4, 128: 3}
#: Microseconds of a program for a block of ds, and for dq of 64 keys and 256 rows, by the width of a head; of an H200.
STEP_US, DQ_STEP_US = {64: 1.0, 128: 1.43}, {64: 1.06, 128: 1.05}
#: Microseconds more than kernels without warps of several kinds take to begin and to end. Set by hand, from 2 to 512
#: queries on an H100.
START_US = 3.0
#: What a tile costs besides its blocks, in blocks. Untuned.
OVERHEAD = 4.0
#: More ranges of the rows of a head are not tried: launches would have too few tiles.
MOST_RANGES = 16
#: So many turns more than the fewest are tried: turns of as many tiles as programs balance best.
MORE_TURNS = 4
#: Tiles of keys for each multiprocessor from which on more parts are not tried.
ENOUGH = 3
#: A launch with tiles of unequal length takes so many times the mean work of its programs. Untuned.
UNEVEN = 1.05


@dataclass(frozen=True, slots=True)
class Part:
    """Query heads of a group, from ``begin`` to ``end``, and blocks of 64 rows of these, from ``first`` to ``last``."""

    begin: int
    end: int
    first: int
    last: int

    @property
    def members(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Division:
    """``parts`` of ``heads`` key heads at a time, and an estimate in microseconds."""

    heads: int
    parts: tuple[Part, ...]
    us: float


def blocks_of(desc: AttentionBackwardDescriptor) -> int:
    """Blocks of 64 rows of a head, padded to whole tiles of 128."""
    return tiles_of(desc) * (TILE // ROWS)


def stored_blocks(desc: AttentionBackwardDescriptor, first: int, last: int) -> int:
    """Blocks of ds of one query head for these blocks of rows, as ``stored_before`` of the kernel counts them."""
    tiles = key_tiles(desc)
    if not desc.causal:
        return tiles * (last - first)
    position = shift_of(desc) // ROWS
    a = min(max((first + position) // 2, 0), tiles)
    b = min(max((last + position) // 2, a), tiles)
    return tiles * last - (a * first + b * (b - 1) - a * (a - 1) - position * (b - a) + (tiles - b) * last)


def _ranges(desc: AttentionBackwardDescriptor, count: int) -> list[tuple[int, int]]:
    """The rows of a head in up to ``count`` ranges of whole tiles of dq, whose ds are about as large."""
    blocks = blocks_of(desc)
    total = stored_blocks(desc, 0, blocks)
    found: list[tuple[int, int]] = []
    begin = 0
    for end in range(BLOCKS, blocks, BLOCKS):
        if stored_blocks(desc, 0, end) * count >= total * (len(found) + 1):
            found.append((begin, end))
            begin = end
    return [*found, (begin, blocks)]


def _choices(desc: AttentionBackwardDescriptor) -> Iterator[tuple[Part, ...]]:
    """All rows of all query heads, of some of each group, and rows of one in more and more ranges."""
    blocks, group = blocks_of(desc), desc.group
    for each in (n for n in range(group, 0, -1) if group % n == 0):
        yield tuple(Part(m, m + each, 0, blocks) for m in range(0, group, each))
    count = 2
    while count <= min(blocks // BLOCKS, MOST_RANGES):
        ranges = _ranges(desc, count)
        yield tuple(Part(m, m + 1, *rows) for m in range(group) for rows in ranges)
        count *= 2


def _launch_us(n: int, total: float, longest: float, heads: int, sms: int, causal: bool, step: float) -> float:
    """Estimated microseconds of ``n`` tiles for each of ``heads``, whose ``longest`` and ``total`` are in steps."""
    programs = min(n * heads, sms)
    if causal:
        busiest = max(longest + OVERHEAD, UNEVEN * (total + n * OVERHEAD) * heads / programs)
    else:
        busiest = math.ceil(n * heads / programs) * (longest + OVERHEAD)
    return card.OVERLAPPED_LAUNCH_US + busiest * step


def _part_us(desc: AttentionBackwardDescriptor, part: Part, heads: int, sms: int) -> float:
    """Estimated microseconds of both launches for a part of ``heads`` key heads."""
    width, tiles, m = width_of(desc), key_tiles(desc), part.members
    stored, rows = stored_blocks(desc, part.first, part.last), part.last - part.first
    keys_us = _launch_us(tiles, m * stored, m * rows, heads, sms, desc.causal, STEP_US[width])
    # A step of dq takes a block of 64 keys and four of rows; ds is stored for 128 keys and one.
    longest = 2 * tiles
    if desc.causal:
        longest = max(min(longest, part.last + shift_of(desc) // ROWS), 0)
    n = math.ceil(rows / BLOCKS)
    dq_us = _launch_us(n, stored / 2, longest, heads * m, sms, desc.causal, DQ_STEP_US[width])
    return keys_us + dq_us


@fact
def division_of(desc: AttentionBackwardDescriptor, sms: int) -> Division | None:
    """The parts that are estimated to be fastest; None where the shortest range of rows of one head does not fit."""
    total = desc.batch * desc.key_heads
    best: Division | None = None
    for parts in _choices(desc):
        nbytes = max(p.members * stored_blocks(desc, p.first, p.last) for p in parts) * BLOCK_BYTES
        each = nbytes + (sums_bytes(desc, 1) if len(parts) > 1 else 0)
        most = min(BUDGET // max(each, 1), total)
        if most == 0:
            continue
        turns = math.ceil(total / most)
        waiting_us = (len(parts) - 1) * 2 * sums_bytes(desc, total) / card.BYTES_PER_US
        for heads in {math.ceil(total / n): None for n in range(turns, turns + MORE_TURNS)}:
            whole, rest = divmod(total, heads)
            us = waiting_us + sum(_part_us(desc, p, heads, sms) * whole for p in parts)
            us += sum(_part_us(desc, p, rest, sms) for p in parts) if rest else 0.0
            if best is None or us < best.us:
                best = Division(heads, parts, us)
        if best is not None and most * key_tiles(desc) >= ENOUGH * sms:
            break
    return best


def known_division(desc: AttentionBackwardDescriptor, target: Target) -> Division:
    """``division_of`` where ``supports`` holds."""
    division = division_of(desc, target.sm_count)
    assert division is not None
    return division


def supports(desc: AttentionBackwardDescriptor, target: Target) -> Support:
    found = wgmma_backward.supports(desc, target)
    if found and division_of(desc, target.sm_count) is None:
        return Support.no(f"ds of a range of {desc.queries // MOST_RANGES} rows does not fit into {BUDGET} bytes")
    return found


def sums_bytes(desc: AttentionBackwardDescriptor, heads: int) -> int:
    """Bytes of the f32 accumulators of dk and dv."""
    return 2 * 4 * heads * key_tiles(desc) * TILE * width_of(desc)


def ds_rows(desc: AttentionBackwardDescriptor, division: Division) -> int:
    """Rows of 64 elements of the stored ds."""
    return TILE * division.heads * max(p.members * stored_blocks(desc, p.first, p.last) for p in division.parts)


def _ds_offset(desc: AttentionBackwardDescriptor, division: Division) -> int:
    """Where ds begins in the workspace."""
    return 2 * rows_bytes(desc) + (sums_bytes(desc, division.heads) if len(division.parts) > 1 else 0)


def workspace(desc: AttentionBackwardDescriptor, target: Target) -> int:
    """Bytes of sum(dout * out) and lse of each row, of ds of a part, and of waiting accumulators."""
    division = known_division(desc, target)
    return _ds_offset(desc, division) + ds_rows(desc, division) * ROWS * desc.element.itemsize


def rows_us(desc: AttentionBackwardDescriptor) -> float:
    """Estimated microseconds of ``rows_launch``."""
    read = sum(desc.operand(name).nbytes for name in ("out", "dout"))
    return card.LAUNCH_US + (read + 3 * rows_bytes(desc)) / card.BYTES_PER_US


def rank(desc: AttentionBackwardDescriptor, target: Target) -> float:
    """Estimated microseconds."""
    return rows_us(desc) + START_US + known_division(desc, target).us + streamed_us(desc)


@hopper_entry(
    AttentionBackwardDescriptor,
    "wgmma_stored",  # whose bits do not depend on the parts
    supports=supports,
    rank=rank,
    workspace=workspace,
    priority=1,  # after wgmma, which gives other bits and needs less workspace
)
def wgmma_stored(desc: AttentionBackwardDescriptor, target: Target) -> list[Launch]:
    division, total = known_division(desc, target), desc.batch * desc.key_heads
    found = [rows_launch(desc)]
    for first in range(0, total, division.heads):
        heads = min(division.heads, total - first)
        for part in division.parts:
            found.append(_keys_launch(desc, target, division, part, first, heads))
            found.append(_dq_launch(desc, target, division, part, first, heads))
    return found


def _ds_map(desc: AttentionBackwardDescriptor, division: Division) -> TensorMap:
    element = gl.bfloat16 if desc.element is ElementKind.BF16 else gl.float16
    shared = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], element)
    copy = Copy(_ds_offset(desc, division), (ds_rows(desc, division), ROWS), (ROWS, 1))
    return TensorMap("q", desc.element, (ROWS, ROWS), shared=shared, copy=copy)


def rows_launch(desc: AttentionBackwardDescriptor) -> Launch:
    """The launch for sum(dout * out) and lse2 of each row, at the workspace's first bytes."""
    lse = desc.operand("lse")
    args: dict[str, Arg] = {name: pointer(desc.operand(name)) for name in ("out", "dout", "lse")}
    args |= {f"{name}_strides": strides(desc.operand(name)) for name in ("out", "dout", "lse")}
    args |= {"delta": Scratch(0, ElementKind.F32), "lse2": Scratch(rows_bytes(desc), ElementKind.F32)}
    rounded = tiles_of(desc) * TILE
    args |= {"queries": Int(desc.queries), "heads": Int(desc.heads), "rounded": Int(rounded, divisibility=TILE)}
    programs = lse.shape[0] * lse.shape[1] * rounded // ROWS
    width = ceil_power(width_of(desc))
    constexprs = {"VALUE": desc.values, "WIDTH": width, "BLOCK_Q": ROWS}
    return Launch(attention_rows_kernel, programs, args, constexprs, num_warps=8 if width > 128 else 4)


def _keys_launch(
    desc: AttentionBackwardDescriptor, target: Target, division: Division, part: Part, first: int, heads: int
) -> Launch:
    parts = len(division.parts) > 1
    rows: dict[str, Arg] = {
        "ds": Scratch(_ds_offset(desc, division), desc.element),
        "sums": Scratch(2 * rows_bytes(desc), ElementKind.F32) if parts else None,
        "keys": Int(desc.keys),
        "blocks": Int(part.last),
        "first_head": Int(first),
        "member_begin": Int(part.begin),
        "member_end": Int(part.end),
        "block_begin": Int(part.first),
    }
    ends = {"STORES": True, "CONTINUES": part is not division.parts[0], "ENDS": part is division.parts[-1]}
    return keys_launch(desc, target, heads, rows, ends)


def _dq_launch(
    desc: AttentionBackwardDescriptor, target: Target, division: Division, part: Part, first: int, heads: int
) -> Launch:
    width, of_rows = width_of(desc), heads * part.members
    tiles = math.ceil((part.last - part.first) / BLOCKS)
    programs = min(tiles * of_rows, target.sm_count)
    fitting = section_heads(desc, desc.keys) * desc.group
    return Launch(
        attention_wgmma_stored_dq_kernel,
        programs,
        {
            "k": tensor_map("k", desc.element, ROWS, width),
            "dq": tensor_map("dq", desc.element, ROWS, width),
            "ds": _ds_map(desc, division),
            "scale": scale_of(desc),
            "tiles": Int(tiles),
            "heads": Int(of_rows),
            **order_of(tiles, of_rows, fitting, programs, desc.causal, in_turns=True),
            "block_begin": Int(part.first),
            "block_end": Int(part.last),
            "key_blocks": Int(math.ceil(desc.keys / ROWS)),
            "shift": Int(shift_of(desc)),
            "first_head": Int(first),
            "of_sequence": Int(desc.key_heads),
            "group": Int(desc.group),
            "member_begin": Int(part.begin),
            "members": Int(part.members),
        },
        {"WIDTH": width, "STAGES": DQ_STAGES[width], "CAUSAL": desc.causal},
        num_warps=4,
        overlaps=True,
    )
