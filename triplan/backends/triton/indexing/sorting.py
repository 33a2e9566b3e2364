"""From an indexing geometry to the launches that sort its indices, and to the scratch of sorted sums."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch
from triplan.backends.triton.indexing import sorting_kernels as sorting
from triplan.backends.triton.indexing.geometry import Geometry, geometry, keeps
from triplan.backends.triton.indexing.launches import Walk, axis_arguments, common, policy
from triplan.descriptors import packed_strides
from triplan.sku import ElementKind

#: Contributions in a chunk and chunks in a group: part of what ``sorted-sum`` means, so it can't change without it.
CHUNK = 32
#: Up to this many contributions are ranked by comparing all pairs, in one launch.
RANKED = 4096
#: Bits of a digit of the radix sort: as wide as a block's histogram stays cheap, as few passes and launches as can be.
DIGIT_BITS = 9
#: Keys sorted at a time, the most tiles of them, and the tiles that a program scans at a time.
SORT_BLOCK, MAX_TILES, SCAN_TILES = 512, 2048, 256
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
    if sorted_in(desc) == 1:
        pairs.reverse()
    counts, totals = take(tiles * digits if radix else 0), take(digits if radix else 0)
    starts = take(s.slots + 1 if by_slot(desc, s) else 0, kept=True)
    partials = take(-(-s.count // CHUNK) * s.lanes if s.count > CHUNK else 0, desc.element.compute)
    status = take(1, ElementKind.I64, kept=True) if stored and desc.out_of_bounds == "error" else None
    (keys, order), (other_keys, other_order) = pairs
    return Buffers(
        (keys, other_keys), (order, other_order), counts, totals, starts, partials, status, sizes[False], sizes[True]
    )


def sorted_in(desc: Any) -> int:
    """Which of the two buffers holds the sorted keys and positions."""
    g = view(desc)
    return passes(g)[0] % 2 if g.count > RANKED else 0


def sort_launches(desc: Any, stored: bool = False) -> list[Launch]:
    """Keys from indices, sorted with their positions, and where every slot's segment starts if programs go to slots."""
    g, b = view(desc), buffers(desc, stored)
    count = g.count
    first = b.keys[sorted_in(desc)]
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


def key_arguments(desc: Any, s: Sorted, status: Scratch | None = None) -> dict[str, Arg]:
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
        {**key_arguments(desc, g, b.status), "keys": b.keys[0], "order": b.order[0]},
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
            args = {**key_arguments(desc, g, b.status), "keys": b.keys[0], "counts": b.counts, "blocks": each}
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
