"""Kernel ``radix`` of sort and argsort: a stable radix sort of rows of any length, three launches a digit."""

from __future__ import annotations

from typing import Any

from triplan.backends.runtime.launch import Arg, Int, Launch, Ptr, Scratch
from triplan.backends.table import kernel
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.offsets import ceil_power, layout, padded_bytes
from triplan.backends.triton.sorting import radix_kernels as kernels
from triplan.backends.triton.sorting.shared import (
    ELEMENTS,
    MOST,
    bits,
    guarantee,
    integers,
    key_constants,
    numerics,
    row_strides,
)
from triplan.descriptors import ArgsortDescriptor, SortDescriptor
from triplan.sku import SUPPORTED, ElementKind, Support, Target

#: Values of a digit of 8 bits.
DIGITS = 256
#: Elements of a tile, in 8 warps: more make longer runs of equal digits, which are written together. Untuned.
TILE = 2048
#: Counts that a program scans at a time. Untuned.
SCANNED = 4096
#: Elements that a multiprocessor sorts within tiles in a microsecond. Untuned.
SM_SORTED_PER_US = 500

Sorted = SortDescriptor | ArgsortDescriptor


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
    programs = desc.rows * max(tiles_of(desc), DIGITS)
    if programs >= 2**31:
        return Support.no(f"needs {programs} programs; a grid holds fewer than 2**31")
    return SUPPORTED


def rank(desc: Sorted, target: Target) -> float:
    """Each pass reads the elements twice, and moves them with their positions. Untuned."""
    numel = desc.rows * tiles_of(desc) * tile_of(desc)
    moved = numel * (3 * desc.element.itemsize + 8) / BYTES_PER_US
    sorts = numel / (max(target.sm_count, 1) * SM_SORTED_PER_US)
    return passes_of(desc) * (3 * LAUNCH_US + moved + sorts)


def parts_of(desc: Sorted) -> tuple[list[int], int, int]:
    """(where two buffers of elements and positions begin, the counts, the end of the workspace), in bytes."""
    numel, passes = desc.rows * desc.n, passes_of(desc)
    begins, end = [], 0
    for size in (desc.element.itemsize, 4) * min(passes - 1, 2):
        begins.append(end)
        end += padded_bytes(numel * size)
    return begins, end, end + padded_bytes(4 * desc.rows * DIGITS * (tiles_of(desc) + 1))


def workspace(desc: Sorted, target: Target) -> int:
    return parts_of(desc)[2] if desc.rows * desc.n else 0


def _radix(desc: Sorted, target: Target) -> list[Launch]:
    if desc.rows * desc.n == 0:
        return []
    given = {o.name: o for o in desc.operands()}
    element = integers(desc.element)
    begins, counts_at, _ = parts_of(desc)
    counts, n, tiles = Scratch(counts_at, ElementKind.I32), Int(desc.n), Int(tiles_of(desc))
    within = (Int(desc.n, True), None)
    values = given.get("values")
    source: tuple[Ptr | Scratch, Arg] = bits(given["x"]), row_strides(given["x"])
    order: tuple[Scratch | None, Arg] = None, None
    constants = {**key_constants(desc), "DESCENDING": desc.descending, "BLOCK": tile_of(desc)}
    lines, passes = desc.rows * DIGITS, passes_of(desc)
    scanned = min(ceil_power(tiles_of(desc)), SCANNED)
    group = min(SCANNED // scanned, DIGITS)
    warps, found = max(tile_of(desc) // 256, 1), []
    for turn in range(passes):
        keys: dict[str, Any] = {"x": source[0], "x_strides": source[1], "counts": counts, "n": n, "tiles": tiles}
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
            Launch(kernels.counts_kernel, each, keys, constants, num_warps=warps),
            Launch(
                kernels.scan_kernel,
                lines // group,
                {"counts": counts, "tiles": tiles},
                {"GROUP": group, "BLOCK": scanned},
                num_warps=8,
            ),
            Launch(kernels.scatter_kernel, each, {**keys, **to}, constants, num_warps=warps),
        ]
        if turn < passes - 1:
            source, order = moved, placed
    return found


for _op in ("sort", "argsort"):
    kernel(
        op=_op,
        name="radix",
        elements=ELEMENTS,
        guarantee=guarantee,
        supports=supports,
        rank=rank,
        numerics=numerics,
        workspace=workspace,
        layout=layout,
    )(_radix)
