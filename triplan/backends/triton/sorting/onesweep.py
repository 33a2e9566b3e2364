"""Kernel ``onesweep`` of sorts, topk and kthvalue: a stable radix sort of rows of any length, one launch a digit."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Any

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch, power_of_two_in
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.fill import fill_launch
from triplan.backends.triton.common.offsets import padded_bytes
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.sorting import onesweep_kernels as kernels, shared_kernels, turned
from triplan.backends.triton.sorting.shared import (
    SELECTIONS,
    SORTS,
    Ordered,
    bits,
    descending,
    kept_args,
    kept_of,
    key_constants,
    row_strides,
    sorting_kernel,
)
from triplan.sku import ElementKind, Support, Target

DIGITS: int = shared_kernels.DIGITS.value
#: Warps of a program.
WARPS = 8
#: Elements of a thread, by their size in bytes. More elements in a tile make longer runs of equal digits, which are
#: stored together; 16 elements of 8 bytes would spill.
ITEMS = {1: 16, 2: 16, 4: 16, 8: 8}
#: Registers of a thread at most, by the size of an element in bytes: a multiprocessor runs two programs, or three.
REGISTERS = {1: 128, 2: 128, 4: 128, 8: 80}
#: Elements that a thread of the counting kernel loads at a time. Untuned.
COUNTED = 4
#: Blocks that a program of the counting kernel reads. Untuned.
STEPS = 32
#: Histograms that one program scans. Untuned.
GROUP = 4
#: How often x is read: for its counts, and to be moved by the first digit.
READS = 2
#: The longest rows: published counts have 30 bits, beside two that say what they count.
MOST = 2**30 - 1
# Fitted to ``bench anywhere sorting``, seeds 2, 3 and 51, and one more whose results are not kept, on an H200, by a
# script that is not published:
#: Elements that a multiprocessor orders within tiles in a microsecond, beside what moving them takes. Set by hand, so
#: that select agrees with the measured times.
SM_ORDERED_PER_US = 1900
#: Microseconds of a pass that a tile alone waits for (ticket, reads, barriers of its order); and for each element of a
#: thread: the next one waits for its warp's counters.
PASS_US, ITEM_US = 2.0, 0.176
#: Microseconds for each doubling of the tiles of a row, which begin together: one that looks back meets tiles that do
#: not know yet what is before them.
LOOK_BACK_US = 1.0


def passes_of(desc: Ordered) -> int:
    return desc.element.itemsize


def tile_of(desc: Ordered) -> int:
    """Elements of a tile."""
    return 32 * WARPS * ITEMS[desc.element.itemsize]


def tiles_of(desc: Ordered) -> int:
    """Tiles of a row."""
    return -(-desc.n // tile_of(desc))


def supports(desc: Ordered, target: Target) -> Support:
    if desc.n > MOST:
        return Support.no(f"rows of {desc.n} elements; counts have 30 bits, up to {MOST}")
    return fits_grid(desc.rows * max(tiles_of(desc), passes_of(desc)))  # (lines of counts have 32 bits, too)


def rank(desc: Ordered, target: Target) -> float:
    """A read that counts digits, and for each of them one that moves elements with their positions."""
    numel = desc.rows * tiles_of(desc) * tile_of(desc)
    read = numel * desc.element.itemsize / BYTES_PER_US
    moved = numel * 2 * (max(desc.element.itemsize, 4) + 4) / BYTES_PER_US
    alone = PASS_US + ITEMS[desc.element.itemsize] * ITEM_US + log2(max(tiles_of(desc), 1)) * LOOK_BACK_US
    ordered = max(numel / (target.sm_count * SM_ORDERED_PER_US), alone)
    return (
        (passes_of(desc) + 3) * LAUNCH_US + read + passes_of(desc) * (moved + ordered) + turned.across_us(desc, READS)
    )


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the parts of the workspace begin, in bytes.

    Attributes:
        ticket: for each pass, how many tiles have been taken.
        counts: histograms, [rows, passes, DIGITS].
        published: counts of tiles, [passes, rows, tiles, DIGITS].
        cleared: the end of what must be 0 at first, which begins at 0.
        buffers: of elements (or words) and positions, between passes.
        size: the end.
    """

    ticket: int
    counts: int
    published: int
    cleared: int
    buffers: tuple[tuple[int, int], ...]
    size: int


