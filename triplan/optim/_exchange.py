"""From parts of matrices on each rank to whole ones on some, and the way back.

Of n matrices of one shape each of W ranks gets n / W whole ones, so that no work is done twice (as in Jordan et al.,
"Muon", 2024). Two all-to-alls of bytes move them, which round nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed as dist

import triplan.functional as F  # noqa: N812
from triplan.functional._sharding import is_dtensor
from triplan.optim._shards import local


class Whole:
    """Matrices of which this rank has all: nothing is exchanged."""

    def __init__(self, parts: Tensor) -> None:
        """``parts`` (matrices, rows, columns): this rank's of matrices of one shape, dtype and division."""
        self._parts = parts

    def wait(self) -> Tensor:
        """(matrices, rows, columns): the whole ones of this rank, perhaps none."""
        return self._parts

    def send(self, found: Tensor) -> None:
        """Begin the way back of what was made of them."""
        self._found = found

    def receive(self) -> list[Tensor]:
        """This rank's parts of what was sent, in the order of the matrices."""
        return list(self._found.unbind())


class Gathered(Whole):
    """Matrices that more than one axis of the mesh divides: every rank gets all of them, and makes the same of each."""

    def __init__(self, parts: Tensor, like: Sequence[Any]) -> None:
        from torch.distributed.tensor import DTensor

        whole = [
            DTensor.from_local(x, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()).full_tensor()
            for x, p in zip(parts.unbind(), like, strict=True)
        ]
        super().__init__(F.stack(whole))
        self._like = like

    def receive(self) -> list[Tensor]:
        from torch.distributed.tensor import DTensor, Replicate

        found = []
        for x, p in zip(self._found.unbind(), self._like, strict=True):
            copies = DTensor.from_local(x, p.device_mesh, [Replicate()] * p.device_mesh.ndim, run_check=False)
            found.append(local(copies.redistribute(p.device_mesh, p.placements)))
        return found


class Shared(Whole):
    """Matrices that one group of ranks divides along one axis, as fully_shard does: each gets some whole ones."""

    def __init__(self, parts: Tensor, group: Any, axis: int, extent: int, first: int) -> None:
        """``extent``: of the whole along ``axis``; ``first``: which rank the first matrix goes to."""
        ranks, self._rank, self._group, self._axis = dist.get_world_size(group), dist.get_rank(group), group, axis
        owners = [(first + i) % ranks for i in range(len(parts))]
        self._order = sorted(range(len(parts)), key=owners.__getitem__)
        self._counts = [owners.count(rank) for rank in range(ranks)]
        each = -(-extent // ranks)  # as torch.chunk divides
        self._extents = [min(each, max(extent - rank * each, 0)) for rank in range(ranks)]
        self._shape = parts.shape[1:]
        mine = [parts[i] for i in self._order]
        self._begin(F.stack(mine), self._sizes(self._counts, [self._extents[self._rank]] * ranks), self._given())

    def _given(self) -> list[int]:
        """Elements of this rank's matrices that each rank has."""
        return self._sizes([self._counts[self._rank]] * len(self._counts), self._extents)

    def _sizes(self, counts: list[int], extents: list[int]) -> list[int]:
        across = self._shape[1 - self._axis]
        return [count * extent * across for count, extent in zip(counts, extents, strict=True)]

    def _begin(self, sent: Tensor, give: list[int], take: list[int]) -> None:
        size, self._sent = sent.element_size(), sent.contiguous().view(-1)
        self._taken, self._take = self._sent.new_empty(sum(take)), take
        taken, sent = (x.view(torch.uint8) for x in (self._taken, self._sent))
        takes, gives = ([size * n for n in sizes] for sizes in (take, give))
        self._work: Any = dist.all_to_all_single(taken, sent, takes, gives, self._group, async_op=True)

    def _end(self) -> tuple[Tensor, ...]:
        self._work.wait()
        return torch.split(self._taken, self._take)

    def _view(self, t: Tensor, count: int, extent: int) -> Tensor:
        sides = (extent, self._shape[1]) if self._axis == 0 else (self._shape[0], extent)
        return t.view(count, *sides)

    def wait(self) -> Tensor:
        count = self._counts[self._rank]
        parts = [self._view(t, count, n) for t, n in zip(self._end(), self._extents, strict=True)]
        return F.cat(parts, 1 + self._axis)

    def send(self, found: Tensor) -> None:
        parts = [t.reshape(-1) for t in torch.split(found, self._extents, 1 + self._axis)]
        self._begin(F.cat(parts), self._given(), self._sizes(self._counts, [self._extents[self._rank]] * len(parts)))

    def receive(self) -> list[Tensor]:
        found: list[Any] = [None] * len(self._order)
        own = self._extents[self._rank]
        made = [x for t, n in zip(self._end(), self._counts, strict=True) for x in self._view(t, n, own).unbind()]
        for i, x in zip(self._order, made, strict=True):
            found[i] = x
        return found


def exchange(parts: Tensor, like: Sequence[Any], first: int) -> Whole:
    """Begin to put together ``parts`` of matrices, which are divided as ``like``."""
    if not is_dtensor(like[0]):
        return Whole(parts)
    mesh, placements = like[0].device_mesh, like[0].placements
    divides = [i for i, p in enumerate(placements) if not p.is_replicate() and mesh.size(i) > 1]
    if not divides:
        return Whole(parts)
    (at,) = divides if len(divides) == 1 else (-1,)
    if at < 0 or not placements[at].is_shard():
        return Gathered(parts, like)
    axis = placements[at].dim
    return Shared(parts, mesh.get_group(at), axis % 2, like[0].shape[axis], first)
