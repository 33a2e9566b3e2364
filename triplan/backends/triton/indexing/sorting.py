"""Launches that sort the contributions of a descriptor by table slot, and the scratch of sums over the sorted segments.

Contributions, keys and slots are those of ``Sorted``; ``sorting_kernels`` says how the sort works.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from triplan.backends.runtime.launch import Arg, Int, Launch, Ptr, Scratch
from triplan.backends.triton.common.offsets import padded_bytes
from triplan.backends.triton.indexing import sorting_kernels as kernels, turned
from triplan.backends.triton.indexing.arguments import Walk, axis_arguments, padding, policy, status
from triplan.backends.triton.indexing.geometry import Geometry, geometry
from triplan.descriptors import packed_strides
from triplan.descriptors.indexing import IndexingDescriptor
from triplan.sku import ElementKind
from triplan.sku.facts import fact

#: Contributions in a chunk, and chunks in a group. Part of the meaning of the numerics id ``sorted-sum``: a change is a
#: new version.
CHUNK = 32
#: The most contributions that are ranked by comparing all pairs, in one launch: by the costs of ``sorted_sum`` that
#: takes about as long (15 us) as two passes of the radix sort.
RANKED = 4096
#: Contributions that a program of ``rank_kernel`` ranks. Untuned.
RANK_OWN = 16
#: Contributions that it compares with them at a time. Untuned.
RANK_BLOCK = 512
#: Most bits of a digit of the radix sort: few passes, and a block's histogram is still cheap.
DIGIT_BITS = 9
#: Fewest bits of a digit: with fewer no pass is cheaper.
MIN_DIGIT_BITS = 8
#: Keys that a program sorts at a time.
SORT_BLOCK = 512
#: The most tiles (programs) of the radix sort.
MAX_TILES = 2048
#: Tiles that a program of ``scan_kernel`` scans at a time. Untuned.
SCAN_TILES = 256
#: Digits per program of ``scan_kernel``. Untuned.
SCAN_DIGITS = 8
#: Warps per program of ``scan_kernel``. Untuned.
SCAN_WARPS = 8
#: Slots per program of ``starts_kernel``. Untuned.
STARTS_BLOCK = 256
#: With more slots per contribution than this, programs are launched for contributions instead of slots. Of rows:
#: untuned. Of single elements: by the costs of ``sorted_sum`` a contribution then takes as long as so many slots.
SPARSE, SPARSE_ELEMENTS = 4, 8


@dataclass(frozen=True, slots=True)
class Sorted:
    """What is sorted.

    Where one index serves a slice, a contribution is a slice of ``outer`` times ``inner`` lanes, and its key the
    position under its indices. Where every element has an index, a contribution is one element (one lane), and its key
    the number of its table element, row-major.

    Attributes:
        g: the geometry.
        count: contributions.
        slots: the number of different keys; the key of a dropped contribution is ``slots``.
        outer, inner: lanes before and behind the dimensions along which contributions are numbered.
        span: elements from one contribution to the next, where they are packed.
        steps: those dimensions.
        before, behind: the dimensions of ``outer`` and of ``inner``.
        slot_axes: the table's axes that a key numbers.
    """

    g: Geometry
    count: int
    slots: int
    outer: int
    inner: int
    span: int
    steps: Walk
    before: Walk
    behind: Walk
    slot_axes: tuple[int, ...]

    @property
    def lanes(self) -> int:
        """Elements of a contribution."""
        return self.outer * self.inner

    @property
    def by_slot(self) -> bool:
        """Whether programs are launched for slots; else for contributions, and a table that keeps nothing is filled
        with zeros before."""
        return self.slots <= (SPARSE if self.inner > 1 else SPARSE_ELEMENTS) * self.count

    @property
    def radix(self) -> bool:
        """Whether the radix sort is used; else all pairs are compared."""
        return self.count > RANKED

    @property
    def passes(self) -> int:
        """Passes of the radix sort over keys 0 to ``slots``."""
        return max(1, -(-self.slots.bit_length() // DIGIT_BITS))

    @property
    def digit_bits(self) -> int:
        """Bits of a digit in each pass."""
        return max(-(-self.slots.bit_length() // self.passes), MIN_DIGIT_BITS)

    @property
    def result(self) -> int:
        """Which of the two buffers of keys and positions holds them sorted."""
        return self.passes % 2 if self.radix else 0

    @property
    def tiling(self) -> tuple[int, int]:
        """(tiles, blocks of SORT_BLOCK keys in each) of the radix sort."""
        blocks = -(-self.count // SORT_BLOCK)
        each = -(-blocks // MAX_TILES)
        return -(-blocks // each), each


@fact
def sorted_view(desc: IndexingDescriptor) -> Sorted:
    """How the contributions of ``desc`` are sorted."""
    return _view(geometry(desc).sliced)


@fact
def summed_view(desc: IndexingDescriptor) -> Sorted:
    """How they are summed: on a packed copy, where ``turned`` makes one."""
    s = sorted_view(desc)
    return replace(_view(turned.on_copy(s.g)), span=turned.span(s.g)) if turned.copied(s.g) else s


def _view(g: Geometry) -> Sorted:
    outer, count, inner = g.fold
    dims = range(len(g.sizes))
    if g.full:
        axes = tuple(range(len(g.table.shape)))
        return Sorted(g, g.numel, g.table.numel, 1, 1, 1, Walk(g, dims), Walk(g, []), Walk(g, []), axes)
    before, behind = Walk(g, dims[: g.loop[0]]), Walk(g, dims[g.loop[-1] + 1 :])
    return Sorted(g, count, g.slots, outer, inner, inner, Walk(g, g.loop), before, behind, g.indexed)


@dataclass(frozen=True, slots=True)
class Buffers:
    """Where the scratch of one plan lies.

    Attributes:
        keys, order: keys and positions, of which the sort uses two buffers each (one, where all pairs are compared).
        counts, totals: occurrences of each digit, by tile and in total.
        starts: the first sorted position of each slot, and the end.
        partials: sums of chunks.
        copy: a packed copy of the contributions; empty, where they are read as they lie.
        status: the lowest bad position that a stored sort found.
        nbytes: bytes of the workspace.
        stored_nbytes: bytes of prepared indices.
    """

    keys: tuple[Scratch, Scratch]
    order: tuple[Scratch, Scratch]
    counts: Scratch
    totals: Scratch
    starts: Scratch
    partials: Scratch
    copy: Scratch
    status: Scratch | None
    nbytes: int
    stored_nbytes: int


@fact
def buffers(desc: IndexingDescriptor, stored: bool = False) -> Buffers:
    """The scratch of a sorted sum of ``desc``.

    ``stored``: the sort's results lie in storage of their own (prepared indices), together with ``status``.
    """
    s = sorted_view(desc)
    sizes = {False: 0, True: 0}

    def take(numel: int, element: ElementKind = ElementKind.I32, kept: bool = False) -> Scratch:
        kept = kept and stored
        found = Scratch(sizes[kept], element, kept)
        sizes[kept] += padded_bytes(numel * element.itemsize)
        return found

    keys, order = take(s.count, kept=True), take(s.count, kept=True)
    tiles, digits = (s.tiling[0], 1 << s.digit_bits) if s.radix else (0, 0)
    pairs = [(keys, order), (take(s.count), take(s.count)) if s.radix else (keys, order)]
    if s.result == 1:
        pairs.reverse()
    counts, totals = take(tiles * digits), take(digits)
    starts = take(s.slots + 1 if s.by_slot else 0, kept=True)
    partials = take(-(-s.count // CHUNK) * s.lanes if s.count > CHUNK else 0, desc.element.compute)
    copy = take(s.outer * s.count * summed_view(desc).span if turned.copied(s.g) else 0, desc.element)
    bad = take(1, ElementKind.I64, kept=True) if stored and desc.out_of_bounds == "error" else None
    (keys, order), (other_keys, other_order) = pairs
    return Buffers(
        (keys, other_keys), (order, other_order), counts, totals, starts, partials, copy, bad, *sizes.values()
    )


def sort_launches(desc: IndexingDescriptor, stored: bool = False) -> list[Launch]:
    """Sort keys and positions; find the start of every slot, if programs are launched for slots."""
    s, b = sorted_view(desc), buffers(desc, stored)
    launches = _radix_launches(desc, s, b) if s.radix else [_rank_launch(desc, s, b)]
    return [*launches, _starts_launch(s, b)] if s.by_slot else launches


def key_arguments(desc: IndexingDescriptor, s: Sorted, bad: Ptr | Scratch | None) -> dict[str, Arg]:
    """What ``slot_keys`` reads; ``bad``: where the lowest bad position is recorded."""
    g = s.g
    axes = axis_arguments(g)
    strides = dict(zip(s.slot_axes, packed_strides([g.table.shape[a] for a in s.slot_axes]), strict=True))
    return {
        "indices": axes["indices"],
        "extents": axes["extents"],
        "status": bad,
        "padding": padding(g),
        "count": Int(s.count),
        "slots": Int(s.slots),
        "sizes": s.steps.sizes(),
        "index_strides": s.steps.index(),
        "lane_strides": s.steps.packed_table() if g.full else None,
        "position_strides": s.steps.position(),
        "key_strides": tuple(Int(strides[a]) for a in g.indexed)[::-1],
    }


def _rank_launch(desc: IndexingDescriptor, s: Sorted, b: Buffers) -> Launch:
    return Launch(
        kernels.rank_kernel,
        -(-s.count // RANK_OWN),
        {**key_arguments(desc, s, b.status or status(desc)), "keys": b.keys[0], "order": b.order[0]},
        {**policy(desc, s.g), "OWN": RANK_OWN, "BLOCK": RANK_BLOCK},
        num_warps=4,
        max_registers=128,  # left alone, ptxas takes 96 on sm80 and spills two
    )


def _radix_launches(desc: IndexingDescriptor, s: Sorted, b: Buffers) -> list[Launch]:
    """Three launches for each digit, the lowest first; each pass moves from one buffer to the other."""
    tiles, blocks = s.tiling
    digits = 1 << s.digit_bits
    count, each = Int(s.count), Int(blocks)
    radix = {"RADIX": digits, "BLOCK": SORT_BLOCK}
    out: list[Launch] = []
    for turn in range(s.passes):
        source, to, shift = turn % 2, 1 - turn % 2, Int(turn * s.digit_bits)
        if turn == 0:
            keys = key_arguments(desc, s, b.status or status(desc))
            args = {**keys, "keys": b.keys[0], "counts": b.counts, "blocks": each}
            out.append(Launch(kernels.keys_kernel, tiles, args, {**policy(desc, s.g), **radix}))
        else:
            args = {"keys": b.keys[source], "counts": b.counts, "count": count, "blocks": each, "shift": shift}
            out.append(Launch(kernels.digits_kernel, tiles, args, radix))
        out.append(
            Launch(
                kernels.scan_kernel,
                digits // SCAN_DIGITS,
                {"counts": b.counts, "totals": b.totals, "tiles": Int(tiles)},
                {"RADIX": digits, "TILES": SCAN_TILES, "DIGITS": SCAN_DIGITS},
                num_warps=SCAN_WARPS,
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
        out.append(Launch(kernels.scatter_kernel, tiles, args, radix))
    return out


def _starts_launch(s: Sorted, b: Buffers) -> Launch:
    numel = s.slots + 1
    return Launch(
        kernels.starts_kernel,
        -(-numel // STARTS_BLOCK),
        {
            "keys": b.keys[s.result],
            "starts": b.starts,
            "count": Int(s.count),
            "numel": Int(numel),
            "steps": Int(s.count.bit_length()),
        },
        {"BLOCK": STARTS_BLOCK},
        num_warps=4,
    )
