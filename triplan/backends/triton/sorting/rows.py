"""Kernel ``rows`` of sort, argsort, topk and kthvalue: rows that fit into the registers of one program."""

from __future__ import annotations

from triplan.backends.runtime.launch import Launch, power_of_two_in
from triplan.backends.triton.common.card import LAUNCH_US
from triplan.backends.triton.common.offsets import ceil_power, extent_int
from triplan.backends.triton.common.strides import count, known_strides
from triplan.backends.triton.common.tiles import combined, fits_grid, waves_us
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
#: Elements of a thread.
ITEMS = 8
#: Bytes of the widest access of a thread.
VECTOR_BYTES = 16
#: Registers of a thread at most. Left alone, ptxas takes 40 in some binaries for sm80, and spills a few.
REGISTERS = 128
# Fitted to drawn problems of more rows than programs run at a time on an H200, by a script that is not published:
#: Microseconds of a multiprocessor with many programs for each element: to read and store it, for each access after
#: the first by which a thread reads its elements, and for a step of a bitonic sort, in which it is compared with one
#: that this thread holds, this warp, or another one, by shared memory. Steps of packed integers of 64 bits take twice
#: as long.
ELEMENT_US, FURTHER_US, OWN_US, LANE_US, SHARED_US = 3.2e-4, 4e-6, 2.6e-5, 1.2e-5, 4.7e-4
#: Exponent of the p-norm that combines these and memory traffic, which overlap in many programs; inf is max().
OVERLAP = 2.5
#: Microseconds that a program alone takes of packed integers of 32 bits: besides steps, for each step in a warp, and of
#: each warp in each step between warps; of threads of ITEMS elements, and less by the square of a part of them. Of 64
#: bits twice as long, as each step has twice as many instructions. And for each access after the first by which a
#: thread reads its elements; and for what is between the two sorts of 64 bits. (From drawn problems on an H200.)
ALONE_US, LANE_ALONE_US, SHARED_ALONE_US, ACCESS_US, BETWEEN_US = 0.3, 0.035, 0.24, 0.1, 1.0


def tile_of(desc: Ordered) -> tuple[int, int]:
    """(rows, elements of each) of a program."""
    block = ceil_power(desc.n)
    return min(max(HELD // block, 1), ceil_power(max(desc.rows, 1))), block


def held_of(desc: Ordered) -> int:
    """Elements of a thread."""
    rows, block = tile_of(desc)
    return min(ITEMS, block, max(rows * block // 32, 1))


def warps_of(desc: Ordered) -> int:
    rows, block = tile_of(desc)
    return max(rows * block // (32 * ITEMS), 1)


def split_of(desc: Ordered) -> int:
    """Accesses by which a thread reads its elements: each of as many as are adjacent and surely aligned."""
    x, held = desc.operand("x"), held_of(desc)
    across, along = known_strides(x, 2)
    vector = min(x.alignment, VECTOR_BYTES) // desc.element.itemsize if along == 1 else 1
    multiple = power_of_two_in(across) if isinstance(across, int) else x.layout.stride_multiple
    return held // max(min(vector, multiple, held), 1)


def supports(desc: Ordered, target: Target) -> Support:
    if desc.n > (longest := LONGEST[desc.element.itemsize]):
        return Support.no(f"rows of {desc.n} elements of {desc.element.itemsize} bytes; programs hold up to {longest}")
    return fits_grid(-(-desc.rows // tile_of(desc)[0]))


def steps_of(desc: Ordered) -> tuple[int, int, int]:
    """Steps of the sort between elements of a thread, of a warp, and of several warps.

    A bitonic sort of 2**k elements has k - i steps between elements that are 2**i apart.
    """
    block = tile_of(desc)[1]
    k, own = block.bit_length() - 1, held_of(desc).bit_length() - 1
    apart = [k - i for i in range(k)]
    return sum(apart[:own]), sum(apart[own : own + 5]), sum(apart[own + 5 :])


def rank(desc: Ordered, target: Target) -> float:
    rows, block = tile_of(desc)
    programs, kept, size = max(-(-desc.rows // rows), 1), kept_of(desc)[1], desc.element.itemsize
    moved = (desc.n * size + kept * (size + 8)) * rows
    own, lanes, shared = steps_of(desc)
    wide = {4: 2, 8: 4}.get(size, 1)  # (8: each half of a key in turn)
    steps_us = wide * (own * OWN_US + lanes * LANE_US + shared * SHARED_US)
    each = rows * block * (ELEMENT_US + (split_of(desc) - 1) * FURTHER_US + steps_us)
    part, warps = (held_of(desc) / ITEMS) ** 2, warps_of(desc)
    alone = wide * (part * (ALONE_US + lanes * LANE_ALONE_US) + shared * warps * SHARED_ALONE_US)
    alone += (split_of(desc) - 1) * ACCESS_US + (BETWEEN_US if size == 8 else 0.0)
    us = combined(waves_us(programs, moved, target), -(-programs // target.sm_count) * each, power=OVERLAP)
    return LAUNCH_US + max(us, alone)


def _rows(desc: Ordered, target: Target) -> list[Launch]:
    if desc.rows * kept_of(desc)[1] == 0:
        return []
    rows, block = tile_of(desc)
    first, kept = kept_args(desc)
    args = {**row_args(desc), "rows": extent_int(desc.rows), "n": count(desc.n), "first": first, "kept": kept}
    constants = {**key_constants(desc), "DESCENDING": descending(desc), "ROWS": rows, "BLOCK": block}
    constants["SPLIT"] = split_of(desc)
    warps, programs = warps_of(desc), -(-desc.rows // rows)
    return [Launch(kernels.sort_rows_kernel, programs, args, constants, num_warps=warps, max_registers=REGISTERS)]


for _op in SORTS + SELECTIONS:
    sorting_kernel(op=_op, name="rows", supports=supports, rank=rank)(_rows)
