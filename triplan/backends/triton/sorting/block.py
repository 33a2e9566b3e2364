"""Kernel ``block`` of sorts, topk and kthvalue: rows that fit into one program, by their digits in shared memory."""

from __future__ import annotations

from triplan.backends.runtime.launch import Int, Launch
from triplan.backends.triton.common.card import LAUNCH_US
from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.common.tiles import fits_grid, waves_us
from triplan.backends.triton.sorting import block_kernels as kernels
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
#: Elements that a multiprocessor orders by one digit in a microsecond: each takes about 90 instructions. Untuned.
SM_ORDERED_PER_US = 2300
#: Microseconds of a multiprocessor for a warp's counters of one digit: about 100 instructions. Untuned.
COUNTERS_US = 0.014
#: Microseconds until a warp has counted one of each lane's elements by one digit: the next one waits for its counters.
#: From one row of 128 elements of f16 in ``bench anywhere sorting --seed 2`` on an H200.
ITEM_US = 0.07


def shape_of(desc: Ordered) -> tuple[int, int]:
    """(warps of a program, elements of a thread)."""
    lanes = ceil_power(max(desc.n, 32)) // 32
    warps = min(max(lanes // ITEMS, 1), WARPS)
    return warps, lanes // warps


def supports(desc: Ordered, target: Target) -> Support:
    if desc.n > LONGEST:
        return Support.no(f"rows of {desc.n} elements; programs hold up to {LONGEST}")
    return fits_grid(desc.rows)


def rank(desc: Ordered, target: Target) -> float:
    """Each digit orders the elements of the lanes, of which a row may need fewer: instructions of all, or latency."""
    warps, items = shape_of(desc)
    moved = desc.n * desc.element.itemsize + kept_of(desc)[1] * (desc.element.itemsize + 8)
    digit_us = 32 * warps * items / SM_ORDERED_PER_US + warps * COUNTERS_US
    ordered_us = max(-(-desc.rows // target.sm_count) * digit_us, items * ITEM_US)
    return LAUNCH_US + waves_us(max(desc.rows, 1), moved, target) + desc.element.itemsize * ordered_us


def _block(desc: Ordered, target: Target) -> list[Launch]:
    if desc.rows * kept_of(desc)[1] == 0:
        return []
    warps, items = shape_of(desc)
    constants = {**key_constants(desc), "DESCENDING": descending(desc), "WARPS": warps, "ITEMS": items}
    first, kept = kept_args(desc)
    args = {**row_args(desc), "n": Int(desc.n), "first": first, "kept": kept}
    return [Launch(kernels.sort_block_kernel, desc.rows, args, constants, num_warps=warps)]


for _op in SORTS + SELECTIONS:
    sorting_kernel(op=_op, name="block", supports=supports, rank=rank, features=("gluon",), interpretable=False)(_block)
