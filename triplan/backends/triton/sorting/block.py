"""Kernel ``block`` of sorts, topk and kthvalue: rows that fit into one program, by their digits in shared memory."""

from __future__ import annotations

from typing import Any

from triplan.backends.runtime.launch import Int, Launch
from triplan.backends.triton.common.card import LAUNCH_US
from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.common.tiles import combined, fits_grid, waves_us
from triplan.backends.triton.sorting import block_kernels as kernels, turned
from triplan.backends.triton.sorting.shared import (
    SELECTIONS,
    SORTS,
    Ordered,
    descending,
    kept_args,
    kept_of,
    key_constants,
    row_args,
    sorting_kernel,
)
from triplan.sku import Support, Target

#: The longest rows. Their words of 8 bytes and the counters take 40 KiB; kernels may declare 48 KiB of shared memory.
LONGEST = 4096
#: Warps of a program at most.
WARPS = 8
#: Elements of a thread at least, where a row has so many. Untuned.
ITEMS = 8
# Fitted to drawn problems of more than 1500 rows on an H200, by a script that is not published:
#: Elements that a multiprocessor orders by one digit in a microsecond: in programs of up to four warps, and of eight.
#: (Both set by hand, somewhat below what was fitted: select then chooses best.)
ORDERED_PER_US, ORDERED_BY_EIGHT_PER_US = 3200, 2600
#: The same of several programs whose threads have more than ITEMS elements: registers have room for two of these, not
#: for three.
SM_LONG_PER_US = 2200
#: Microseconds of a multiprocessor for each program, and for a warp's counters of one digit.
PROGRAM_US, COUNTERS_US = 0.022, 0.032
#: How often a row that lies across memory seems to be read: threads have all of it on its way at once.
READS = 0.5
#: Exponent of the p-norm that combines ordering and memory traffic, which overlap in many programs; inf is max().
OVERLAP = 3
#: Microseconds of a digit that a program alone waits for: counters are cleared, summed and read again, elements
#: exchanged, each behind a barrier. And for each element of a thread: the next one waits for its warp's counters.
DIGIT_US, ITEM_US = 0.09, 0.075
#: How much longer a digit takes where elements have 8 bytes: they are exchanged apart from their positions.
WIDE = 1.2


def shape_of(n: int) -> tuple[int, int]:
    """(warps of a program, elements of a thread), for rows of n elements."""
    lanes = ceil_power(max(n, 32)) // 32
    warps = min(max(lanes // ITEMS, 1), WARPS)
    return warps, lanes // warps


def supports(desc: Ordered, target: Target) -> Support:
    if desc.n > LONGEST:
        return Support.no(f"rows of {desc.n} elements; programs hold up to {LONGEST}")
    return fits_grid(desc.rows)


def rank(desc: Ordered, target: Target) -> float:
    written = sum(o.element.itemsize for o in desc.operands() if o.is_written)
    moved = desc.n * desc.element.itemsize + kept_of(desc)[1] * written
    us = combined(waves_us(max(desc.rows, 1), moved, target), ordered_us(desc, desc.n, target), power=OVERLAP)
    return LAUNCH_US + us + turned.across_us(desc, READS)


def ordered_us(desc: Ordered, n: int, target: Target) -> float:
    """Each digit orders the elements of the lanes, of which a row of n may need fewer: instructions of all, or
    latency."""
    warps, items = shape_of(n)
    digits = desc.element.itemsize * (WIDE if desc.element.itemsize == 8 else 1)
    per_us = ORDERED_PER_US if warps < WARPS else ORDERED_BY_EIGHT_PER_US
    if items > ITEMS and desc.rows > target.sm_count:
        per_us = SM_LONG_PER_US
    each = PROGRAM_US + digits * (32 * warps * items / per_us + warps * COUNTERS_US)
    return max(-(-desc.rows // target.sm_count) * each, digits * (DIGIT_US + items * ITEM_US))


def _block(desc: Ordered, target: Target) -> list[Launch]:
    return turned.launches(desc, _launches, 0, READS) if desc.rows * kept_of(desc)[1] else []


def _launches(desc: Ordered) -> list[Launch]:
    first, kept = kept_args(desc)
    args = {**row_args(desc), "order": None, "order_strides": None, "n": Int(desc.n), "first": first, "kept": kept}
    return [sort_launch(desc, desc.n, args)]


def sort_launch(desc: Ordered, n: int, args: dict[str, Any]) -> Launch:
    """A sort of rows of n elements of those of ``desc``."""
    warps, items = shape_of(n)
    constants = {**key_constants(desc), "DESCENDING": descending(desc), "WARPS": warps, "ITEMS": items}
    return Launch(kernels.sort_block_kernel, desc.rows, args, constants, num_warps=warps)


for _op in SORTS + SELECTIONS:
    sorting_kernel(
        op=_op,
        name="block",
        supports=supports,
        rank=rank,
        workspace=lambda desc, target: turned.nbytes(desc, READS),
        features=("gluon",),
        interpretable=False,
    )(_block)
