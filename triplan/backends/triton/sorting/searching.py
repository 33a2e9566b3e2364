"""Kernel ``searching`` of searchsorted: a bisection for each element, in one launch."""

from __future__ import annotations

from triplan.backends.runtime.launch import Int, Launch, Ptr
from triplan.backends.triton.common.card import L2_BYTES, L2_BYTES_PER_US, LAUNCH_US, SECTOR
from triplan.backends.triton.common.offsets import I32_LIMIT, ceil_power
from triplan.backends.triton.common.tiles import fits_grid, waves_us
from triplan.backends.triton.sorting import searching_kernels as kernels
from triplan.backends.triton.sorting.shared import row_strides, sorting_kernel
from triplan.descriptors import Operand, SearchSortedDescriptor
from triplan.sku import ElementKind, Support, Target

#: (elements that a program searches for at most, those of a thread), and the same if there are PROGRAMS of such:
#: a multiprocessor then has two of them, whose rows its L1 holds. From drawn problems on an H200, of which smaller ones
#: take longer by the second.
FEW, MANY, PROGRAMS = (512, 1), (2048, 2), 2048


def programs(desc: SearchSortedDescriptor) -> int:
    return desc.rows * -(-desc.m // block_of(desc))


def block_of(desc: SearchSortedDescriptor) -> int:
    """Elements of a program: as many as leave few lanes idle, of which each program costs as much as a warp of them."""
    blocks = (min(max(ceil_power(desc.m), 32), _most(desc)[0]) >> i for i in range(3))
    return min((b for b in blocks if b >= 32), key=lambda b: -(-desc.m // b) * (b + 32))


def _most(desc: SearchSortedDescriptor) -> tuple[int, int]:
    """(elements of a program at most, those of a thread)."""
    return MANY if desc.rows * (desc.m // MANY[0]) >= PROGRAMS else FEW


def supports(desc: SearchSortedDescriptor, target: Target) -> Support:
    return fits_grid(programs(desc))


def rank(desc: SearchSortedDescriptor, target: Target) -> float:
    """Each step of a bisection reads a sector, of a sequence that fits into the L2 cache from there. Untuned."""
    moved = desc.rows * desc.m * (desc.element.itemsize + 8)
    steps, size = desc.rows * desc.m * desc.n.bit_length(), desc.rows * desc.n * desc.element.itemsize
    slower = 1 if size <= L2_BYTES else 2
    return (
        waves_us(max(programs(desc), 1), moved / max(programs(desc), 1), target)
        + 2 * LAUNCH_US
        + (slower * steps * SECTOR / L2_BYTES_PER_US)
    )


def address(o: Operand) -> Ptr:
    return Ptr(o.name, ElementKind.U8 if o.element is ElementKind.BOOL else o.element, o.alignment)


@sorting_kernel(op="searchsorted", name="searching", supports=supports, rank=rank)
def searching(desc: SearchSortedDescriptor, target: Target) -> list[Launch]:
    if desc.rows * desc.m == 0:
        return []
    given = {o.name: o for o in desc.operands()}
    sorter, block = given.get("sorter"), block_of(desc)
    args = {
        "sequence": address(given["sequence"]),
        "sorter": None if sorter is None else address(sorter),
        "x": address(given["x"]),
        "out": address(given["out"]),
        "sequence_strides": row_strides(given["sequence"]),
        "sorter_strides": None if sorter is None else row_strides(sorter),
        "x_strides": row_strides(given["x"]),
        "out_strides": row_strides(given["out"]),
        "n": Int(desc.n, desc.n >= I32_LIMIT),
        "m": Int(desc.m, desc.m >= I32_LIMIT),
        "blocks": Int(-(-desc.m // block)),
        "steps": Int(desc.n.bit_length()),
    }
    warps, constants = max(block // (32 * _most(desc)[1]), 1), {"RIGHT": desc.right, "BLOCK": block}
    return [Launch(kernels.searchsorted_kernel, programs(desc), args, constants, num_warps=warps)]
