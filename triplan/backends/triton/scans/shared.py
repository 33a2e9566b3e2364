"""What all kernels of scans share: constants and guarantees."""

from __future__ import annotations

from typing import Any, ClassVar

from triplan.backends.runtime.launch import Arg, Int, Ptr
from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.offsets import I32_LIMIT
from triplan.backends.triton.common.rows_entries import Entry
from triplan.descriptors import CumprodBackwardDescriptor, Operand, ScanDescriptor
from triplan.sku import ElementKind, MathPrecision, PrecisionGuarantee, Target

#: The ops that also take integers.
SCANS = ("cumsum", "cumprod")
BACKWARD = ("cumprod_backward",)
#: Elements of a tile at most, so that a few f32 arrays of its size fit into registers. Untuned.
MOST = 4096
#: Microseconds of an element of a thread that is loaded by itself, by its bytes; backward and reversed twice as long.
#: From drawn problems on an H200.
ELEMENT_US = {2: 0.045, 4: 0.03, 8: 0.03}
#: Microseconds of an element of the backward where rows are read in vectors, by its bytes: it also reads the neighbour
#: of each of its elements, one by one. From drawn problems on an H200.
NEIGHBOURS_US = {2: 0.03, 4: 0.01, 8: 0.03}
#: Elements of contiguous rows that all programs scan in a microsecond, by the bytes of a compute element: forward
#: without vectors, reversed without vectors, reversed in vectors. Empty lanes of a tile count too. (Forward scans in
#: vectors are faster than memory.) From drawn problems on an H200.
SCANNED_PER_US = {4: (6.3e5, 4e5, 5.5e5), 8: (3.1e5, 1.45e5, 1.45e5)}
#: Elements of up to 4 bytes in a microsecond, of all programs, of crossed rows that are read along: instructions are
#: the limit. Of 8 bytes, half as many. From drawn problems on an H200.
ALONG_PER_US = 3.5e5
#: Elements of the backward that all programs scan in a microsecond, by their bytes. From drawn problems on an H200.
BACKWARD_PER_US = {2: 1.5e5, 4: 1.05e5, 8: 0.9e5}
#: Time of a program of the backward, relative to that of a scan. From drawn problems on an H200.
BACKWARD_PROGRAM = 1.2
#: Neighbours that a thread has of a row which begins between two vectors, of up to 16 bytes; and elements of the
#: shortest such tile. Untuned.
GROUP, GROUPED_FROM = 4, 128


