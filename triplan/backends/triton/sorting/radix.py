"""Kernel ``radix`` of sort and argsort: a stable radix sort of rows of any length, three launches a digit."""

from __future__ import annotations

from typing import Any

from triplan.backends.runtime.launch import Arg, Int, Launch, Ptr, Scratch, power_of_two_in
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.offsets import ceil_power, padded_bytes
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.sorting import radix_kernels as kernels, shared_kernels, turned
from triplan.backends.triton.sorting.shared import (
    MOST,
    SORTS,
    Sorted,
    bits,
    integers,
    key_constants,
    row_strides,
    sorting_kernel,
)
from triplan.sku import ElementKind, Support, Target

DIGITS: int = shared_kernels.DIGITS.value
#: Elements of a tile: more make longer runs of equal digits, which are written together, and more comparisons. Untuned.
TILE = 2048
#: Elements of a thread that sorts: comparisons between them are the cheapest, and the most. Untuned.
THREAD = 16
#: Elements of a thread that moves them. Untuned.
THREAD_MOVES = 8
#: Registers of a thread that moves them, at most. Left alone, ptxas takes 64 in some binaries for sm80, and spills two.
MOVING_REGISTERS = 80
#: How often x is read: to be sorted by the first digit, and to be moved.
READS = 2
#: Counts that a program scans at a time. Untuned.
SCANNED = 4096
#: Elements that a multiprocessor sorts within tiles in a microsecond: each takes about 180 instructions of integers, of
#: which it could do 64 in a cycle, but exchanges wait. Fitted to ``bench anywhere sorting``, seeds 1, 2, 3 and 51, on
#: an H200, by a script that is not published.
SM_SORTED_PER_US = 170


def passes_of(desc: Sorted) -> int:
    return desc.element.itemsize


def tile_of(desc: Sorted) -> int:
    """Elements of a tile."""
    return min(max(ceil_power(desc.n), 32), TILE)


def tiles_of(desc: Sorted) -> int:
    """Tiles of a row."""
    return -(-desc.n // tile_of(desc))


def supports(desc: Sorted, target: Target) -> Support:
    if desc.n > MOST:
        return Support.no(f"rows of {desc.n} elements; positions are i32, up to {MOST}")
    return fits_grid(desc.rows * max(tiles_of(desc), DIGITS))


def rank(desc: Sorted, target: Target) -> float:
    """Each pass reads the elements twice, and moves them with their positions; a tile is sorted by one
    multiprocessor."""
    tiles = desc.rows * tiles_of(desc)
    numel = tiles * tile_of(desc)
    moved = numel * (3 * desc.element.itemsize + 12) / BYTES_PER_US
    sorts = max(tiles / target.sm_count, 1.0) * tile_of(desc) / SM_SORTED_PER_US
    return passes_of(desc) * (3 * LAUNCH_US + moved + sorts) + turned.across_us(desc, READS)


def parts_of(desc: Sorted) -> tuple[list[int], int, int, int]:
    """(where two buffers of elements and positions begin, the lanes, the counts, the workspace ends), in bytes."""
    numel, passes = desc.rows * desc.n, passes_of(desc)
    begins, end = [], 0
    for size in (desc.element.itemsize, 4) * min(passes - 1, 2):
        begins.append(end)
        end += padded_bytes(numel * size)
    counts = end + padded_bytes(2 * desc.rows * tiles_of(desc) * tile_of(desc))
    return begins, end, counts, counts + padded_bytes(4 * desc.rows * DIGITS * (tiles_of(desc) + 1))


def workspace(desc: Sorted, target: Target) -> int:
    return parts_of(desc)[3] + turned.nbytes(desc, READS) if desc.rows * desc.n else 0


def _radix(desc: Sorted, target: Target) -> list[Launch]:
    return turned.launches(desc, _launches, parts_of(desc)[3], READS) if desc.rows * desc.n else []


def _launches(desc: Sorted) -> list[Launch]:
    given = {o.name: o for o in desc.operands()}
    element = integers(desc.element)
    begins, lanes_at, counts_at, _ = parts_of(desc)
    counts, lanes = Scratch(counts_at, ElementKind.I32), Scratch(lanes_at, ElementKind.I16)
    n, tiles = Int(desc.n, divisibility=power_of_two_in(desc.n)), Int(tiles_of(desc))
    within = (Int(desc.n, True, n.divisibility), None)
    values = given.get("values")
    source: tuple[Ptr | Scratch, Arg] = bits(given["x"]), row_strides(given["x"])
    order: tuple[Scratch | None, Arg] = None, None
    constants, tile = {**key_constants(desc), "DESCENDING": desc.descending}, tile_of(desc)
    thread = min(tile // 32, THREAD)
    network = {"LOG": tile.bit_length() - 1, "THREAD": thread.bit_length() - 1}
    lines, passes = desc.rows * DIGITS, passes_of(desc)
    scanned = min(ceil_power(tiles_of(desc)), SCANNED)
    group = min(SCANNED // scanned, DIGITS)
    found = []
    for turn in range(passes):
        keys: dict[str, Any] = {"x": source[0], "x_strides": source[1], "lanes": lanes}
        keys |= {"counts": counts, "n": n, "tiles": tiles}
        keys["shift"] = Int(8 * turn)
        if turn == passes - 1:
            moved: tuple[Any, Arg] = (None, None) if values is None else (bits(values), row_strides(values))
            placed: tuple[Any, Arg] = bits(given["indices"]), row_strides(given["indices"])
        else:
            at = begins[turn % 2 * 2 :]
            moved, placed = (Scratch(at[0], element), within), (Scratch(at[1], ElementKind.I32), within)
        to = {"order": order[0], "values": moved[0], "indices": placed[0]}
        to |= {"order_strides": order[1], "values_strides": moved[1], "indices_strides": placed[1]}
        each = desc.rows * tiles_of(desc)
        found += [
            Launch(kernels.tiles_kernel, each, keys, {**constants, **network}, num_warps=tile // (32 * thread)),
            Launch(
                kernels.scan_kernel,
                lines // group,
                {"counts": counts, "tiles": tiles},
                {"GROUP": group, "BLOCK": scanned},
                num_warps=8,
            ),
            Launch(
                kernels.scatter_kernel,
                each,
                {**keys, **to},
                {**constants, "BLOCK": tile},
                num_warps=max(tile // (32 * THREAD_MOVES), 1),
                max_registers=MOVING_REGISTERS,
            ),
        ]
        if turn < passes - 1:
            source, order = moved, placed
    return found


for _op in SORTS:
    sorting_kernel(op=_op, name="radix", supports=supports, rank=rank, workspace=workspace)(_radix)
