"""Kernel ``rows``: tensors of any strides, and blocks of larger tensors, in tiles of rows and columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from triplan.backends.runtime.launch import Int, Launch, power_of_two_in
from triplan.backends.triton.common.card import L2_SHARE, MAX_THREAD_REGISTERS, SECTOR
from triplan.backends.triton.common.offsets import I32_LIMIT, ceil_power, divisor, extents
from triplan.backends.triton.common.strides import row_tile, stride_arg
from triplan.backends.triton.random import rows_kernels as kernels
from triplan.backends.triton.random.dims import Dim, beside, dims, stride_args, tensors
from triplan.backends.triton.random.entries import STRIDED, arguments, block_of, constants, cost, entry, fits
from triplan.descriptors import RandomDescriptor
from triplan.descriptors.random import READING
from triplan.sku import Support, Target
from triplan.sku.facts import fact

#: Warps of a program.
WARPS = 4
#: Registers of a thread at most that writes part of a tile and reads no x: with as many as randint would take, fewer
#: programs are resident. (Those that read x spill on an A100.)
REGISTERS = 96
#: Time relative to packed results. Untuned.
SLOWDOWN = 1.2
#: The same of tiles of one row, of which a program computes one place: set by hand below that of ``groups`` where it
#: computes each element's place. In ``bench anywhere random``, seeds 14 and 15, on an H200, ``rows`` took 0.79 to 1.02
#: times as long in the four such problems.
ONE_ROW = 1.02
#: Rows, at least and at most, of a tile that is contiguous along them: a sector of 16-bit elements, and four. Untuned.
TURNED_ROWS = (16, 64)
#: Bytes of a tile's rows at least, if rows have as many: narrower tiles write parts of sectors. Untuned.
ROW_BYTES = 64
#: Counters of a thread at most if all tensors are contiguous along rows, and if a loop goes over them or rows begin
#: within one: it evaluates one more then. MORE_COUNTERS: of 4, 8 and 16 the fastest on an H200, by a run
#: that is not published. Threads below which it has fewer: untuned.
COUNTERS, MORE_COUNTERS, THREADS = 4, 16, 1 << 18
#: The same of rows that begin within a counter, if no x is read: a loop goes over the counters, and of each part of a
#: row one is evaluated twice: one in 32, and rows of up to 128 elements have one part. Of 12, 16 and 32 the fastest on
#: an H200, also for integers of 8 bits, by a run that is not published. Threads: chosen on an H200, where two warps for
#: each scheduler cost less than the counters that more threads would evaluate twice.
LOOPED_COUNTERS, LOOPED_THREADS = 32, 1 << 15
#: Bytes of a row of x up to which one thread reads it, if out is contiguous across rows: a line of the cache, which
#: stays in L1 until its last element is read.
SHORT_ROW = 128


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a problem is divided.

    Attributes:
        outer: the dimensions of which each point has its own rows.
        across: the dimension along which a tensor is contiguous, if that is not the columns.
        columns: the innermost dimension, along which indices are consecutive.
        shared: elements of a counter.
        height, width: rows and columns of a program's tile.
        programs: the grid.
        shifted: whether tiles have the same columns of all rows, which begin at different elements of counters.
        threads: those that have work, each on a tile, if all tensors are contiguous along ``across``; or if out is, and
            rows of x are short.
    """

    outer: tuple[Dim, ...]
    across: Dim | None
    columns: Dim
    shared: int
    height: int
    width: int
    programs: int
    threads: int = 0
    shifted: bool = False


