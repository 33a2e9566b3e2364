"""What all softmax kernels share: constants and guarantees."""

from __future__ import annotations

from typing import Any

from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.card import L2_BYTES, SECTOR
from triplan.backends.triton.common.rows_entries import Entry
from triplan.backends.triton.common.tiles import Tile, tile_of
from triplan.descriptors import Operand, packed_strides
from triplan.descriptors.softmax import AnySoftmaxDescriptor
from triplan.sku import PrecisionGuarantee

#: Elements of a tile of few rows at most.
MOST_FEW = 8192
#: Elements that a program has in a microsecond forward, of a tile of one row that it reads with gaps, but for as many.
#: (From drawn problems on an H200.)
GAPPED_EACH = 1000
OPS = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")


class SoftmaxEntry(Entry):
    desc: AnySoftmaxDescriptor
    version, along = 2, True
    program_us = 2.5  # from drawn problems on an H200, as of the norms
    #: How often sectors move that are written in part: they are read into the L2 cache, too.
    refilled = 2

    def few_rows(self, block: int) -> Tile | None:
        """The tile of all neighbours, ``block`` elements each, where they are adjacent but few."""
        rows = self.rows.beside()
        if not self.rows.across or rows == self.rows.neighbours or rows * block > MOST_FEW:
            return None
        return tile_of(rows, block, self.element.itemsize)

    def by_vectors(self) -> bool:
        """Whether tiles of several rows access all operands, but one at most, several elements at a time."""
        singly = [self.rows.vector_bytes(o) <= o.element.itemsize for o in self.rows.operands]
        return sum(singly) <= 1

    def gapped_us(self) -> float:
        """Microseconds in which a program reads a tile of one row with gaps."""
        read = all(o.is_written or self.rows.is_along(o) for o in self.rows.operands)
        return 0.0 if self.backward or read else max(self.tile.block - GAPPED_EACH, 0) / GAPPED_EACH

    def traffic(self) -> tuple[int, int]:
        """As of any rows; but the sum of log_softmax's backward has terms of ``dout`` alone."""
        every = sum(map(self.row_bytes, self.moved))
        read = [o for o in self.read_first if o.name == "dout" or self.desc.op != "log_softmax_backward"]
        first = sum(map(self.row_bytes, read))
        return first, every - first

    def row_bytes(self, o: Operand) -> int:
        """Bytes that move for one row of ``o``. Where all access is strided, these are of whole sectors, as far as the
        L2 cache does not hold the operands. Elements of a row are taken to be as near as the layout allows."""
        r, size = self.rows, o.element.itemsize
        if not r.is_strided() or r.flat or r.is_along(o) or r.axis in o.layout.zero_axes:
            return r.n * size
        if o.layout.packed:
            apart = packed_strides(o.shape)[r.axis]
        else:
            apart = 2 if o.layout.unit_axis is None else o.shape[o.layout.unit_axis]
        often = min(apart, SECTOR // size)
        often *= self.refilled if o.is_written and often > 1 else 1
        missed = 1.0 - min(L2_BYTES / max(sum(x.nbytes for x in r.operands), 1), 1.0)
        return round(r.n * size * (1.0 + (often - 1.0) * missed))

    def constants(self) -> dict[str, Any]:
        return {"LOG": self.desc.op.startswith("log_")}

    def guaranteed(self, o: Operand) -> PrecisionGuarantee:
        """A term of the sum is rounded by each addition on its path; in each block also by an exponential and a product
        where the sum is rescaled to a new maximum.

        The computed exp(-d) has its own error (2 ulp of ex2.approx, CUDA C Programming Guide) and that of its argument:
        one rounding each of x - max, of the product with log2(e) and of that constant, amplified by d; and d is at most
        ``MOST_EXPONENT``. The sum is of positive terms. In log_softmax the sum's error becomes absolute, of the size of
        the largest term: sum|terms| is 1.
        """
        additions = self.tile.additions(self.rows.n, each_block=6)
        exponential = 0 if self.desc.op == "softmax_backward" else 3 * bounds.MOST_EXPONENT[self.compute]
        error = additions + 16 + exponential
        # ex2.approx and products flush subnormals.
        batch = self.rows.invariant
        return bounds.rounded(o.element, self.compute, error, error, flushes=additions + 4, batch=batch)
