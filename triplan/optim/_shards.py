"""DTensors, of which each rank holds a part, as fully_shard makes parameters and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triplan.errors import InvalidProblem
from triplan.functional._sharding import is_dtensor


def is_replicated(t: Any) -> bool:
    """Whether several ranks hold copies of the same elements of a DTensor."""
    return is_dtensor(t) and any(p.is_replicate() and t.device_mesh.size(i) > 1 for i, p in enumerate(t.placements))


def local(t: Any) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    found: Tensor = t.to_local().detach() if is_dtensor(t) else t
    return found


def divided_alike(t: Any, like: Any) -> bool:
    """Whether each rank has the same part of both."""
    return not is_dtensor(like) or not is_dtensor(t) or t.placements == like.placements


def local_as(t: Any, like: Any) -> Tensor:
    """This rank's part of ``t``, divided as ``like`` is: ranks may have to exchange parts, or sum their terms first."""
    if not divided_alike(t, like):
        with torch.no_grad():
            t = t.redistribute(like.device_mesh, like.placements)
    return local(t)


def sum_terms(parameter: Any) -> None:
    """Let a gradient of which each rank has a term of a sum become that sum, divided as the parameter is."""
    grad = parameter.grad
    if is_dtensor(grad) and any(p.is_partial() for p in grad.placements):
        with torch.no_grad():
            parameter.grad = grad.redistribute(grad.device_mesh, parameter.placements)


def divided(t: Any) -> tuple[Any, ...]:
    """The groups of ranks between which the elements of ``t`` are divided. Raises if each rank has terms of a sum."""
    if not is_dtensor(t):
        return ()
    if any(p.is_partial() for p in t.placements):
        raise InvalidProblem(
            f"clipping of a DTensor of placements {t.placements}: ranks hold terms of a sum; redistribute() it to "
            "shards or replicas"
        )
    return tuple([t.device_mesh.get_group(i) for i, p in enumerate(t.placements) if not p.is_replicate()])


def join(norm: Tensor, order: float, groups: tuple[Any, ...]) -> None:
    """Replace the norm of a part (one element) by that of the parts of all ranks: in their order, so that the bits are
    the same in every run and on every rank."""
    if order <= 0:
        raise InvalidProblem(f"norm_type {order}: of DTensors, whose parts may be empty, it must be positive")
    for group in groups:
        found = [torch.empty_like(norm) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(found, norm, group=group)
        norm.copy_(torch.linalg.vector_norm(torch.cat(found), order))