@fact
def geometry(desc: RandomDescriptor) -> Geometry:
    *outer, columns = dims(desc)
    shared, elements = 2 if desc.is_wide else 4, block_of(desc)
    if desc.op == "randint" and columns.strides[1] != 1 and desc.element.itemsize < 4:
        elements = min(elements, STRIDED)
    turned = beside(outer, columns)
    across = next((d for d in turned if d.strides[1] == 1), turned[0] if turned else None)
    outer = [d for d in outer if d is not across]
    points, widest = math.prod(d.size for d in outer), columns.size + shared - 1
    is_short = columns.size * max(o.element.itemsize for o in tensors(desc)) <= SHORT_ROW
    # Threads that neighbour each other along a few elements would write small parts of sectors, which become whole ones
    # in the L2 cache only if that holds the result beside what earlier kernels wrote.
    out = desc.operand("out")
    few = SECTOR // 2 // out.element.itemsize if out.nbytes > L2_SHARE else 0
    is_flat = across is not None and across.size < few and columns.size // 8 >= SECTOR
    if (
        across is not None
        and across.strides[1] == 1
        and not is_flat
        and (is_short or all(s == 1 for s in across.strides[2:]))
    ):
        most, least = MORE_COUNTERS, THREADS
        if is_aligned([*outer, across], shared):
            if desc.op in READING or desc.is_wide:
                most = COUNTERS
        elif desc.op not in READING:
            most, least = LOOPED_COUNTERS, LOOPED_THREADS
        most = min(ceil_power(max(desc.operand("out").numel // (shared * least), 1)), most)
        wanted = -(-columns.size // shared)
        parts = -(-wanted // most)
        width = shared * -(-wanted // parts)  # parts of a row have about as many
        threads = points * across.size * -(-columns.size // width)
        return Geometry(tuple(outer), across, columns, shared, 1, width, -(-threads // (32 * WARPS)), threads)
    if across is not None:
        _, height = row_tile(TURNED_ROWS[1], elements, across.size)
        height = max(height, min(TURNED_ROWS[0], ceil_power(across.size)))
        width = max(min(elements // height, ceil_power(widest)), shared)
        lines = points * -(-across.size // height)
        if height >= TURNED_ROWS[0] and not is_aligned([*outer, across], shared):
            # The kernel drops the elements of the first counter that precede each row: a tile has as many more.
            width = max(width, 2 * shared)
            programs = lines * -(-columns.size // (width - shared))
            return Geometry(tuple(outer), across, columns, shared, height, width, programs, shifted=True)
    else:
        elements = min(elements, STRIDED)
        reached = columns.size if is_aligned(outer, shared) else widest
        _, width = row_tile(min(elements, max(ceil_power(reached), 8)), elements, reached)
        width = max(width, shared, min(ceil_power(reached), ROW_BYTES // desc.operand("out").element.itemsize))
        height = elements // width
        lines = -(-points // height)
    return Geometry(tuple(outer), across, columns, shared, height, width, lines * -(-widest // width))


def is_aligned(outer: Sequence[Dim], shared: int) -> bool:
    """Whether all rows begin at the same element of a counter."""
    return all(isinstance(s, int) and s % shared == 0 for s in (d.strides[0] for d in outer))


def applies(desc: RandomDescriptor, target: Target) -> Support:
    return fits(desc, geometry(desc).programs if desc.operand("out").numel else 0)


def rank(desc: RandomDescriptor, target: Target) -> float:
    if desc.operand("out").numel == 0:
        return SLOWDOWN * cost(desc)
    g, drawn = geometry(desc), 0
    if g.across is None:
        reached = g.columns.size + (0 if is_aligned(g.outer, g.shared) else g.shared - 1)
        drawn = math.prod(d.size for d in g.outer) * -(-reached // g.width) * g.width
    return (ONE_ROW if g.across is None and g.height == 1 else SLOWDOWN) * cost(desc, drawn)


@entry("rows", applies, rank)
def rows(desc: RandomDescriptor, target: Target) -> list[Launch]:
    if desc.operand("out").numel == 0:
        return []
    g, wide = geometry(desc), desc.operand("out").numel >= I32_LIMIT

    strides = partial(stride_args, desc, outer=g.outer, tile=(g.across, g.columns))
    lines = g.across.size if g.across else math.prod(d.size for d in g.outer)
    args = {
        **arguments(desc),
        "sizes": extents([d.size for d in g.outer], wide),
        "columns": Int(g.columns.size, wide, power_of_two_in(g.columns.size)),
        "index_strides": strides(0),
        "out_strides": strides(1),
        "x_strides": strides(2) if desc.op in READING else None,
    }
    made = {
        **constants(desc),
        "ALIGNED": is_aligned([d for d in (*g.outer, g.across) if d], g.shared),
    }
    most: int | None = MAX_THREAD_REGISTERS if desc.op in READING else REGISTERS
    if g.threads:
        which, parts = kernels.beside_kernel, -(-g.columns.size // g.width)
        most = MAX_THREAD_REGISTERS if desc.op in READING else None
        args |= {"rows": divisor(lines, wide), "parts": divisor(parts, wide), "threads": Int(g.threads, wide)}
        # A step of 64 bits is added by two instructions; the one that also widens 32 bits takes longer than both.
        args["out_strides"] = (*strides(1)[:2], stride_arg(desc.operand("out"), g.columns.strides[1]))
        whole = g.columns.size % g.width == 0
        made |= {"WHOLE": whole, "GROUPS": g.width // g.shared, "BLOCK": 32 * WARPS}
    else:
        which = kernels.rows_kernel
        args["rows"] = Int(lines, wide, power_of_two_in(lines))
        made |= {"TURNED": g.across is not None, "SHIFTED": g.shifted, "BLOCK_ROWS": g.height, "BLOCK_COLUMNS": g.width}
    return [Launch(which, g.programs, args, made, WARPS, max_registers=most, fuses=False)]