def parts_of(desc: Ordered) -> Parts:
    passes, numel = passes_of(desc), desc.rows * desc.n
    counts = padded_bytes(16 * passes)
    published = counts + padded_bytes(4 * desc.rows * passes * DIGITS)
    at = cleared = published + padded_bytes(4 * desc.rows * passes * tiles_of(desc) * DIGITS)
    buffers = []
    for _ in range(min(passes - 1, 2)):
        places = at + padded_bytes(8 * numel)
        buffers.append((at, places))
        at = places + (padded_bytes(4 * numel) if desc.element.itemsize == 8 else 0)
    return Parts(0, counts, published, cleared, tuple(buffers), at)


def workspace(desc: Ordered, target: Target) -> int:
    return parts_of(desc).size + turned.nbytes(desc, READS) if desc.rows * kept_of(desc)[1] else 0


def _onesweep(desc: Ordered, target: Target) -> list[Launch]:
    return turned.launches(desc, _launches, parts_of(desc).size, READS) if desc.rows * kept_of(desc)[1] else []


def _launches(desc: Ordered) -> list[Launch]:
    given = {o.name: o for o in desc.operands()}
    x, values = given["x"], given.get("values")
    parts, passes, tiles = parts_of(desc), passes_of(desc), tiles_of(desc)
    n, counts = Int(desc.n, divisibility=power_of_two_in(desc.n)), Scratch(parts.counts, ElementKind.I32)
    source: dict[str, Arg] = {"x": bits(x), "x_strides": row_strides(x), "n": n}
    constants: dict[str, Any] = {**key_constants(desc), "DESCENDING": descending(desc), "WARPS": WARPS}
    chunks = -(-desc.n // (32 * WARPS * COUNTED * STEPS))
    lines = desc.rows * passes
    found = [
        fill_launch(Scratch(0, ElementKind.I32), parts.cleared // 4, 0),
        Launch(
            kernels.count_kernel,
            desc.rows * chunks,
            {**source, "counts": counts, "chunks": Int(chunks), "steps": Int(STEPS)},
            {**constants, "ITEMS": COUNTED},
            num_warps=WARPS,
        ),
        Launch(
            kernels.starts_kernel,
            -(-lines // GROUP),
            {"counts": counts, "lines": Int(lines)},
            {"DIGITS": DIGITS, "GROUP": GROUP},
        ),
    ]
    for turn in range(passes):
        come: tuple[int, int] | None = parts.buffers[(turn - 1) % 2] if turn else None
        go = None if turn == passes - 1 else parts.buffers[turn % 2]
        wide = desc.element.itemsize == 8
        args: dict[str, Arg] = {
            **source,
            "source": None if come is None else Scratch(come[0], ElementKind.I64),
            "order": Scratch(come[1], ElementKind.I32) if come is not None and wide else None,
            "starts": counts,
            "published": Scratch(parts.published + 4 * turn * desc.rows * tiles * DIGITS, ElementKind.I32),
            "ticket": Scratch(parts.ticket + 16 * turn, ElementKind.I32),
            "tiles": Int(tiles),
            "shift": Int(8 * turn),
            "begin": None,
            "kept": None,
        }
        if go is None:
            args |= {"values": None if values is None else bits(values), "indices": bits(given["indices"])}
            args |= {"values_strides": None if values is None else row_strides(values)}
            args |= {"indices_strides": row_strides(given["indices"])}
            args["begin"], args["kept"] = kept_args(desc)
        else:
            args |= {"values": Scratch(go[0], ElementKind.I64)}
            args |= {"indices": Scratch(go[1], ElementKind.I32) if wide else None}
            args |= {"values_strides": None, "indices_strides": None}
        found.append(
            Launch(
                kernels.onesweep_kernel,
                desc.rows * tiles,
                args,
                {**constants, "LAST": go is None, "ITEMS": ITEMS[desc.element.itemsize]},
                num_warps=WARPS,
                max_registers=REGISTERS[desc.element.itemsize],
            )
        )
    return found


for _op in SORTS + SELECTIONS:
    sorting_kernel(
        op=_op,
        name="onesweep",
        supports=supports,
        rank=rank,
        workspace=workspace,
        features=("gluon",),
        interpretable=False,
    )(_onesweep)
