"""Tables in the workspace, by which one launch covers tensors of any sizes that lie anywhere.

A plan's tables are the chunks, which follow from the sizes, and the addresses of the tensors, which the run's args say.
``facade/tables.py`` writes them; kernels read them with ``tables_kernels``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch

from triplan.backends.runtime.launch import Arg, Int, Ptr, Scratch
from triplan.backends.triton.common.offsets import ceil_power
from triplan.descriptors import Operand
from triplan.sku import SUPPORTED, ElementKind, Support, Target
from triplan.sku.facts import fact

#: A grid holds fewer programs, and the chunk table's entries are i32.
LIMIT = 2**31
#: Elements of one chunk at most: 64 KiB of f32. torch's fused optimizers have 65536 elements; smaller ones balance
#: better. Untuned.
CHUNK = 16384
#: Elements of one chunk at least: a vector or two for each thread. Untuned.
LEAST_CHUNK = 1024
#: Programs beyond which chunks grow: two waves on an H200 of 16 programs a multiprocessor. One number for all targets,
#: as the order of sums depends on it. Untuned.
PROGRAMS = 4224
#: Tensors whose sizes and addresses are arguments: a program would wait for tables before it could load an element, and
#: the host would write them. Of twelve tensors nothing was gained on an H200 by their chunks as arguments, and each
#: argument takes the host time.
FEW = 4
#: Programs up to which each has a copy of its tensor's size and addresses: it then waits for its tensor's number no
#: longer. More waves of programs hide that. Set by hand, from clipping on an H200, which gained within two waves.
COPIED = PROGRAMS
#: Blocks of a program, where that leaves few programs without any: those that run at a time then read and write few
#: pages of memory. Set by hand, from Adam of f32 on an H200.
BLOCKS = 2
#: Programs for each one that has elements, at most, where programs share chunks.
MOST_IDLE = 1.5


class Lists(Protocol):
    """A problem whose vectors Args may hold as lists of tensors of ``sizes`` elements."""

    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def streams(self) -> tuple[str, ...]: ...
    def operands(self) -> tuple[Operand, ...]: ...


def applies(desc: Lists, target: Target) -> Support:
    """Whether a kernel that walks tables takes the problem."""
    strided = [o.name for o in desc.operands() if o.is_tensor and not o.layout.packed]
    if strided:
        return Support.no(f"{', '.join(strided)} may be strided; it takes packed vectors and contiguous tensors")
    if chunks(desc.sizes) >= LIMIT:
        return Support.no(f"{chunks(desc.sizes)} chunks of {CHUNK} elements; a grid holds fewer than 2**31")
    return SUPPORTED


def chunk_of(sizes: Sequence[int]) -> int:
    """Elements of a chunk: few where the tensors together have few, so that all multiprocessors work."""
    total, chunk = sum(sizes), LEAST_CHUNK
    while chunk < CHUNK and total > PROGRAMS * chunk:
        chunk *= 4  # not 2: fewer binaries
    return chunk


def chunks(sizes: Sequence[int]) -> int:
    """How many chunks tensors of ``sizes`` elements have: as many programs."""
    chunk = chunk_of(sizes)
    return sum(-(-n // chunk) for n in sizes)


@fact
def parts_of(sizes: tuple[int, ...], part: int) -> int:
    """Programs that share a chunk, each of which has ``part`` elements; or 1."""
    parts = chunk_of(sizes) // part
    wanted = MOST_IDLE * sum(-(-n // part) for n in sizes)
    return parts if 0 < chunks(sizes) * parts < min(wanted, LIMIT) else 1


def chunk_table(sizes: Sequence[int], chunk: int) -> torch.Tensor:
    """i32 [2, programs] on the CPU: the tensor and the number of each chunk of ``chunk`` elements, in order.

    Each program has one chunk, so that a large tensor has many and an empty one none. Raises ``ValueError`` if there
    are 2**31 chunks or more.
    """
    counts = torch.tensor([-(-n // chunk) for n in sizes], dtype=torch.int64)
    total = int(counts.sum())
    if total >= LIMIT:
        raise ValueError(f"{total} chunks of {chunk} elements; a grid holds fewer than {LIMIT}")
    tensor = torch.repeat_interleave(torch.arange(len(counts)), counts)
    number = torch.arange(total) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return torch.stack((tensor, number)).to(torch.int32)


class Tables:
    """Where a plan's tables lie in the workspace: i64 sizes and i64 addresses [streams, tensors], i32 chunks.

    With COPIED programs or fewer, of more than FEW tensors, the addresses have one column for each program in place of
    each tensor, and lie behind i64 chunks [3, programs]: tensors, chunks' numbers in these, and the tensors' sizes. Of
    up to FEW tensors there are no tables.

    Attributes:
        is_few: whether there are no tables.
        columns: columns of the addresses.
    """

    def __init__(self, sizes: tuple[int, ...], streams: int) -> None:
        self._tensors, even = len(sizes), -(-len(sizes) // 2) * 2  # 16 bytes are a multiple of what each part has
        self._streams = streams
        self.chunk, self.programs = chunk_of(sizes), chunks(sizes)
        self.is_few = len(sizes) <= FEW
        self._is_copied = not self.is_few and 0 < self.programs <= COPIED
        if self.is_few:
            self.columns = self._chunks_at = self._addresses_at = self.nbytes = 0
        elif self._is_copied:
            self.columns = -(-self.programs // 2) * 2
            self._chunks_at = 8 * even
            self._addresses_at = self._chunks_at + 3 * 8 * self.columns
            self.nbytes = self._addresses_at + 8 * streams * self.columns
        else:
            self.columns = len(sizes)
            self._addresses_at = 8 * even
            self._chunks_at = self._addresses_at + 8 * (-(-streams * len(sizes) // 2) * 2)
            self.nbytes = self._chunks_at + 8 * self.programs

    def args(self, desc: Lists) -> dict[str, Arg]:
        """What ``chunk_of`` and ``address_of`` take."""
        if self.is_few:
            operands = {o.name: o for o in desc.operands()}
            sizes: list[Arg] = [Int(n, True) for n in desc.sizes]
            addresses = (_pointers(operands[name], len(desc.sizes)) for name in desc.streams)
            return {
                "chunks": None,
                "starts": _starts(desc.sizes) if len(sizes) > 1 else None,
                "sizes": _filled(sizes),
                "addresses": tuple(_filled(own) for own in addresses),
                "columns": None,
            }
        return {
            "chunks": Scratch(self._chunks_at, ElementKind.I64 if self._is_copied else ElementKind.I32),
            "starts": None,
            "sizes": Scratch(0, ElementKind.I64),
            "addresses": Scratch(self._addresses_at, ElementKind.I64),
            "columns": Int(self.columns),
        }

    def _copies(self, memory: torch.Tensor) -> torch.Tensor:
        """i64 [3 + streams, programs]."""
        found = memory[self._chunks_at : self.nbytes].view(torch.int64).view(3 + self._streams, self.columns)
        return found[:, : self.programs]

    def write(self, memory: torch.Tensor, sizes: tuple[int, ...], addresses: Sequence[Sequence[int]]) -> None:
        """Fill ``memory``, bytes on the CPU."""
        if self.is_few:
            return
        words = memory[: 8 * self._tensors].view(torch.int64)
        words.copy_(torch.tensor(sizes, dtype=torch.int64))
        given = torch.tensor(addresses, dtype=torch.int64).view(self._streams, self._tensors)
        if self._is_copied:
            copies, own = self._copies(memory), _copied_chunks(sizes)
            copies[:3].copy_(own)
            copies[3:].copy_(given[:, own[0]])
            return
        flat = memory[self._addresses_at : self._addresses_at + 8 * given.numel()].view(torch.int64)
        flat.view(self._streams, self._tensors).copy_(given)
        memory[self._chunks_at :].view(torch.int32).view(2, -1).copy_(_chunk_table(sizes))

    def fill(self, memory: torch.Tensor, sizes: tuple[int, ...], addresses: Sequence[Sequence[int]]) -> None:
        """The same by many tiny launches, whose parameters hold the values: a CUDA graph keeps these, and copies
        nothing from memory of the host."""
        if self.is_few:
            return
        words = memory[: self._chunks_at].view(torch.int64)
        done, first = 0, self._addresses_at // 8
        for i, n in enumerate(sizes):
            end = done + -(-n // self.chunk)
            words[i].fill_(n)
            if self._is_copied:
                copies = self._copies(memory)[:, done:end]
                torch.arange(end - done, out=copies[1])
                for row, value in enumerate((i, None, n, *(own[i] for own in addresses))):
                    if value is not None:
                        copies[row].fill_(value)
            else:
                for stream, own in enumerate(addresses):
                    words[first + stream * len(sizes) + i].fill_(own[i])
                tensor, number = memory[self._chunks_at :].view(torch.int32).view(2, -1)
                tensor[done:end].fill_(i)
                torch.arange(end - done, out=number[done:end])
            done = end


def _filled(given: list[Arg]) -> tuple[Arg, ...]:
    """``given``, and its last one again. Each length is a binary: they are rounded up."""
    return (*given, *given[-1:] * (ceil_power(len(given)) - len(given)))


def _pointers(o: Operand, count: int) -> list[Arg]:
    """The addresses of the tensors of a list, as integers of its width: a tensor lies anywhere."""
    return [Ptr(o.name, o.element.bits, o.element.itemsize, i) for i in range(count)]


def _starts(sizes: Sequence[int]) -> tuple[Arg, ...]:
    """For each tensor but the first, how many chunks lie before it."""
    chunk = chunk_of(sizes)
    before = [Int(n) for n in accumulate(-(-n // chunk) for n in sizes[:-1])]
    return (*before, *(Int(LIMIT - 1),) * (ceil_power(len(sizes)) - len(sizes)))


@fact
def _chunk_table(sizes: tuple[int, ...]) -> torch.Tensor:
    return chunk_table(sizes, chunk_of(sizes))


@fact
def _copied_chunks(sizes: tuple[int, ...]) -> torch.Tensor:
    """i64 [3, programs]: the tensor of each chunk, the chunk's number in it, and the tensor's size."""
    tensor, number = _chunk_table(sizes).long()
    return torch.stack((tensor, number, torch.tensor(sizes)[tensor]))


@fact
def tables(sizes: tuple[int, ...], streams: int) -> Tables:
    return Tables(sizes, streams)
