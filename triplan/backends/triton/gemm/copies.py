"""Copies of matrices in the workspace, where they lie as a kernel needs them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch
from triplan.backends.triton.common.card import OVERLAPPED_LAUNCH_US
from triplan.backends.triton.common.offsets import bits, padded_bytes
from triplan.backends.triton.gemm import copies_kernels as kernels
from triplan.backends.triton.gemm.arguments import extent, matrix_strides
from triplan.backends.triton.gemm.matrices import vector_elements
from triplan.descriptors import Layout, Operand

#: Rows and columns of a copy per program: 32 elements per thread. Columns lie along the copy's unit-stride axis.
ROWS, COLUMNS = 32, 128
#: Bytes per microsecond that a copy reads and writes: 464 MB of 16-bit elements with odd rows in 196 us on an H200.
COPY_BYTES_PER_US = 2.3e6


class Copy(NamedTuple):
    """An operand, and the axis (0 or 1) of each of its matrices along which the copy is contiguous. The other axis's
    stride is rounded up to a multiple of 16 bytes."""

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
        width = vector_elements(self.operand.element.itemsize)
        return -(-self.columns // width) * width

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
        return Layout.strided(
            unit_axis=len(self.operand.shape) - 2 + self.unit,
            alignment=16,
            stride_multiple=vector_elements(self.operand.element.itemsize),
        )

    @property
    def programs(self) -> int:
        return math.prod(self.operand.shape[:-2]) * -(-self.rows // ROWS) * -(-self.columns // COLUMNS)

    @property
    def cost_us(self) -> float:
        """Estimated microseconds."""
        return OVERLAPPED_LAUNCH_US + 2 * self.operand.nbytes / COPY_BYTES_PER_US

    def launch(self, offset: int) -> Launch:
        """Of an input into the workspace, with zeros behind each row; or of an output out of it."""
        o, itemsize = self.operand, self.operand.element.itemsize
        own, other = ("out", "source") if o.is_written else ("source", "out")
        names = "nm" if self.unit == 0 else "mn"  # the kernel's rows lie along the copy's unit-stride axis
        args, known = matrix_strides(o, [f"{own}_{names[0]}", f"{own}_{names[1]}", f"{own}_batch"])
        vectors = vector_elements(itemsize)
        found: dict[str, Arg] = {
            own: bits(o),
            other: Scratch(offset, o.element.bits),
            "rows": extent(self.rows, itemsize),
            f"{own}_columns": extent(self.columns, itemsize),
            f"{other}_columns": extent(self.leading, itemsize),
            **args,
            f"{other}_m": Int(self.leading, wide=True, divisibility=vectors),
            f"{other}_batch": Int(self.strides[0], wide=True, divisibility=vectors) if len(o.shape) > 2 else None,
        }
        constants = {**known, f"{other}_n": 1, "ROWS": ROWS, "COLUMNS": COLUMNS}
        return Launch(kernels.matrix_copy_kernel, self.programs, found, constants, overlaps=True)


def offsets(copies: Sequence[Copy]) -> dict[str, int]:
    """By operand, where each copy begins in the workspace."""
    found, end = {}, 0
    for copy in copies:
        found[copy.operand.name] = end
        end += padded_bytes(copy.nbytes)
    return found


def workspace_bytes(copies: Sequence[Copy]) -> int:
    """Of all copies."""
    return sum(padded_bytes(copy.nbytes) for copy in copies)
