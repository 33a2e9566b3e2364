"""Launches that sum sorted segments into the table, and the guarantees of these sums.

A segment is the run of sorted contributions to one slot. ``segments_kernels`` defines the order of the additions:
``sorted_sum`` and ``scanned_sum`` both keep to it, and have one numerics id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Launch, power_of_two_in
from triplan.backends.triton.common.offsets import I32_LIMIT, TL, ceil_power, extents, padded, strides, values
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.indexing import segments_kernels as kernels, sorting, turned
from triplan.backends.triton.indexing.arguments import alpha
from triplan.backends.triton.indexing.geometry import geometry
from triplan.backends.triton.indexing.sorting import Buffers, Sorted, buffers, sorted_view, summed_view
from triplan.backends.triton.indexing.sums import sum_guarantee, sum_numerics, zero_launches
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import PrecisionGuarantee, Support

#: Columns of the widest tile, for elements of up to 4 bytes.
MAX_COLS = 1024
#: Columns of the widest tile, for elements of 8 bytes.
MAX_COLS_64_BIT = 512
#: Columns from which on a row gets a program of its own.
WIDE_COLS = 256
#: Columns per warp of a program that has one wide row.
WARP_COLS = 256
#: Threads per program of narrow rows, each with one vector.
THREADS = 128
#: Bytes of a vector load.
VECTOR_BYTES = 16
#: Bytes that a warp loads, one vector per thread.
WARP_BYTES = 32 * VECTOR_BYTES
#: Contributions that a program has in flight.
UNROLL = 4
#: The same in ``chunks_kernel``, where ptxas spills an address in some configurations with more. It has many programs.
CHUNKS_UNROLL = 2
#: Columns per program of ``groups_kernel``: wide, as nearly all programs find nothing to do.
GROUP_COLS = 1024
#: Columns per warp of ``groups_kernel``.
GROUP_WARP_COLS = 128
#: Chunks that a program of ``groups_kernel`` has in flight.
GROUP_UNROLL = 8
#: Slots that a program of ``wide_kernel`` sums one after another.
LOOP = 4
#: Contributions that a program of ``wide_kernel`` loads at a time, after the first two of a slot.
LOOP_UNROLL = 2
#: Most rows of a tile where programs are launched for sorted positions: a program reads CHUNK keys after each of them.
POSITIONS = 16


# --- guarantees ---


def most_additions(count: int) -> int:
    """The most additions that one of ``count`` contributions passes through.

    Those of its chunk, of its group, of the groups, and of what the table held.
    """
    chunks = -(-count // sorting.CHUNK)
    return min(count, sorting.CHUNK) + min(chunks, sorting.CHUNK) + -(-chunks // sorting.CHUNK) + 1


def guarantee(desc: IndexingDescriptor) -> Mapping[str, PrecisionGuarantee]:
    additions = most_additions(geometry(desc).most_contributions)
    return sum_guarantee(desc, desc.element.compute, ordered=True, additions=additions)


def numerics(desc: IndexingDescriptor) -> str | None:
    return sum_numerics(desc, "sorted-sum")


# --- tiles ---


@dataclass(frozen=True, slots=True)
class Tile:
    """The ``rows`` x ``cols`` elements of a program, and its warps."""

    rows: int
    cols: int
    warps: int

    def programs(self, rows: int, cols: int) -> int:
        return -(-rows // self.rows) * -(-cols // self.cols)


def tile(desc: IndexingDescriptor, rows: int, inner: int) -> Tile:
    """The tile for ``rows`` rows of ``inner`` elements: one wide row, or as many narrow ones as fill the threads."""
    cols = min(ceil_power(inner), MAX_COLS if desc.element.itemsize < 8 else MAX_COLS_64_BIT)
    if cols >= WIDE_COLS:
        return Tile(1, cols, cols // WARP_COLS)
    vector = min(VECTOR_BYTES // desc.element.itemsize, cols)
    return Tile(min(THREADS * vector // cols, ceil_power(rows)), cols, THREADS // 32)


def lanes_tile(desc: IndexingDescriptor, s: Sorted) -> Tile:
    """The tile of one contribution's lanes."""
    return tile(desc, s.outer, s.inner)


