"""Kernel ``rows`` of sort, argsort, topk and kthvalue: rows that fit into the registers of one program."""

from __future__ import annotations

from triplan.backends.runtime.launch import Int, Launch
from triplan.backends.triton.common.card import LAUNCH_US
from triplan.backends.triton.common.offsets import ceil_power, extent_int
from triplan.backends.triton.common.tiles import fits_grid, waves_us
from triplan.backends.triton.sorting import rows_kernels as kernels
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

#: The longest rows by bytes of an element: Triton's compiler takes 3 s for a sort of 1024 integers and 9 s for 4096,
#: and registers spill with 2048 elements of 64 bits, whose halves are sorted one after the other.
LONGEST = {1: 2048, 2: 2048, 4: 2048, 8: 1024}
#: Elements of a program that takes several rows. Untuned.
HELD = 1024
#: Registers of a thread at most. Left alone, ptxas takes 40 in some binaries for sm80, and spills a few.
REGISTERS = 128
#: Elements that a multiprocessor moves by one step of a bitonic sort in a microsecond, by bytes of an element: a step
#: of 32 bits compiles to about 5 instructions an element, one of 64 bits to 11, and it does 64 in a cycle. Untuned.
SM_STEPS_PER_US = {1: 22_000, 2: 22_000, 4: 10_000, 8: 10_000}
#: How much longer a program alone takes, whose steps wait for each other: about the geometric mean of problems of
#: ``bench anywhere sorting``, seeds 1, 2, 3 and 51, on an H200 (0.6 to 5).
ALONE = 2.2


def tile_of(desc: Ordered) -> tuple[int, int]:
    """(rows, elements of each) of a program."""
    block = max(ceil_power(desc.n), 16)
    return min(max(HELD // block, 1), ceil_power(max(desc.rows, 1))), block


def supports(desc: Ordered, target: Target) -> Support:
    if desc.n > (longest := LONGEST[desc.element.itemsize]):
        return Support.no(f"rows of {desc.n} elements of {desc.element.itemsize} bytes; programs hold up to {longest}")
    return fits_grid(-(-desc.rows // tile_of(desc)[0]))


def rank(desc: Ordered, target: Target) -> float:
    """A bitonic sort of 2**k elements has k * (k + 1) / 2 steps. Untuned."""
    rows, block = tile_of(desc)
    programs, k = max(-(-desc.rows // rows), 1), block.bit_length() - 1
    steps = k * (k + 1) // 2 * (2 if desc.element.itemsize == 8 else 1)
    kept = kept_of(desc)[1]
    moved = (desc.n * desc.element.itemsize + kept * (desc.element.itemsize + 8)) * rows
    waves = -(-programs // target.sm_count)
    sorting_us = max(waves, ALONE) * rows * block * steps / SM_STEPS_PER_US[desc.element.itemsize]
    return LAUNCH_US + waves_us(programs, moved, target) + sorting_us


def _rows(desc: Ordered, target: Target) -> list[Launch]:
    if desc.rows * kept_of(desc)[1] == 0:
        return []
    rows, block = tile_of(desc)
    first, kept = kept_args(desc)
    args = {**row_args(desc), "rows": extent_int(desc.rows), "n": Int(desc.n), "first": first, "kept": kept}
    constants = {**key_constants(desc), "DESCENDING": descending(desc), "ROWS": rows, "BLOCK": block}
    warps = max(rows * block // 256, 1)
    return [
        Launch(
            kernels.sort_rows_kernel, -(-desc.rows // rows), args, constants, num_warps=warps, max_registers=REGISTERS
        )
    ]


for _op in SORTS + SELECTIONS:
    sorting_kernel(op=_op, name="rows", supports=supports, rank=rank)(_rows)
