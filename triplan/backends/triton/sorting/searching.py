"""Kernel ``searching`` of searchsorted: a bisection for each element, in one launch."""

from __future__ import annotations

from dataclasses import replace

from triplan.backends.runtime.launch import Arg, Int, Launch, Ptr
from triplan.backends.triton.common.card import L2_BYTES, L2_BYTES_PER_US, LAUNCH_US, SECTOR, SMS
from triplan.backends.triton.common.offsets import I32_LIMIT, ceil_power
from triplan.backends.triton.common.strides import known_strides
from triplan.backends.triton.common.tiles import fits_grid, waves_us
from triplan.backends.triton.sorting import searching_kernels as kernels
from triplan.backends.triton.sorting.shared import row_strides, sorting_kernel
from triplan.descriptors import Operand, SearchSortedDescriptor
from triplan.sku import ElementKind, Support, Target
from triplan.sku.facts import fact

#: Threads that an H200 runs at a time. Where more elements are searched for, a thread has several, whose bisections do
#: not wait for each other.
THREADS = SMS * 2048
#: Elements of a thread at most. LESS of LONG rows, and where threads have elements of several rows: each then compares
#: with its own registers. From drawn problems on an H200, that of long rows untuned.
EACH, LESS = 4, 2
#: Bytes of a sequence beyond which most loads of a warp touch as many lines of the cache as it has lanes. Untuned.
LONG = 32 * 128
#: Elements that a program searches for at most: of one element a thread, of several, and of long rows if there are
#: PROGRAMS of such: a multiprocessor then has two of them, whose rows its L1 holds. From drawn problems on an H200.
BLOCK, BLOCK_OF_SEVERAL, BLOCK_OF_LONG, PROGRAMS = 512, 1024, 2048, 2048
#: Steps of a bisection at most that compare with elements in registers: all of 2**LEVELS - 1 are loaded. One more for
#: EACH elements of up to 4 bytes, which share them: 32 registers are enough, with which all threads can run.
LEVELS = 2
#: Rows of a tile at most, for operands that are contiguous along rows: results of 8 bytes fill a line of the cache.
#: Untuned.
TILE_ROWS = 16
#: Bytes of the sequences that a tile reads, at most, so that they stay in L1; a tile has SECTOR_ROWS at least. Untuned.
TILE_BYTES, SECTOR_ROWS = 1 << 15, 4
#: Elements of a row below which a program takes several rows, one after another: a program of each would leave lanes
#: idle, and a multiprocessor runs 32 programs at a time. And the warps of such a program. Untuned.
SHORT, SHORT_WARPS = 128, 8


