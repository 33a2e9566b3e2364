"""Results of sorts that lie across the rows: neighbouring rows are adjacent in memory, not the elements of one.

A program writes one row, so that each element would be in a sector of its own. Such results are written as packed rows
of the workspace, and copied by tiles, of which whole sectors are read and written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from triplan.backends.runtime.launch import Int, Launch, Scratch, power_of_two_in
from triplan.backends.triton.common.card import COPIED_BYTES_PER_US, LAUNCH_US, SECTOR
from triplan.backends.triton.common.copied_kernels import matrix_copy_kernel
from triplan.backends.triton.common.offsets import I32_LIMIT, ceil_power, padded_bytes
from triplan.backends.triton.common.strides import known_strides, stride_arg
from triplan.backends.triton.sorting.shared import Ordered, bits, integers
from triplan.descriptors import PACKED, Operand
from triplan.sku import ElementKind

#: Elements a microsecond that are written across the rows, one by one. From drawn problems on an H200.
ACROSS_PER_US = 9e4
#: Sides of a tile of a copy, for results of a byte and for others, and its warps: as ``transposed`` of the copies has
#: them. And elements of a tile at most whose shorter side has fewer.
SIDE, SIDE_OF_BYTES, WARPS = 64, 128, 8
ELEMENTS = 4096


def _across(desc: Ordered) -> list[Operand]:
    """(Of fewer rows than a sector has elements, those of one row share sectors.)"""
    turned = (o for o in desc.operands() if o.is_written and len(o.shape) == 2 and o.layout.unit_axis == 0)
    return [o for o in turned if o.shape[0] * o.element.itemsize >= SECTOR and o.shape[1] > 1]


def _held(o: Operand) -> ElementKind:
    """What a copy in the workspace holds: positions take 32 bits."""
    return ElementKind.I32 if o.name == "indices" else integers(o.element)


def _copy_us(o: Operand) -> float:
    return LAUNCH_US + o.numel * (_held(o).itemsize + o.element.itemsize) / COPIED_BYTES_PER_US


def copied(desc: Ordered) -> list[Operand]:
    """Results of which a copy takes less time than it saves."""
    return [o for o in _across(desc) if _copy_us(o) < o.numel / ACROSS_PER_US]


def across_us(desc: Ordered) -> float:
    """Microseconds of results that lie across the rows, beside those of packed ones."""
    return sum(min(_copy_us(o), o.numel / ACROSS_PER_US) for o in _across(desc))


def nbytes(desc: Ordered) -> int:
    """Bytes of the workspace that the packed results take."""
    return sum(padded_bytes(o.numel * _held(o).itemsize) for o in copied(desc))


def launches(desc: Ordered, sort: Callable[[Any], list[Launch]], start: int) -> list[Launch]:
    """Those of ``sort``, of which the last one writes the results, and of the copies. ``start``: bytes of the workspace
    that ``sort`` takes."""
    results = copied(desc)
    if not results:
        return sort(desc)
    *first, last = sort(desc.replace(layouts={**dict(desc.layouts), **{o.name: PACKED for o in results}}))
    copies, held = [], dict(last.args)
    for o in results:
        held[o.name] = packed = Scratch(start, _held(o))
        copies.append(_copy(o, packed))
        start += padded_bytes(o.numel * packed.element.itemsize)
    return [*first, replace(last, args=held), *copies]


def _copy(o: Operand, source: Scratch) -> Launch:
    rows, columns = o.shape
    side = SIDE_OF_BYTES if o.element.itemsize == 1 else SIDE
    high, wide = min(ceil_power(rows), side), min(ceil_power(columns), side)
    if min(high, wide) < SIDE:  # few rows or columns
        high, wide = min(ceil_power(rows), ELEMENTS // wide), min(ceil_power(columns), ELEMENTS // high)
    return Launch(
        matrix_copy_kernel,
        -(-rows // high) * -(-columns // wide),
        {
            "source": source,
            "out": bits(o),
            "rows": _extent(rows),
            "source_columns": _extent(columns),
            "out_columns": _extent(columns),
            "source_m": replace(_extent(columns), wide=True),
            "source_batch": None,
            "out_n": stride_arg(o, known_strides(o, 2)[1]),
            "out_batch": None,
            "sizes": None,
        },
        {"source_n": 1, "out_m": 1, "ROWS": high, "COLUMNS": wide},
        num_warps=WARPS,
    )


def _extent(n: int) -> Int:
    return Int(n, n >= I32_LIMIT, power_of_two_in(n))