class ScanEntry(Entry):
    desc: ScanDescriptor | CumprodBackwardDescriptor
    #: Of rows of few elements on an H200, drawn problems of ``bench anywhere``.
    program_us = 2.5
    #: Whether the compiler moves elements to other threads where it converts them.
    moves: ClassVar[bool] = True
    elements = (*Entry.elements, "i64")
    late = ("x", "dout", "out")  # each element is read once, by the launch that writes the results
    sku_version = 3  # bits of rows that begin between vectors, and whose results do not

    def __init__(self, desc: ScanDescriptor | CumprodBackwardDescriptor) -> None:
        super().__init__(desc)
        self.version = 2 if self.group() > 1 else 1

    def most(self) -> int:
        """Elements of a tile at most."""
        return MOST * 4 // self.compute.itemsize // (2 if self.backward else 1)

    def step_us(self) -> float:
        """Microseconds of a tile whose elements no vectors hold: a thread's are loaded and scanned one by one. (Rows of
        one element are not scanned.)"""
        each = self.tile.rows * self.tile.block / (32 * self.tile.warps) if self.tile.block > 1 else 0.0
        item = self.element.itemsize
        if self.rows.vectors:
            return NEIGHBOURS_US[item] * each if self.backward else 0.0
        way = 2 if self.backward or self.reversed() else 1
        return ELEMENT_US[item] * way * each / (2 if self.group() > 1 else 1)

    def reversed(self) -> bool:
        """Whether rows are scanned from their ends."""
        return bool(getattr(self.desc, "reverse", False))

    def scanned_us(self, held: float) -> float:
        """Microseconds, with their launch, of scans of tiles of ``held`` elements of one row each, if instructions are
        the limit."""
        singly = self.singly()
        if self.backward or not (singly or self.reversed()):
            return 0.0
        forward, reverse, in_vectors = SCANNED_PER_US[self.compute.itemsize]
        return held / (in_vectors if not singly else reverse if self.reversed() else forward)

    def writes_across(self) -> bool:
        """Whether rows are read along, and neighbouring results are adjacent."""
        return self.rows.crossed and not self.backward and self.rows.is_along(self.rows.operands[0])

    def singly(self) -> bool:
        """Whether results of contiguous rows are stored one by one."""
        return self.rows.unit and not self.stores(self.grouped_bytes())

    def stores(self, nbytes: int) -> bool:
        """Whether results are stored in vectors of ``nbytes``: each row begins at one, and consists of whole ones."""
        out = self.rows.operands[-1]
        return self.rows.n * self.element.itemsize % nbytes == 0 and not self.rows.begins_between(out, nbytes)

    def grouped_bytes(self) -> int:
        """Bytes of the neighbours that a thread has in a group."""
        return min(GROUP * self.element.itemsize, 16)

    def reducing_us(self, programs: int, nbytes: float, target: Target) -> float:
        return super().reducing_us(programs, nbytes, target) + self.step_us()

    def busy_us(self, programs: int, target: Target) -> float:
        return super().busy_us(programs, target) * (BACKWARD_PROGRAM if self.backward else 1.0)

    def constants(self) -> dict[str, Any]:
        scan = {"PRODUCT": int(self.desc.op == "cumprod"), "REVERSE": self.reversed()}
        return scan | {"GROUP": self.group()}

    def grouped(self) -> bool:
        """Whether rows are read that begin between two groups, whose elements stay with the threads that load them.

        (Results that are stored in vectors decide by themselves which thread has what.)
        """
        kept = (not self.moves or self.element is self.compute) and not (self.rows.unit and self.stores(16))
        return not self.backward and kept and self.rows.begins_between(self.rows.operands[0], self.grouped_bytes())

    def group(self) -> int:
        """Neighbours of a row that a thread loads one by one."""
        return min(GROUP, 16 // self.element.itemsize) if self.grouped() and self.tile.block >= GROUPED_FROM else 1

    def is_turned(self) -> bool:
        return False  # (No measurement says whether it would help.)

    def arguments(self) -> dict[str, Arg]:
        args = super().arguments()
        if self.group() == 1:
            return args
        args["n"] = Int(self.rows.n, self.rows.n >= I32_LIMIT)
        if self.rows.unit:
            # Nothing is promised of the results' addresses: of vectors of them, each masked element would be stored by
            # itself, and each sector be written once for each element that a thread has of it.
            out = self.rows.operands[-1]
            args["out"] = Ptr(out.name, out.element, out.element.itemsize)
        return args

    def invariant(self) -> bool:
        """Whether batch invariance is claimed."""
        return self.rows.invariant

    def depth(self) -> int:
        """Additions on the path of a term, at most. A tile has fewer than its number of elements, however its scan is
        divided among threads; each further tile adds one."""
        return self.tile.block + -(-self.rows.n // self.tile.block)

    def guaranteed(self, o: Operand) -> PrecisionGuarantee:
        """A term of a sum is rounded by ``depth`` additions. A product of k elements is rounded k - 1 times, however it
        is divided. A term of the backward is a product of at most n elements, and each time that runs are merged it is
        rounded by a product and an addition."""
        n, depth, batch = self.rows.n, self.depth(), self.invariant()
        if not self.element.is_floating_point:  # modulo 2**64 any order is right
            return bounds.guarantee(ElementKind.I64, bounds.EXACT, math_precision=MathPrecision.EXACT, batch=batch)
        relative, per_term = {"cumsum": (0, depth), "cumprod": (n, 1)}.get(self.desc.op, (1, n + 2 * depth))
        flushes = n + 2 * depth if self.backward else 0
        return bounds.rounded(o.element, self.compute, relative, per_term, flushes=flushes, batch=batch)

    def numerics(self) -> str | None:
        found = super().numerics() if self.invariant() else None
        return f"{found}.reverse" if found and self.reversed() else found
