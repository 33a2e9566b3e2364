"""How the ranks of torchrun divide the model of ``gpt.py``: its parameters, or its layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


class RefusedError(Exception):
    """What was asked for cannot be done; the message says why."""


def ranks() -> tuple[int, int]:
    """This process's number, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def divide(model: Any, device: torch.device) -> None:
    """Let each rank hold a part of every parameter; a block's are put together while it computes."""
    mesh = init_device_mesh(device.type, (ranks()[1],))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)


def divide_layers(model: Any, device: torch.device) -> None:
    """Let each rank hold heads of attention, columns or rows of each layer, and a part of the vocabulary."""
    mesh, world = init_device_mesh(device.type, (ranks()[1],)), ranks()[1]
    columns, rows = ColwiseParallel(), RowwiseParallel()
    for block in model.blocks:
        if block.heads % world:
            raise RefusedError(f"--tp: {block.heads} heads cannot be divided between {world} ranks")
        for p in block.qkv.parameters():  # so that a rank's columns are those of whole heads
            p.data = of_heads(p.data, block.heads)
        block.by_heads = True
        parallelize_module(block, mesh, {"qkv": columns, "up": columns, "out": rows, "down": rows})
    parallelize_module(model, mesh, {"embedding": RowwiseParallel(input_layouts=Replicate())})


def of_heads(t: Tensor, heads: int) -> Tensor:
    """Rows of q, then k, then v, to those of each head; ``of_kinds`` is the inverse."""
    return t.reshape(3, heads, -1, *t.shape[1:]).transpose(0, 1).reshape(t.shape)


def of_kinds(t: Tensor, heads: int) -> Tensor:
    return t.reshape(heads, 3, -1, *t.shape[1:]).transpose(0, 1).reshape(t.shape)


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """DTensors and other tensors apart, where there are such."""
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for t in tensors:
        found[isinstance(t, DTensor)].append(t)
    return [kind for kind in found if kind]


def clip_grad_norm_(parameters: Iterable[Tensor], most: float) -> Tensor:
    """Torch's, of parameters of which some are DTensors, which torch does not take together."""
    kinds = by_kind(parameters)
    if len(kinds) == 1:
        return torch.nn.utils.clip_grad_norm_(kinds[0], most)
    norms = [whole(get_total_norm(p.grad for p in kind if p.grad is not None)) for kind in kinds]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    for kind in kinds:
        clip_grads_with_norm_(kind, most, norm)
    return norm


def whole(t: Any) -> Any:
    """What ranks hold parts of, put together, in tensors, dicts and lists."""
    if isinstance(t, DTensor):
        return t.full_tensor().detach()
    if isinstance(t, dict):
        return {name: whole(value) for name, value in t.items()}
    return [whole(value) for value in t] if isinstance(t, list) else t


def divided(t: Tensor, like: Tensor) -> Tensor:
    """The inverse of ``whole``, for a tensor of the shape of ``like``."""
    if not isinstance(like, DTensor) or t.shape != like.shape:
        return t
    return distribute_tensor(t.to(like.device), like.device_mesh, like.placements)
