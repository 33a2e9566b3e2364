"""Sums of which each rank holds a term, added in the order of the ranks where torch is to be deterministic.

all_reduce and reduce_scatter add in an order of their own, which may depend on the size of a message and on the links
between ranks. A ``Sum`` is added up from rank 0 on: for one number of ranks its bits are the same in every run. Of N
ranks, each receives N - 1 whole terms for that, where all_reduce moves 2 (N - 1) / N of one, and holds N terms while it
adds. A term that meets an op of torch that adds or scales is summed first, while torch may add terms and sum once.
"""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor, Partial


def in_order(terms: Tensor) -> Tensor:
    """The sum over the first axis, in order: of f16 and bf16 in f32, rounded once."""
    total = terms[0].float() if terms.dtype in (torch.float16, torch.bfloat16) else terms[0].clone()
    for term in terms[1:]:
        total += term
    return total.to(terms.dtype)


def gathered(t: Tensor, mesh: Any, mesh_dim: int) -> Tensor:
    """The tensors of all ranks along an axis of the mesh, in their order, with an axis in front."""
    count = mesh.size(mesh_dim)
    found = t.new_empty(count * t.numel())  # flat: gloo takes no axis in front
    # Not reshape, which leaves the stride of a vector: NCCL takes none.
    distributed.all_gather_into_tensor(found, t.contiguous().view(-1), group=mesh.get_group(mesh_dim))
    return found.view(count, *t.shape)


class Sum(Partial):
    """The placement of a tensor that is the sum of those of all ranks, in their order. No other placement equals it."""

    def __init__(self) -> None:
        super().__init__("sum")

    def _reduce_value(self, tensor: Tensor, mesh: Any, mesh_dim: int) -> Tensor:
        return in_order(gathered(tensor, mesh, mesh_dim))

    def _reduce_shard_value(self, tensor: Tensor, mesh: Any, mesh_dim: int, shard_spec: Any) -> Tensor:
        whole, at = self._reduce_value(tensor, mesh, mesh_dim), mesh.get_local_rank(mesh_dim)
        parts = whole.chunk(mesh.size(mesh_dim), shard_spec.dim)
        return parts[at].contiguous() if at < len(parts) else whole.narrow(shard_spec.dim, 0, 0)

    def _partition_value(self, tensor: Tensor, mesh: Any, mesh_dim: int) -> Tensor:
        """Rank 0 has the value, others zeros: torch divides it by the number of ranks, which may round."""
        return tensor if mesh.get_local_rank(mesh_dim) == 0 else torch.zeros_like(tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sum)

    def __hash__(self) -> int:
        return hash(Sum)


def ordered(result: Any) -> Any:
    """``result``, which an op on DTensors has just made: its sums over ranks will be taken in order."""
    if isinstance(result, tuple):
        return tuple(map(ordered, result))
    if isinstance(result, DTensor) and Partial("sum") in result.placements:
        result._spec = _ordered_spec(result._spec)  # from_local would take longer than the op
    return result


@lru_cache(maxsize=256)
def _ordered_spec(spec: Any) -> Any:
    """A copy: torch keeps ``spec`` for the next call of the same shapes."""
    found = copy(spec)
    found.placements = tuple(Sum() if p == Partial("sum") else p for p in spec.placements)
    return found
