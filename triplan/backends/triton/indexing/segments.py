"""From sorted indices to the launches that sum their segments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch, power_of_two_in
from triplan.backends.triton.common.offsets import I32_LIMIT, TL, padded, strides, values
from triplan.backends.triton.indexing import scanned_sum_kernels as scanned
from triplan.backends.triton.indexing import segments_kernels as segments
from triplan.backends.triton.indexing import sorting as sort
from triplan.backends.triton.indexing.geometry import keeps
from triplan.backends.triton.indexing.launches import common, policy, wide
from triplan.sku import ElementKind

#: Up to this many, every program of one launch looks at all of them.
SCANNED = 512
#: Columns of a program that sums groups of chunks.
GROUP_COLS = 1024
#: Slots that a program of wide rows sums in turns, and contributions that it asks for at a time after the first two.
LOOP, AT_A_TIME = 4, 2


@dataclass(frozen=True, slots=True)
class Tile:
    """ROWS by COLS of a program, its warps, and how many contributions it has in flight."""

    rows: int
    cols: int
    warps: int
    unroll: int

    @property
    def constexprs(self) -> dict[str, int]:
        return {"ROWS": self.rows, "COLS": self.cols, "UNROLL": self.unroll}


def tile(desc: Any, rows: int, inner: int) -> Tile:
    """A wide row gets a program of its own, at 256 columns a warp; narrow ones share one, at 16 bytes a thread."""
    cols = min(_ceil_power(inner), 1024 if desc.element.itemsize < 8 else 512)
    if cols >= 256:
        return Tile(1, cols, cols // 256, 4)
    vector = min(16 // desc.element.itemsize, cols)
    return Tile(min(128 * vector // cols, _ceil_power(rows)), cols, 4, 4)


def _filled(desc: Any, t: Tile) -> int:
    """Warps of a tile, but no more than 16 bytes a thread fill."""
    itemsize: int = desc.element.itemsize
    return min(t.warps, max(t.rows * t.cols * itemsize // 512, 1))


def _lane_arguments(desc: Any, s: sort.Sorted) -> tuple[dict[str, Arg], dict[str, Any]]:
    """Arguments and constexprs that say where contributions and slots lie."""
    g = s.g
    offsets_wide = wide(g)
    flat = g.dense.layout.packed and g.table.layout.packed
    args: dict[str, Arg] = {
        "dense": values(g.dense),
        "alpha": common(desc, g)["alpha"],
        "count": Int(s.count),
        "slots": Int(s.slots),
        "outer": Int(s.outer),
        "inner": Int(s.inner, offsets_wide, power_of_two_in(s.inner)),
        "outer_sizes": None if flat else s.before.sizes(),
        "outer_dense": None if flat else s.before.dense(),
        "inner_sizes": None if flat else s.behind.sizes(),
        "inner_dense": None if flat else s.behind.dense(),
        "step_sizes": None if flat else s.loop.sizes(),
        "step_dense": None if flat else s.loop.dense(),
    }
    constexprs = {
        "FLAT": flat,
        "OFFSET": tl.int64 if offsets_wide else tl.int32,
        "COMPUTE": TL[desc.element.compute],
        "CHUNK": sort.CHUNK,
    }
    return args, constexprs


def _table_arguments(s: sort.Sorted, flat: bool) -> dict[str, Arg]:
    table = s.g.table
    return {
        "table": values(table),
        "outer_table": None if flat else s.before.table(),
        "inner_table": None if flat else s.behind.table(),
        "slot_sizes": None if flat else padded((Int(table.shape[a]) for a in s.slot_axes), Int(1)),
        "slot_strides": None if flat else padded(strides(table, s.slot_axes, True), Int(0, True)),
    }


def sum_launches(desc: Any, stored: bool = False) -> list[Launch]:
    """Sums of the sorted segments into the table."""
    s, b, at = sort.view(desc), sort.buffers(desc, stored), sort.sorted_in(desc)
    lanes, constexprs = _lane_arguments(desc, s)
    args: dict[str, Arg] = {
        **lanes,
        "keys": b.keys[at],
        "order": b.order[at],
        "partials": b.partials if s.count > sort.CHUNK else None,
        "steps": Int(s.count.bit_length()),
    }
    return [*_long_launches(desc, s, args, constexprs), _segment_launch(desc, s, b, args, constexprs)]


def scanned_launch(desc: Any) -> Launch:
    """The one launch for up to SCANNED contributions; it keeps their positions at the start of the workspace."""
    s = sort.view(desc)
    args, constexprs = _lane_arguments(desc, s)
    keys = sort.key_arguments(desc, s)
    del keys["lane_strides"]  # None: one index serves a slice
    t = tile(desc, s.outer, s.inner)
    unroll = t.unroll if constexprs["FLAT"] else 1  # ptxas spills an address of strided operands otherwise
    return Launch(
        scanned.scanned_kernel,
        scanned_grid(desc),
        {
            **args,
            **keys,
            **_table_arguments(s, constexprs["FLAT"]),
            "order": Scratch(0, ElementKind.I32),
        },
        {**constexprs, **policy(desc, s.g), "KEEP": keeps(desc), **t.constexprs, "UNROLL": unroll, "BLOCK": SCANNED},
        num_warps=4,
    )


def scanned_grid(desc: Any) -> int:
    """Programs of ``scanned_launch``."""
    s = sort.view(desc)
    t = tile(desc, s.outer, s.inner)
    return s.count * -(-s.outer // t.rows) * -(-s.inner // t.cols)


def _long_launches(desc: Any, s: sort.Sorted, args: dict[str, Arg], constexprs: dict[str, Any]) -> Iterator[Launch]:
    """Sums of all chunks but a segment's first, where a segment can have several, and of groups of them."""
    windows = -(-s.count // sort.CHUNK)
    if s.count <= sort.CHUNK:
        return
    t = tile(desc, s.outer, s.inner)
    programs = windows * -(-s.outer // t.rows) * -(-s.inner // t.cols)
    # Two contributions in flight: else ptxas spills an address in some configurations. There are many programs.
    constexprs = {**constexprs, **t.constexprs, "UNROLL": 2}
    yield Launch(segments.chunks_kernel, programs, args, constexprs, num_warps=_filled(desc, t))
    if s.count <= sort.CHUNK * sort.CHUNK:
        return
    cols = min(_ceil_power(s.lanes), GROUP_COLS)  # wide: nearly all programs find nothing to do
    yield Launch(
        segments.groups_kernel,
        -(-windows // sort.CHUNK) * -(-s.lanes // cols),
        {
            **{name: args[name] for name in ("keys", "partials", "count", "slots", "steps")},
            "lanes": Int(s.lanes, s.lanes >= I32_LIMIT, power_of_two_in(s.lanes)),
        },
        {"CHUNK": sort.CHUNK, "COLS": cols, "UNROLL": 8},
        num_warps=max(cols // 128, 1),
    )


def _segment_launch(
    desc: Any, s: sort.Sorted, b: sort.Buffers, args: dict[str, Arg], constexprs: dict[str, Any]
) -> Launch:
    slots, t = sort.by_slot(desc, s), _segment_tile(desc, s)
    if slots and t.rows == 1 and constexprs["FLAT"]:
        wide_args = ("dense", "order", "partials", "alpha", "count", "slots", "outer", "inner")
        known = {name: constexprs[name] for name in ("OFFSET", "COMPUTE", "CHUNK")}
        return Launch(
            segments.wide_kernel,
            s.outer * -(-s.slots // LOOP) * -(-s.inner // t.cols),
            {**{name: args[name] for name in wide_args}, "table": values(s.g.table), "starts": b.starts},
            {**known, "KEEP": keeps(desc), "COLS": t.cols, "UNROLL": AT_A_TIME, "LOOP": LOOP},
            num_warps=t.warps,
        )
    items = s.slots if slots else s.count
    return Launch(
        segments.segments_kernel,
        s.outer * -(-items // t.rows) * -(-s.inner // t.cols),
        {
            **args,
            **_table_arguments(s, constexprs["FLAT"]),
            "starts": b.starts if slots else None,
            "items": Int(items),
        },
        {**constexprs, "KEEP": keeps(desc), **t.constexprs},
        num_warps=t.warps,
    )


def _segment_tile(desc: Any, s: sort.Sorted) -> Tile:
    items = s.slots if sort.by_slot(desc, s) else min(s.count, 16)  # a program looks at CHUNK keys behind each position
    return tile(desc, items, s.inner)


def largest_grid(desc: Any) -> int:
    """Programs of the largest launch."""
    s = sort.view(desc)
    own, late = _segment_tile(desc, s), tile(desc, s.outer, s.inner)
    items = s.slots if sort.by_slot(desc, s) else s.count
    chunks = -(-s.outer // late.rows) * -(-s.inner // late.cols)
    windows = -(-s.count // sort.CHUNK)
    return max(
        s.outer * -(-items // own.rows) * -(-s.inner // own.cols),
        windows * max(chunks, -(-s.lanes // GROUP_COLS)),
    )


def _ceil_power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
