"""Rows that lie across memory: neighbouring rows are adjacent there, not the elements of one.

A program has one row, so that each element that it reads or writes would be in a sector of its own. Such rows are read
and written as packed ones of the workspace, and copied by tiles, of which whole sectors are read and written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from triplan.backends.runtime.launch import Arg, Launch, Ptr, Scratch
from triplan.backends.triton.common.card import COPIED_BYTES_PER_US, LAUNCH_US, SECTOR
from triplan.backends.triton.common.copied_kernels import matrix_copy_kernel
from triplan.backends.triton.common.offsets import ceil_power, divisible_extent, padded_bytes
from triplan.backends.triton.common.strides import known_strides, stride_arg
from triplan.backends.triton.sorting.shared import Ordered, bits, integers
from triplan.descriptors import PACKED, Operand
from triplan.sku import ElementKind

#: Elements a microsecond that are written across the rows, one by one; and that are read: programs of neighbouring rows
#: find some in the caches. From drawn problems on an H200.
WRITTEN_PER_US, READ_PER_US = 9e4, 3.3e5
#: Sides of a tile of a copy, of bytes and of other elements, and its warps: as ``transposed`` of the copies has them.
#: And elements of a tile at most whose shorter side has fewer.
SIDE, SIDE_OF_BYTES, WARPS = 64, 128, 8
ELEMENTS = 4096


def _us(desc: Ordered, reads: float) -> list[tuple[Operand, float, float]]:
    """Operands that lie across, with the microseconds of a copy, and those that it saves. (Of fewer rows than a sector
    has elements, those of one row share sectors.)"""
    found = []
    for o in desc.operands():
        across = len(o.shape) == 2 and o.layout.unit_axis == 0 and not o.layout.zero_axes
        if across and o.shape[0] * o.element.itemsize >= SECTOR and o.shape[1] > 1:
            copy = LAUNCH_US + o.numel * (_held(o).itemsize + o.element.itemsize) / COPIED_BYTES_PER_US
            found.append((o, copy, o.numel / WRITTEN_PER_US if o.is_written else reads * o.numel / READ_PER_US))
    return found


def _held(o: Operand) -> ElementKind:
    """What a copy in the workspace holds: positions take 32 bits."""
    return ElementKind.I32 if o.name == "indices" else integers(o.element)


def copied(desc: Ordered, reads: float) -> list[Operand]:
    """Operands of which a copy takes less time than it saves. ``reads``: how often the entry reads all of x."""
    return [o for o, copy, saved in _us(desc, reads) if copy < saved]


def across_us(desc: Ordered, reads: float) -> float:
    """Microseconds of what lies across the rows, beside those of packed operands."""
    return sum(min(copy, saved) for _, copy, saved in _us(desc, reads))


def nbytes(desc: Ordered, reads: float) -> int:
    """Bytes of the workspace that the copies take."""
    return sum(padded_bytes(o.numel * _held(o).itemsize) for o in copied(desc, reads))


def launches(desc: Ordered, sort: Callable[[Any], list[Launch]], start: int, reads: float) -> list[Launch]:
    """Those of ``sort``, of which the last one writes the results, and of the copies. ``start``: bytes of the workspace
    that ``sort`` takes."""
    across = copied(desc, reads)
    if not across:
        return sort(desc)
    copies = {}
    for o in across:
        copies[o.name] = Scratch(start, _held(o))
        start += padded_bytes(o.numel * copies[o.name].element.itemsize)
    packed = desc.replace(layouts={**dict(desc.layouts), **dict.fromkeys(copies, PACKED)})
    found = [_on(launch, copies) for launch in sort(packed)]
    before = [_copy(o, bits(o), copies[o.name]) for o in across if not o.is_written]
    return [*before, *found, *(_copy(o, copies[o.name], bits(o)) for o in across if o.is_written)]


def _on(launch: Launch, copies: Mapping[str, Scratch]) -> Launch:
    """``launch`` with copies in place of their operands."""
    args = {k: copies[v.operand] if isinstance(v, Ptr) and v.operand in copies else v for k, v in launch.args.items()}
    return replace(launch, args=args)


def _copy(o: Operand, source: Arg, out: Arg) -> Launch:
    """From ``source`` to ``out``, of which one is ``o`` and the other one is packed."""
    rows, columns = o.shape
    side = SIDE_OF_BYTES if o.element.itemsize == 1 else SIDE
    high, wide = min(ceil_power(rows), side), min(ceil_power(columns), side)
    if min(high, wide) < SIDE:  # few rows or columns
        high, wide = min(ceil_power(rows), ELEMENTS // wide), min(ceil_power(columns), ELEMENTS // high)
    apart = {"m": replace(divisible_extent(columns), wide=True), "n": stride_arg(o, known_strides(o, 2)[1])}
    packed, given = ("source", "out") if o.is_written else ("out", "source")
    return Launch(
        matrix_copy_kernel,
        -(-rows // high) * -(-columns // wide),
        {
            "source": source,
            "out": out,
            "rows": divisible_extent(rows),
            "source_columns": divisible_extent(columns),
            "out_columns": divisible_extent(columns),
            f"{packed}_m": apart["m"],
            f"{given}_n": apart["n"],
            "source_batch": None,
            "out_batch": None,
            "sizes": None,
        },
        {f"{packed}_n": 1, f"{given}_m": 1, "ROWS": high, "COLUMNS": wide},
        num_warps=WARPS,
    )