@fact
def rows_of(desc: SearchSortedDescriptor) -> int:
    """Rows of a program: one, or several where results or what is searched for are contiguous along rows, not columns,
    so that a sector has elements of several rows."""
    if desc.m == 1 or desc.rows < SECTOR_ROWS or not any(_turned(desc.operand(name)) for name in ("x", "out")):
        return 1
    most = TILE_BYTES // (max(desc.n, 1) * desc.element.itemsize)
    return min(max(ceil_power(most + 1) // 2, SECTOR_ROWS), TILE_ROWS, ceil_power(desc.rows + 1) // 2)


def _turned(o: Operand) -> bool:
    """Whether ``o``, [rows, m], is contiguous along rows alone."""
    across, along = known_strides(o, 2)
    return across == 1 and along != 1


def taken_of(desc: SearchSortedDescriptor) -> int:
    """Whole rows that a program takes one after another; 0: it takes a tile."""
    return block_of(desc) // desc.m if _is_short(desc) else 0


def programs(desc: SearchSortedDescriptor) -> int:
    if taken := taken_of(desc):
        return -(-desc.rows // taken)
    return -(-desc.rows // rows_of(desc)) * -(-desc.m // block_of(desc))


def block_of(desc: SearchSortedDescriptor) -> int:
    """Elements that a program searches for, of each row of a tile: as many as leave few lanes idle, of which each
    program costs as much as a warp of them."""
    if _is_short(desc):  # a program for each multiprocessor at least
        return min(max(ceil_power(desc.rows * desc.m // SMS), ceil_power(desc.m), 32), 32 * SHORT_WARPS * _each(desc))
    rows = rows_of(desc)
    least = max(32 // rows, 1)
    blocks = (min(max(ceil_power(desc.m), least), _most(desc) // rows) >> i for i in range(3))
    return min((b for b in blocks if b >= least), key=lambda b: -(-desc.m // b) * (b * rows + 32))


def _is_long(desc: SearchSortedDescriptor) -> bool:
    return desc.n * desc.element.itemsize > LONG


def _is_short(desc: SearchSortedDescriptor) -> bool:
    return 0 < desc.m < SHORT and desc.rows > 1 and rows_of(desc) == 1


def _each(desc: SearchSortedDescriptor) -> int:
    """Elements of a thread, if programs are large enough."""
    most = LESS if _is_long(desc) or _is_short(desc) or rows_of(desc) > 1 else EACH
    return min(max(ceil_power(desc.rows * desc.m // THREADS + 1) // 2, 1), most)


def _most(desc: SearchSortedDescriptor) -> int:
    """Elements of a program at most."""
    if _is_long(desc) and desc.rows * (desc.m // BLOCK_OF_LONG) >= PROGRAMS:
        return BLOCK_OF_LONG
    return BLOCK_OF_SEVERAL if _each(desc) > 1 else BLOCK


def warps_of(desc: SearchSortedDescriptor) -> int:
    """Warps of a program: two at least, as a multiprocessor runs 32 programs and 64 warps, if these are full."""
    tile = rows_of(desc) * block_of(desc)
    return max(tile // (32 * _each(desc)), min(tile // 32, 2), 1)


def levels_of(desc: SearchSortedDescriptor) -> int:
    """Steps that compare with elements in registers."""
    each = rows_of(desc) * block_of(desc) // (32 * warps_of(desc))
    more = each == EACH and desc.element.itemsize <= 4
    return min((desc.n + 1).bit_length() - 1, LEVELS + more)


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


def _strides(o: Operand) -> tuple[Arg, ...]:
    """``row_strides``, between rows of 32 bits if it has no more: the products of each lane are then shorter."""
    across, along = row_strides(o)
    if isinstance(across, Int):
        across = replace(across, wide=across.value >= I32_LIMIT)
    return across, along


def _own_strides(o: Operand) -> tuple[Arg, ...]:
    """``_strides`` of [rows, m], with None between rows too if ``o`` is contiguous along them alone."""
    across, along = _strides(o)
    return (None if _turned(o) else across, along)


@sorting_kernel(op="searchsorted", name="searching", supports=supports, rank=rank)
def searching(desc: SearchSortedDescriptor, target: Target) -> list[Launch]:
    if desc.rows * desc.m == 0:
        return []
    given = {o.name: o for o in desc.operands()}
    sorter, block, taken = given.get("sorter"), block_of(desc), taken_of(desc)
    args = {
        "sequence": address(given["sequence"]),
        "sorter": None if sorter is None else address(sorter),
        "x": address(given["x"]),
        "out": address(given["out"]),
        "sequence_strides": _strides(given["sequence"]),
        "sorter_strides": None if sorter is None else _strides(sorter),
        "x_strides": _own_strides(given["x"]),
        "out_strides": _own_strides(given["out"]),
        "rows": Int(desc.rows, desc.rows >= I32_LIMIT),
        "n": Int(desc.n, desc.n >= I32_LIMIT),
        "m": Int(desc.m, desc.m >= I32_LIMIT),
        "blocks": None if taken else Int(-(-desc.m // block)),
        "taken": Int(taken) if taken else None,
        "steps": Int((desc.n + 1).bit_length() - 1 - levels_of(desc)),
    }
    constants = {"RIGHT": desc.right, "ROWS": rows_of(desc), "COLS": block, "LEVELS": levels_of(desc)}
    return [Launch(kernels.searchsorted_kernel, programs(desc), args, constants, num_warps=warps_of(desc))]