def _items(s: Sorted) -> int:
    """Items that the programs of ``segments_kernel`` are launched for: slots, or sorted positions."""
    return s.slots if s.by_slot else s.count


def _items_tile(desc: IndexingDescriptor, s: Sorted) -> Tile:
    found = tile(desc, s.slots if s.by_slot else min(s.count, POSITIONS), s.inner)
    walked = not (s.g.dense.layout.packed or s.g.table.layout.packed)
    if not (walked or s.span % 2) or found.rows * found.cols <= 128 * found.warps:
        return found
    # Each lane of a thread has an address of its own then, or two: those of eight lanes do not fit in registers.
    return replace(found, rows=found.rows // 2) if found.rows > 1 else replace(found, cols=found.cols // 2)


def idle_lanes(desc: IndexingDescriptor, s: Sorted) -> float:
    """Columns of all tiles, relative to those that exist."""
    cols = _items_tile(desc, s).cols
    return -(-s.inner // cols) * cols / s.inner


def is_wide(desc: IndexingDescriptor, s: Sorted) -> bool:
    """Whether ``wide_kernel`` sums, of which a program has LOOP slots one after another; else all at a time."""
    flat = s.g.dense.layout.packed and s.g.table.layout.packed
    return flat and s.by_slot and _items_tile(desc, s).rows == 1


def _windows(s: Sorted) -> int:
    return -(-s.count // sorting.CHUNK)


def fits_grids(desc: IndexingDescriptor) -> Support:
    """Whether the largest launch fits in a grid."""
    s = summed_view(desc)
    own = s.outer * _items_tile(desc, s).programs(_items(s), s.inner)
    chunks = lanes_tile(desc, s).programs(s.outer, s.inner)
    copied = turned.programs(g) if turned.copied(g := sorted_view(desc).g) else 0
    return fits_grid(max(own, copied, _windows(s) * max(chunks, -(-s.lanes // GROUP_COLS))))


# --- launches ---


def offsets_wide(s: Sorted) -> bool:
    """Whether offsets need 64 bits, also those of contributions with ``span``."""
    return s.g.wide or s.outer * s.count * s.span >= I32_LIMIT


def lane_arguments(desc: IndexingDescriptor, s: Sorted) -> tuple[dict[str, Arg], dict[str, Any]]:
    """Arguments and constexprs that say where contributions lie."""
    g, wide = s.g, offsets_wide(s)
    flat = g.dense.layout.packed and g.table.layout.packed
    args: dict[str, Arg] = {
        "dense": values(g.dense),
        "alpha": alpha(desc, desc.element.compute),
        "count": Int(s.count),
        "slots": Int(s.slots),
        "outer": Int(s.outer),
        "inner": Int(s.inner, wide, power_of_two_in(s.inner)),
        "outer_sizes": None if flat else s.before.sizes(),
        "outer_dense": None if flat else s.before.dense(),
        "inner_sizes": None if flat else s.behind.sizes(),
        "inner_dense": None if flat else s.behind.dense(),
        "step_sizes": None if flat else s.steps.sizes(),
        "step_dense": None if flat else s.steps.dense(),
    }
    constexprs = {
        "FLAT": flat,
        "OFFSET": tl.int64 if wide else tl.int32,
        "COMPUTE": TL[desc.element.compute],
        "CHUNK": sorting.CHUNK,
    }
    return args, constexprs


def table_arguments(s: Sorted, flat: bool) -> dict[str, Arg]:
    """Arguments that say where slots lie."""
    table = s.g.table
    return {
        "table": values(table),
        "outer_table": None if flat else s.before.table(),
        "inner_table": None if flat else s.behind.table(),
        "slot_sizes": None if flat else extents((table.shape[a] for a in s.slot_axes), False),
        "slot_strides": None if flat else padded(strides(table, s.slot_axes, True), Int(0, True)),
    }


def sum_launches(desc: IndexingDescriptor, stored: bool = False) -> list[Launch]:
    """Sum the sorted segments into the table: first all late chunks, then all late groups, then each segment.

    Contributions that ``turned`` copies are copied before, and slots that no program writes are filled with zeros.
    """
    s, b = summed_view(desc), buffers(desc, stored)
    lanes, constexprs = lane_arguments(desc, s)
    args: dict[str, Arg] = {
        **lanes,
        "keys": b.keys[s.result],
        "order": b.order[s.result],
        "partials": b.partials if s.count > sorting.CHUNK else None,
        "span": None if s.span == s.inner else Int(s.span, offsets_wide(s), power_of_two_in(s.span)),
        "steps": Int(s.count.bit_length()),
    }
    launches = [] if s.by_slot else zero_launches(desc)
    if turned.copied(g := sorted_view(desc).g):
        launches.append(turned.copy_launch(g, b.copy))
        args["dense"] = b.copy
    if s.count > sorting.CHUNK:
        launches.append(_chunks_launch(desc, s, args, constexprs))
    if s.count > sorting.CHUNK * sorting.CHUNK:
        launches.append(_groups_launch(s, args))
    t = _items_tile(desc, s)
    if is_wide(desc, s):
        return [*launches, _wide_launch(s, b, t, args, constexprs)]
    return [*launches, _segments_launch(s, b, t, args, constexprs)]


def _chunks_launch(desc: IndexingDescriptor, s: Sorted, args: dict[str, Arg], constexprs: dict[str, Any]) -> Launch:
    t = lanes_tile(desc, s)
    filled = max(t.rows * t.cols * desc.element.itemsize // WARP_BYTES, 1)
    return Launch(
        kernels.chunks_kernel,
        _windows(s) * t.programs(s.outer, s.inner),
        args,
        {**constexprs, "ROWS": t.rows, "COLS": t.cols, "UNROLL": CHUNKS_UNROLL},
        num_warps=min(t.warps, filled),
    )


def _groups_launch(s: Sorted, args: dict[str, Arg]) -> Launch:
    cols = min(ceil_power(s.lanes), GROUP_COLS)
    return Launch(
        kernels.groups_kernel,
        -(-_windows(s) // sorting.CHUNK) * -(-s.lanes // cols),
        {
            **{name: args[name] for name in ("keys", "partials", "count", "slots", "steps")},
            "lanes": Int(s.lanes, s.lanes >= I32_LIMIT, power_of_two_in(s.lanes)),
        },
        {"CHUNK": sorting.CHUNK, "COLS": cols, "UNROLL": GROUP_UNROLL},
        num_warps=max(cols // GROUP_WARP_COLS, 1),
    )


def _wide_launch(s: Sorted, b: Buffers, t: Tile, args: dict[str, Arg], constexprs: dict[str, Any]) -> Launch:
    shared = ("dense", "order", "partials", "alpha", "count", "slots", "outer", "inner", "span")
    known = {name: constexprs[name] for name in ("OFFSET", "COMPUTE", "CHUNK")}
    return Launch(
        kernels.wide_kernel,
        s.outer * -(-s.slots // LOOP) * -(-s.inner // t.cols),
        {**{name: args[name] for name in shared}, "table": values(s.g.table), "starts": b.starts},
        {**known, "KEEP": s.g.keeps, "COLS": t.cols, "UNROLL": LOOP_UNROLL, "LOOP": LOOP},
        num_warps=t.warps,
    )


def _segments_launch(s: Sorted, b: Buffers, t: Tile, args: dict[str, Arg], constexprs: dict[str, Any]) -> Launch:
    return Launch(
        kernels.segments_kernel,
        s.outer * t.programs(_items(s), s.inner),
        {
            **args,
            **table_arguments(s, constexprs["FLAT"]),
            "starts": b.starts if s.by_slot else None,
            "items": Int(_items(s)),
        },
        {**constexprs, "KEEP": s.g.keeps, "ROWS": t.rows, "COLS": t.cols, "UNROLL": UNROLL},
        num_warps=t.warps,
    )
