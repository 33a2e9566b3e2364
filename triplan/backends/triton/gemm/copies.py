"""Copies of matrices in the workspace, where they lie as a kernel needs them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from triplan.backends.runtime.launch import Arg, Copy, Int, Launch, Scratch
from triplan.backends.triton.common.card import BYTES_PER_US, COPIED_BYTES_PER_US, LINE_BYTES, OVERLAPPED_LAUNCH_US
from triplan.backends.triton.common.copied import on_copies
from triplan.backends.triton.common.copied_kernels import matrix_copy_kernel
from triplan.backends.triton.common.offsets import bits, divisor, padded_bytes
from triplan.backends.triton.common.tiles import fits_grid
from triplan.backends.triton.gemm.arguments import extent, matrix_strides
from triplan.backends.triton.gemm.matrices import unit_axis, vector_elements
from triplan.descriptors import Layout, Operand
from triplan.descriptors.gemm import MultiplyingDescriptor
from triplan.sku import Support

D = TypeVar("D", bound=MultiplyingDescriptor)
#: Rows and columns of a copy per program: 32 elements per thread. Columns lie along the copy's unit-stride axis.
ROWS, COLUMNS = 32, 128
#: The same where ``turned``.
TURNED_ROWS, TURNED_COLUMNS = 64, 64
#: The most that a layout can promise as ``stride_multiple``.
MOST_STRIDE_MULTIPLE = 16
#: Bytes per microsecond of a C that is copied out of the workspace: where its rows begin anywhere they are written one
#: element at a time; of a column-major one; and of one without unit stride. From 0.8 to 2.6 GB of 16-bit elements on
#: H100 and H200.
OUT_BYTES_PER_US, TURNED_OUT_BYTES_PER_US, STRAY_OUT_BYTES_PER_US = 2.0e6, 1.35e6, 0.75e6
#: The first of a C of at most so many bytes, about half of which the L2 cache holds. From 10 to 100 MB on an H200.
HELD_BYTES, HELD_OUT_BYTES_PER_US = 100 << 20, 2.3e6


class MatrixCopy(NamedTuple):
    """An operand, and the axis (0 or 1) of each of its matrices along which the copy is contiguous. The other axis's
    stride is rounded up to a multiple of 16 bytes, and of a line of the L2 cache where that adds at most an eighth:
    rows that begin between two lines are read more slowly."""

    operand: Operand
    unit: int

    @property
    def rows(self) -> int:
        """Extent of the axis that is not contiguous."""
        return self.operand.shape[-2:][1 - self.unit]

    @property
    def columns(self) -> int:
        """Extent of the contiguous axis."""
        return self.operand.shape[-2:][self.unit]

    @property
    def leading(self) -> int:
        """Elements from one row of the copy to the next."""
        width, line = vector_elements(self.operand.element.itemsize), LINE_BYTES // self.operand.element.itemsize
        least, whole = (-(-self.columns // n) * n for n in (width, line))
        return whole if 8 * (whole - least) <= least else least

    @property
    def strides(self) -> tuple[int, ...]:
        matrix = (1, self.leading) if self.unit == 0 else (self.leading, 1)
        return (self.rows * self.leading, *matrix) if len(self.operand.shape) > 2 else matrix

    @property
    def nbytes(self) -> int:
        o = self.operand
        return math.prod(o.shape[:-2]) * self.rows * self.leading * o.element.itemsize

    @property
    def layout(self) -> Layout:
        """What the copy promises."""
        multiple = vector_elements(self.operand.element.itemsize)
        return Layout.strided(
            unit_axis=len(self.operand.shape) - 2 + self.unit,
            alignment=16,
            stride_multiple=MOST_STRIDE_MULTIPLE if self.leading % MOST_STRIDE_MULTIPLE == 0 else multiple,
        )

    @property
    def turned(self) -> bool:
        """Whether the operand's unit-stride axis is the copy's other one."""
        return unit_axis(self.operand) == 1 - self.unit

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns per program."""
        return (TURNED_ROWS, TURNED_COLUMNS) if self.turned else (ROWS, COLUMNS)

    @property
    def programs(self) -> int:
        rows, columns = self.block
        return math.prod(self.operand.shape[:-2]) * -(-self.rows // rows) * -(-self.columns // columns)

    @property
    def cost_us(self) -> float:
        """Estimated microseconds."""
        along = self.operand.element.itemsize == 2 and not self.turned
        rate = BYTES_PER_US if along else COPIED_BYTES_PER_US
        if self.operand.is_written:
            stray = unit_axis(self.operand) is None
            rate = HELD_OUT_BYTES_PER_US if self.operand.nbytes <= HELD_BYTES else OUT_BYTES_PER_US
            rate = STRAY_OUT_BYTES_PER_US if stray else TURNED_OUT_BYTES_PER_US if self.turned else rate
        idle = max(self.block[1] / max(self.columns, 1), 1.0)  # programs of short rows take as long as of whole ones
        return OVERLAPPED_LAUNCH_US + 2 * idle * self.operand.nbytes / rate

    def launch(self, offset: int) -> Launch:
        """Of an input into the workspace, with zeros behind each row; or of an output out of it."""
        o, itemsize = self.operand, self.operand.element.itemsize
        own, other = ("out", "source") if o.is_written else ("source", "out")
        names = "nm" if self.unit == 0 else "mn"  # the kernel's rows lie along the copy's unit-stride axis
        args, known = matrix_strides(o, [f"{own}_{names[0]}", f"{own}_{names[1]}", "batch"])
        batch, vectors, several = args.pop("batch", Int(0, wide=True)), vector_elements(itemsize), len(o.shape) > 2
        known.pop("batch", None)
        found: dict[str, Arg] = {
            own: bits(o),
            other: Scratch(offset, o.element.bits),
            "rows": extent(self.rows, itemsize),
            f"{own}_columns": extent(self.columns, itemsize),
            f"{other}_columns": extent(self.leading, itemsize),
            **args,
            f"{other}_m": Int(self.leading, wide=True, divisibility=vectors),
            f"{own}_batch": (batch,) if several else None,
            f"{other}_batch": (Int(self.strides[0], wide=True, divisibility=vectors),) if several else None,
            "sizes": (divisor(o.shape[0], False),) if several else None,
        }
        rows, columns = self.block
        constants = {**known, f"{other}_n": 1, "ROWS": rows, "COLUMNS": columns}
        return Launch(matrix_copy_kernel, self.programs, found, constants, overlaps=True)


def counted(copies: Sequence[MatrixCopy]) -> Support:
    """Whether a grid can hold the programs of each copy."""
    return fits_grid(max((copy.programs for copy in copies), default=0))


def offsets(copies: Sequence[MatrixCopy]) -> dict[str, int]:
    """By operand, where each copy begins in the workspace."""
    found, end = {}, 0
    for copy in copies:
        found[copy.operand.name] = end
        end += padded_bytes(copy.nbytes)
    return found


def workspace_bytes(copies: Sequence[MatrixCopy]) -> int:
    """Of all copies."""
    return sum(padded_bytes(copy.nbytes) for copy in copies)


def of_copies(desc: D, copies: Sequence[MatrixCopy]) -> D:
    """The problem with copies in place of operands."""
    return desc.replace(layouts={**dict(desc.layouts), **{copy.operand.name: copy.layout for copy in copies}})


def around(copies: Sequence[MatrixCopy], launches: Sequence[Launch]) -> list[Launch]:
    """``launches`` of ``of_copies``, on the copies: those of inputs before them, that of an output after them. The
    launches' own workspace lies behind the copies."""
    begins = offsets(copies)
    placed = {c.operand.name: Copy(begins[c.operand.name], c.operand.shape, c.strides) for c in copies}
    inputs = [copy.launch(begins[copy.operand.name]) for copy in copies if not copy.operand.is_written]
    outputs = [copy.launch(begins[copy.operand.name]) for copy in copies if copy.operand.is_written]
    return [*inputs, *on_copies(launches, placed, workspace_bytes(copies)), *outputs]
