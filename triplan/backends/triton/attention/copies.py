"""Packed copies of operands in the workspace, which TMA can map, with rows of a width that it can read and write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

from triplan.backends.runtime.launch import Arg, Copy, Int, Launch, Scratch
from triplan.backends.triton.attention.tma import VECTOR, unmappable
from triplan.backends.triton.common.copied import on_copies
from triplan.backends.triton.common.copied_kernels import matrices_copy_kernel
from triplan.backends.triton.common.offsets import bits, ceil_power, divisible_extent, divisor, padded_bytes
from triplan.backends.triton.common.strides import Along, continues, known_strides, stride_arg
from triplan.backends.triton.common.tiles import fits_grid
from triplan.descriptors import Operand, packed_strides
from triplan.descriptors.attention import AttendingDescriptor
from triplan.sku import Support
from triplan.sku.facts import fact

D = TypeVar("D", bound=AttendingDescriptor)
#: Elements of a copy per program, and columns at most. Untuned.
ELEMENTS, MOST_COLUMNS = 4096, 128
#: Rows of a block that take as long as all that a program does besides. Untuned.
LEAST_ROWS = 16
#: Bytes per microsecond that a copy reads and writes, by least squares over bench/results/anywhere-attention-*.
COPIED_BYTES_PER_US = 2.0e6
#: Microseconds of a launch of copies besides: the next one waits for its results. From 2 to 44 queries in
#: bench/results/anywhere-attention-*, where each copy had its own launch.
COPY_US = 1.8
#: What each operand of such a launch adds. Untuned, rather too much: other kernels need no workspace.
OPERAND_US = 0.8


class Axis(NamedTuple):
    """An axis of an operand: its size, and its strides in the operand and in the copy."""

    size: int
    own: int | Along
    copy: int


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
    def _outer(self) -> list[Axis]:
        """All axes but the last one, merged where the operand's strides are known to allow it; at least one."""
        known, steps = known_strides(self.operand, len(self.shape)), packed_strides(self.shape)
        found: list[Axis] = []
        for axis in (Axis(*x) for x in zip(self.shape[:-1], known, steps, strict=False) if x[0] != 1):
            if found and continues((found[-1].own, found[-1].copy), (axis.own, axis.copy), axis.size):
                axis = axis._replace(size=found.pop().size * axis.size)
            found.append(axis)
        return found or [Axis(1, 0, 0)]

    @property
    def _plan(self) -> tuple[int, tuple[int, int]]:
        """(which of the outer axes has the rows of a block, rows and columns of a block).

        The axis along which the operand is contiguous, so that threads read and write neighbours; else the one that
        leaves the fewest lanes idle.
        """
        columns = min(ceil_power(self.columns), MOST_COLUMNS)
        outer = self._outer
        rows = [min(ceil_power(axis.size), ELEMENTS // columns) for axis in outer]

        def lanes(i: int) -> tuple[bool, int]:
            blocks = -(-outer[i].size // rows[i]) * (self.rows // max(outer[i].size, 1))
            return outer[i].own != 1, blocks * (rows[i] + LEAST_ROWS)

        best = min(reversed(range(len(outer))), key=lanes)
        return best, (rows[best], columns)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns per program."""
        return self._plan[1]

    @property
    def programs(self) -> int:
        at, (rows, columns) = self._plan
        size = self._outer[at].size
        return -(-size // rows) * -(-self.columns // columns) * (self.rows // max(size, 1))

    @property
    def cost_us(self) -> float:
        """Estimated microseconds."""
        return OPERAND_US + (self.operand.nbytes + self.nbytes) / COPIED_BYTES_PER_US

    def arguments(self, offset: int) -> dict[str, Arg]:
        """Of ``matrices_copy_kernel``: of an input into the workspace, with zeros behind each row, or of an output out
        of it."""
        o = self.operand
        own, other = ("out", "source") if o.is_written else ("source", "out")
        at, _ = self._plan
        outer = self._outer
        row, batch = outer.pop(at), outer[::-1]
        along = 1 if o.shape[-1] == 1 else known_strides(o, len(o.shape))[-1]
        return {
            own: bits(o),
            other: Scratch(offset, o.element.bits),
            "rows": divisible_extent(row.size),
            f"{own}_columns": divisible_extent(o.shape[-1]),
            f"{other}_columns": divisible_extent(self.columns),
            f"{own}_m": _stride(o, row.own),
            f"{own}_n": _stride(o, along),
            f"{other}_m": _stride(o, row.copy),
            f"{other}_n": None,
            f"{own}_batch": tuple(stride_arg(o, axis.own) for axis in batch) or None,
            f"{other}_batch": tuple(stride_arg(o, axis.copy) for axis in batch) or None,
            "sizes": tuple(divisor(axis.size, False) for axis in batch) or None,
            "programs": Int(self.programs),
        }


def launch(copies: Sequence[RowsCopy], offsets: Sequence[int]) -> Launch:
    """All ``copies``, which begin at ``offsets`` of the workspace."""
    each = [copy.arguments(offset) for copy, offset in zip(copies, offsets, strict=True)]
    rows, columns = zip(*(copy.block for copy in copies), strict=True)
    return Launch(
        matrices_copy_kernel,
        sum(copy.programs for copy in copies),
        {name: tuple(args[name] for args in each) for name in each[0]},
        {"ROWS": rows, "COLUMNS": columns},
        overlaps=True,
    )


def _stride(o: Operand, stride: int | Along) -> Arg:
    """None for 1."""
    return None if stride == 1 else stride_arg(o, stride)


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
    """Whether there is something to copy, and a grid holds the programs of all copies."""
    if not moved(desc):
        return Support.no("TMA can map every operand as it lies")
    return fits_grid(sum(copy.programs for copy in moved(desc)))


def workspace_bytes(desc: AttendingDescriptor) -> int:
    """Of all copies."""
    return sum(padded_bytes(copy.nbytes) for copy in moved(desc))


def cost_us(desc: AttendingDescriptor) -> float:
    """Estimated microseconds of all copies."""
    launches = len({copy.operand.is_written for copy in moved(desc)})
    return launches * COPY_US + sum(copy.cost_us for copy in moved(desc))


def around(desc: AttendingDescriptor, launches: Sequence[Launch]) -> list[Launch]:
    """``launches`` of ``inner``, on the copies: those of inputs before them, those of outputs after them. The launches'
    own workspace lies behind the copies."""
    copies = moved(desc)
    ends = [*accumulate((padded_bytes(copy.nbytes) for copy in copies), initial=0)]
    begins = dict(zip(copies, ends, strict=False))
    placed = {c.operand.name: Copy(at, c.shape, packed_strides(c.shape)) for c, at in begins.items()}
    found = on_copies(launches, placed, ends[-1])
    if before := [copy for copy in copies if not copy.operand.is_written]:
        found.insert(0, launch(before, [begins[copy] for copy in before]))
    if after := [copy for copy in copies if copy.operand.is_written]:
        found.append(launch(after, [begins[copy] for copy in after]))
    return found
