"""From an indexing geometry to the launches of a sum over sorted segments, and to the scratch that they share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import triton.language as tl

from triplan.backends.launch import Arg, Int, Launch, Scratch, power_of_two_in
from triplan.backends.triton import segment_kernels as segments
from triplan.backends.triton import sorting_kernels as sorting
from triplan.backends.triton.geometry import Geometry, geometry, keeps
from triplan.backends.triton.indexing_launch import (
    I32_LIMIT,
    TL,
    Walk,
    axis_arguments,
    common,
    padded,
    policy,
    strides,
    values,
    wide,
)
from triplan.descriptors import packed_strides
from triplan.sku import ElementKind

#: Contributions in a chunk and chunks in a group: part of what ``sorted-sum`` means, so it can't change without it.
CHUNK = 32
#: Up to this many contributions are ranked by comparing all pairs, in one launch.
RANKED = 8192
#: Up to this many, every program of one launch looks at all of them.
SCANNED = 512
#: Bits of a digit of the radix sort: as wide as a block's histogram stays cheap, as few passes and launches as can be.
DIGIT_BITS = 9
#: Keys sorted at a time, the most tiles of them, and the tiles that a program scans at a time.
SORT_BLOCK, MAX_TILES, SCAN_TILES = 512, 2048, 256
#: Columns of a program that sums groups of chunks.
GROUP_COLS = 1024
#: Slots that a program of wide rows sums in turns.
LOOP = 4
#: With more slots than this many a contribution, programs go to contributions instead of slots.
SPARSE = 4


@dataclass(frozen=True, slots=True)
class Buffers:
    """Where the scratch of one plan lies, in bytes: keys and positions twice, counts, segment starts, partial sums."""

    keys: tuple[Scratch, Scratch]
    order: tuple[Scratch, Scratch]
    counts: Scratch
    totals: Scratch
    starts: Scratch
    partials: Scratch
    status: Scratch | None
    nbytes: int
    stored_nbytes: int


@dataclass(frozen=True, slots=True)
class Sorted:
    """What is sorted, and what each sorted thing moves.

    Where one index serves a slice, contributions are slices, each of ``outer`` times ``inner`` lanes, and keys are
    positions under the indices. Where the index differs between elements, contributions are elements, and keys are
    elements of the table, numbered row-major.
    """

    g: Geometry
    count: int
    slots: int
    outer: int
    inner: int
    loop: Walk
    before: Walk
    behind: Walk
    slot_axes: tuple[int, ...]

    @property
    def lanes(self) -> int:
        return self.outer * self.inner


@lru_cache(maxsize=1024)
def view(desc: Any) -> Sorted:
    """How ``desc`` is sorted."""
    g = geometry(desc).sliced
    outer, count, inner = g.fold
    dims = range(len(g.sizes))
    if g.full:
        axes = tuple(range(len(g.table.shape)))
        return Sorted(g, g.numel, g.table.numel, 1, 1, Walk(g, dims), Walk(g, []), Walk(g, []), axes)
    before, behind = Walk(g, dims[: g.loop[0]]), Walk(g, dims[g.loop[-1] + 1 :])
    return Sorted(g, count, g.slots, outer, inner, Walk(g, g.loop), before, behind, g.indexed)


def passes(g: Sorted) -> tuple[int, int]:
    """(passes, bits of a digit) of the radix sort of keys 0 to ``g.slots``. At least 8 bits: fewer save nothing."""
    bits = g.slots.bit_length()
    number = max(1, -(-bits // DIGIT_BITS))
    return number, max(-(-bits // number), 8)


def tiling(count: int) -> tuple[int, int]:
    """(tiles, blocks of SORT_BLOCK keys in each)."""
    blocks = -(-count // SORT_BLOCK)
    each = -(-blocks // MAX_TILES)
    return -(-blocks // each), each


def by_slot(desc: Any, g: Sorted) -> bool:
    """Whether programs go to slots: all must be written, or there are few enough."""
    return not keeps(desc) or g.slots <= SPARSE * g.count


@lru_cache(maxsize=1024)
def buffers(desc: Any, stored: bool = False) -> Buffers:
    """The scratch of a sorted sum for ``desc``, exact to the byte (each part rounded up to 16).

    ``stored``: what a run needs of the sort lies in storage of its own instead, and so does ``status``.
    """
    s = view(desc)
    radix = s.count > RANKED
    sizes = {False: 0, True: 0}

    def take(numel: int, element: ElementKind = ElementKind.I32, kept: bool = False) -> Scratch:
        kept = kept and stored
        found = Scratch(sizes[kept], element, kept)
        sizes[kept] += -(-numel * element.itemsize // 16) * 16
        return found

    keys, order = take(s.count, kept=True), take(s.count, kept=True)
    tiles, digits = tiling(s.count)[0], 1 << passes(s)[1]
    pairs = [(keys, order), (take(s.count), take(s.count)) if radix else (keys, order)]
    if _sorted_in(desc) == 1:
        pairs.reverse()
    counts, totals = take(tiles * digits if radix else 0), take(digits if radix else 0)
    starts = take(s.slots + 1 if by_slot(desc, s) else 0, kept=True)
    partials = take(-(-s.count // CHUNK) * s.lanes if s.count > CHUNK else 0, desc.element.compute)
    status = take(1, ElementKind.I64, kept=True) if stored and desc.out_of_bounds == "error" else None
    (keys, order), (other_keys, other_order) = pairs
    return Buffers(
        (keys, other_keys), (order, other_order), counts, totals, starts, partials, status, sizes[False], sizes[True]
    )


def _sorted_in(desc: Any) -> int:
    """Which of the two buffers holds the sorted keys and positions."""
    g = view(desc)
    return passes(g)[0] % 2 if g.count > RANKED else 0


def sort_launches(desc: Any, stored: bool = False) -> list[Launch]:
    """Keys from indices, sorted with their positions, and where every slot's segment starts if programs go to slots."""
    g, b = view(desc), buffers(desc, stored)
    count = g.count
    first = b.keys[_sorted_in(desc)]
    launches = _radix_launches(desc, g, b) if count > RANKED else [_rank_launch(desc, g, b)]
    if by_slot(desc, g):
        block = 256
        known: dict[str, Arg] = {"count": Int(count), "numel": Int(g.slots + 1), "steps": Int(count.bit_length())}
        launches.append(
            Launch(
                sorting.starts_kernel,
                -(-(g.slots + 1) // block),
                {"keys": first, "starts": b.starts, **known},
                {"BLOCK": block},
                num_warps=4,
            )
        )
    return launches


def _key_arguments(desc: Any, s: Sorted, status: Scratch | None = None) -> dict[str, Arg]:
    g = s.g
    axes, shared = axis_arguments(g), common(desc, g)
    shape = [g.table.shape[a] for a in s.slot_axes]
    strides = dict(zip(s.slot_axes, packed_strides(shape), strict=True))
    return {
        "indices": axes["indices"],
        "extents": axes["extents"],
        "status": shared["status"] if status is None else status,
        "padding": shared["padding"],
        "count": Int(s.count),
        "slots": Int(s.slots),
        "sizes": s.loop.sizes(),
        "index_strides": s.loop.index(),
        "lane_strides": s.loop.packed_table() if g.full else None,
        "position_strides": s.loop.position(),
        "key_strides": tuple(Int(strides[a]) for a in g.indexed)[::-1],
    }


def _rank_launch(desc: Any, g: Sorted, b: Buffers) -> Launch:
    own = 16
    return Launch(
        sorting.rank_kernel,
        -(-g.count // own),
        {**_key_arguments(desc, g, b.status), "keys": b.keys[0], "order": b.order[0]},
        {**policy(desc, g.g), "OWN": own, "BLOCK": 512},
        num_warps=4,
    )


def _radix_launches(desc: Any, g: Sorted, b: Buffers) -> list[Launch]:
    tiles, blocks = tiling(g.count)
    number, bits = passes(g)
    count, each = Int(g.count), Int(blocks)
    radix = {"RADIX": 1 << bits, "BLOCK": SORT_BLOCK}
    out: list[Launch] = []
    for turn in range(number):
        source, to, shift = turn % 2, 1 - turn % 2, Int(turn * bits)
        if turn == 0:
            args = {**_key_arguments(desc, g, b.status), "keys": b.keys[0], "counts": b.counts, "blocks": each}
            out.append(Launch(sorting.keys_kernel, tiles, args, {**policy(desc, g.g), **radix}))
        else:
            args = {"keys": b.keys[source], "counts": b.counts, "count": count, "blocks": each, "shift": shift}
            out.append(Launch(sorting.digits_kernel, tiles, args, radix))
        out.append(
            Launch(
                sorting.scan_kernel,
                (1 << bits) // 8,
                {"counts": b.counts, "totals": b.totals, "tiles": Int(tiles)},
                {"RADIX": 1 << bits, "TILES": SCAN_TILES, "DIGITS": 8},
                num_warps=8,
            )
        )
        args = {
            "keys": b.keys[source],
            "order": b.order[source] if turn else None,
            "counts": b.counts,
            "totals": b.totals,
            "sorted_keys": b.keys[to],
            "sorted_order": b.order[to],
            "count": count,
            "blocks": each,
            "shift": shift,
        }
        out.append(Launch(sorting.scatter_kernel, tiles, args, radix))
    return out


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


def _lane_arguments(desc: Any, s: Sorted) -> tuple[dict[str, Arg], dict[str, Any]]:
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
        "CHUNK": CHUNK,
    }
    return args, constexprs


def _table_arguments(s: Sorted, flat: bool) -> dict[str, Arg]:
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
    s, b, at = view(desc), buffers(desc, stored), _sorted_in(desc)
    lanes, constexprs = _lane_arguments(desc, s)
    args: dict[str, Arg] = {
        **lanes,
        "keys": b.keys[at],
        "order": b.order[at],
        "partials": b.partials if s.count > CHUNK else None,
        "steps": Int(s.count.bit_length()),
    }
    return [*_long_launches(desc, s, args, constexprs), _segment_launch(desc, s, b, args, constexprs)]


def scanned_launch(desc: Any) -> Launch:
    """The one launch for up to SCANNED contributions; it keeps their positions at the start of the workspace."""
    s = view(desc)
    args, constexprs = _lane_arguments(desc, s)
    keys = _key_arguments(desc, s)
    del keys["lane_strides"]  # None: one index serves a slice
    t = tile(desc, s.outer, s.inner)
    unroll = t.unroll if constexprs["FLAT"] else 1  # ptxas spills an address of strided operands otherwise
    return Launch(
        segments.scanned_kernel,
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
    s = view(desc)
    t = tile(desc, s.outer, s.inner)
    return s.count * -(-s.outer // t.rows) * -(-s.inner // t.cols)


def _long_launches(desc: Any, s: Sorted, args: dict[str, Arg], constexprs: dict[str, Any]) -> Iterator[Launch]:
    """Sums of all chunks but a segment's first, where a segment can have several, and of groups of them."""
    windows = -(-s.count // CHUNK)
    if s.count <= CHUNK:
        return
    t = tile(desc, s.outer, s.inner)
    programs = windows * -(-s.outer // t.rows) * -(-s.inner // t.cols)
    # Two contributions in flight: else ptxas spills an address in some configurations. There are many programs.
    constexprs = {**constexprs, **t.constexprs, "UNROLL": 2}
    yield Launch(segments.chunks_kernel, programs, args, constexprs, num_warps=_filled(desc, t))
    if s.count <= CHUNK * CHUNK:
        return
    cols = min(_ceil_power(s.lanes), GROUP_COLS)  # wide: nearly all programs find nothing to do
    yield Launch(
        segments.groups_kernel,
        -(-windows // CHUNK) * -(-s.lanes // cols),
        {
            **{name: args[name] for name in ("keys", "partials", "count", "slots", "steps")},
            "lanes": Int(s.lanes, s.lanes >= I32_LIMIT, power_of_two_in(s.lanes)),
        },
        {"CHUNK": CHUNK, "COLS": cols, "UNROLL": 8},
        num_warps=max(cols // 128, 1),
    )


def _segment_launch(desc: Any, s: Sorted, b: Buffers, args: dict[str, Arg], constexprs: dict[str, Any]) -> Launch:
    slots, t = by_slot(desc, s), _segment_tile(desc, s)
    if slots and t.rows == 1 and constexprs["FLAT"]:
        wide_args = ("dense", "order", "partials", "alpha", "count", "slots", "outer", "inner")
        known = {name: constexprs[name] for name in ("OFFSET", "COMPUTE", "CHUNK")}
        return Launch(
            segments.wide_kernel,
            s.outer * -(-s.slots // LOOP) * -(-s.inner // t.cols),
            {**{name: args[name] for name in wide_args}, "table": values(s.g.table), "starts": b.starts},
            {**known, "KEEP": keeps(desc), "COLS": t.cols, "UNROLL": t.unroll, "LOOP": LOOP},
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


def _segment_tile(desc: Any, s: Sorted) -> Tile:
    items = s.slots if by_slot(desc, s) else min(s.count, 16)  # a program looks at CHUNK keys behind each position
    return tile(desc, items, s.inner)


def largest_grid(desc: Any) -> int:
    """Programs of the largest launch."""
    s = view(desc)
    own, late = _segment_tile(desc, s), tile(desc, s.outer, s.inner)
    items = s.slots if by_slot(desc, s) else s.count
    chunks = -(-s.outer // late.rows) * -(-s.inner // late.cols)
    windows = -(-s.count // CHUNK)
    return max(
        s.outer * -(-items // own.rows) * -(-s.inner // own.cols),
        windows * max(chunks, -(-s.lanes // GROUP_COLS)),
    )


def _ceil_power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
