"""Packed copies of operands in the workspace, which TMA can map, with rows of a width that it can read and write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from triplan.backends.runtime.launch import Arg, Copy, Int, Launch, Scratch, Stride, power_of_two_in
from triplan.backends.triton.attention.copies_kernels import rows_copy_kernel
from triplan.backends.triton.attention.tma import VECTOR, unmappable
from triplan.backends.triton.common.copied import on_copies
from triplan.backends.triton.common.offsets import bits, ceil_power, padded_bytes
from triplan.descriptors import Operand, packed_strides
from triplan.descriptors.attention import AttendingDescriptor
from triplan.sku import SUPPORTED, Support
from triplan.sku.facts import fact

D = TypeVar("D", bound=AttendingDescriptor)
#: Elements of a copy per program, and columns at most. Untuned.
ELEMENTS, MOST_COLUMNS = 4096, 128
#: Bytes per microsecond that a copy reads and writes, by least squares over bench/results/anywhere-attention-*.
COPIED_BYTES_PER_US = 2.0e6
#: Microseconds of a copy besides: the next launch waits for its results. From 2 to 44 queries in
#: bench/results/anywhere-attention-*.
COPY_US = 1.8


class RowsCopy(NamedTuple):
    """A packed copy of an operand, (batch, row, head, ``columns``), or of lse, (batch, head, ``columns``)."""

    operand: Operand
    columns: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.operand.shape[:-1], self.columns)

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        return self.rows * self.columns * self.operand.element.itemsize

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns per program."""
        columns = min(ceil_power(self.columns), MOST_COLUMNS)
        return ELEMENTS // columns, columns

    @property
    def programs(self) -> int:
        rows, columns = self.block
        return -(-self.rows // rows) * -(-self.columns // columns)

    @property
    def cost_us(self) -> float:
        """Estimated microseconds."""
        return COPY_US + (self.operand.nbytes + self.nbytes) / COPIED_BYTES_PER_US

    def _strides(self) -> tuple[Arg, ...]:
        """Those of the operand, by the axes (batch, row, head, column), of lse (batch, -, head, column); the last None
        for 1."""
        o = self.operand
        last = len(o.shape) - 1
        found: list[Arg] = []
        for axis in range(last):
            if o.layout.packed:
                step = packed_strides(o.shape)[axis]
                found.append(Int(step, wide=True, divisibility=power_of_two_in(step)))
            else:
                found.append(Stride(o.name, axis, divisibility=o.layout.stride_multiple))
        if last == 2:
            found.insert(1, Int(0, wide=True))
        unit = o.layout.packed or o.layout.unit_axis == last
        return (*found, None if unit else Stride(o.name, last, divisibility=o.layout.stride_multiple))

    def launch(self, offset: int) -> Launch:
        """Of an input into the workspace, with zeros behind each row; or of an output out of it."""
        o = self.operand
        own, other = ("out", "source") if o.is_written else ("source", "out")
        middle, inner = (1, o.shape[1]) if len(o.shape) == 3 else o.shape[1:3]
        args: dict[str, Arg] = {
            own: bits(o),
            other: Scratch(offset, o.element.bits),
            f"{own}_strides": self._strides(),
            f"{other}_strides": (None,) * 4,
            "rows": Int(self.rows),
            "middle": Int(middle),
            "inner": Int(inner),
            f"{own}_columns": _extent(o.shape[-1]),
            f"{other}_columns": _extent(self.columns),
        }
        rows, columns = self.block
        turned = not o.layout.packed and o.layout.unit_axis != len(o.shape) - 1
        constants = {"ROWS": rows, "COLUMNS": columns, "TURNED": turned}
        return Launch(rows_copy_kernel, self.programs, args, constants, overlaps=True)


def _extent(n: int) -> Int:
    return Int(n, divisibility=power_of_two_in(n))


@fact
def moved(desc: AttendingDescriptor) -> tuple[RowsCopy, ...]:
    """Copies of the operands that the Hopper kernels cannot read and write as they lie."""
    found = []
    for o in desc.operands():
        if len(o.shape) == 4 and o.name != "mask" and unmappable(o):
            found.append(RowsCopy(o, _padded(o.shape[-1])))
        elif o.name == "lse" and not o.layout.packed:
            found.append(RowsCopy(o, o.shape[-1]))
    return tuple(found)


def _padded(width: int) -> int:
    return -(-width // VECTOR) * VECTOR


@fact
def inner(desc: D) -> D:
    """The problem on the copies: rows of zeros behind queries, keys and values change no score."""
    copied = {copy.operand.name for copy in moved(desc)}
    layouts = {name: kept for name, kept in dict(desc.layouts).items() if name not in copied}
    value_dim = None if desc.value_dim is None else _padded(desc.value_dim)
    return desc.replace(head_dim=_padded(desc.head_dim), value_dim=value_dim, layouts=layouts)


def supports(desc: AttendingDescriptor) -> Support:
    """Whether there is something to copy, and 32 bits count its rows."""
    if not moved(desc):
        return Support.no("TMA can map every operand as it lies")
    if (most := max(copy.rows for copy in moved(desc))) >= 2**31:
        return Support.no(f"{most} rows of a copy; it counts fewer than 2**31")
    return SUPPORTED


def workspace_bytes(desc: AttendingDescriptor) -> int:
    """Of all copies."""
    return sum(padded_bytes(copy.nbytes) for copy in moved(desc))


def cost_us(desc: AttendingDescriptor) -> float:
    """Estimated microseconds of all copies."""
    return sum(copy.cost_us for copy in moved(desc))


def around(desc: AttendingDescriptor, launches: Sequence[Launch]) -> list[Launch]:
    """``launches`` of ``inner``, on the copies: those of inputs before them, those of outputs after them. The launches'
    own workspace lies behind the copies."""
    placed: dict[str, Copy] = {}
    before: list[Launch] = []
    after: list[Launch] = []
    end = 0
    for copy in moved(desc):
        placed[copy.operand.name] = Copy(end, copy.shape, packed_strides(copy.shape))
        (after if copy.operand.is_written else before).append(copy.launch(end))
        end += padded_bytes(copy.nbytes)
    return [*before, *on_copies(launches, placed, end), *after]
