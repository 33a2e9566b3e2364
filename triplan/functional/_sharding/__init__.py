"""How registered ops compute on DTensors, whose elements are divided between ranks: by the axes that each op states.

Nothing is registered before the first DTensor is seen: importing torch's module of them takes half a second.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.nn import Parameter

from triplan.functional._sharding.axes import Axes
from triplan.functional._watching import tensors_in

#: Registered ops that DTensors do not reach yet, and what they state of their axes.
_WAITING: list[tuple[Any, Axes]] = []


def is_dtensor(t: Any) -> bool:
    """Whether ``t`` is a DTensor. There is none before its module is imported."""
    if type(t) in (Tensor, Parameter):  # what compiled code asks, too
        return False
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def any_dtensor(args: Sequence[Any]) -> bool:
    """Whether there is a DTensor among ``args``, lists of them included."""
    return any(map(is_dtensor, tensors_in(args)))


def dispatched(overload: Any, args: Sequence[Any]) -> Any:
    """``overload(*args)`` through torch's dispatcher."""
    if not any_dtensor(args):
        return overload(*args)
    make_known()
    result = overload(*args)
    if torch.are_deterministic_algorithms_enabled():
        from triplan.functional._sharding.sums import ordered

        result = ordered(result)
    return result


def announce(overload: Any, axes: Axes) -> None:
    """Remember that there is the registered op ``overload``, and its ``axes``."""
    _WAITING.append((overload, axes))


def make_known() -> bool:
    """Let DTensors reach all ops, wherever they are called from, if there are DTensors."""
    if _WAITING and "torch.distributed.tensor" in sys.modules:
        from triplan.functional._sharding.engine import register

        while _WAITING:
            register(*_WAITING.pop())
    return True


# Code that is compiled calls it while it is traced, as a constant. (torch's decorator would import its compiler.)
make_known._dynamo_marked_constant = True  # type: ignore[attr-defined]


def write(name: str, target: Any, result: Tensor) -> Tensor:
    """``target``, a DTensor or one that meets them, with the values of ``result``, divided as it is."""
    if is_dtensor(target) and any(p.is_partial() for p in target.placements):
        raise RuntimeError(
            f"{name}(): writes a DTensor of placements {target.placements}, of which each rank has terms of a sum: "
            "redistribute() it to shards or replicas first"
        )
    if target.shape != result.shape:
        raise RuntimeError(
            f"{name}(): the tensor to be written has shape {list(target.shape)}, but the result {list(result.shape)}; "
            "DTensors are not resized"
        )
    written: Tensor = target.copy_(result)
    return written


def copied(t: Tensor, like: Any) -> Tensor:
    """``t``, which every rank has made alike, so that it can meet ``like``: a DTensor if that is one."""
    if not is_dtensor(like) or is_dtensor(t):
        return t
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    return DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)


def of_first_rank(t: Tensor, like: Any) -> Tensor:
    """As ``copied``, of what ranks may have made differently: all get the first rank's."""
    if not is_dtensor(like):
        return t
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = like.device_mesh
    return distribute_tensor(t, mesh, [Replicate()] * mesh.ndim)


class _Local(Function):
    """``Tensor.to_local``, whose gradient has the strides of the whole: torch 2.11 derives them from a rank's part, and
    ranks of uneven parts then disagree on whether to copy it."""

    @staticmethod
    def forward(t: Any, placements: Any) -> Tensor:
        own: Tensor = t.to_local()
        return own.view_as(own)  # autograd will write to it

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        t, placements = inputs
        ctx.of = (t.device_mesh, placements or t.placements, t.shape, t.stride())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return joined(grad, *ctx.of), None


def local_part(t: Any, grad_placements: Sequence[Any] | None = None) -> Tensor:
    """This rank's part of a DTensor. The gradients of all parts have ``grad_placements``; by default those of ``t``."""
    apply: Any = _Local.apply  # untyped in torch
    found: Tensor = apply(t, grad_placements)
    return found


class Part(NamedTuple):
    """What this rank has of a DTensor: element 0 of ``local`` is element ``first`` of ``whole``, counted row-major."""

    local: Tensor
    first: int
    whole: list[int] | None
    of: Any

    def joined(self, local: Tensor) -> Tensor:
        """The DTensor of which this rank has ``local``."""
        return joined(local, self.of.device_mesh, self.of.placements, self.of.shape, self.of.stride())


def joined(
    local: Tensor, mesh: Any, placements: Sequence[Any], shape: Sequence[int], strides: Sequence[int] | None = None
) -> Tensor:
    """The DTensor of ``shape``, of which this rank has ``local``; by default contiguous."""
    from torch.distributed.tensor import DTensor

    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))] if strides is None else strides
    how: Any = {"run_check": False, "shape": torch.Size(shape), "stride": tuple(strides)}
    return DTensor.from_local(local, mesh, placements, **how)


def as_blocks(t: Any) -> Any:
    """``t``, of which every rank has a block or all: no terms of a sum, and no several pieces of an axis."""
    from torch.distributed.tensor import Replicate, Shard

    placements = [p if type(p) in (Replicate, Shard) else Replicate() for p in t.placements]
    return t if placements == list(t.placements) else t.redistribute(placements=placements)


def block(t: Any) -> tuple[Sequence[int], Sequence[int]]:
    """The shape of this rank's block of a DTensor, and where it begins along each axis."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    found: tuple[Sequence[int], Sequence[int]] = compute_local_shape_and_global_offset(
        t.shape, t.device_mesh, t.placements
    )
    return found


def part(t: Any, most: int) -> Part:
    """This rank's part of the DTensor ``t``. If that is no block, or has more than ``most`` axes, all of it."""
    t = all_of(t) if t.dim() > most else as_blocks(t)
    _, at = block(t)
    steps = [math.prod(t.shape[i + 1 :]) for i in range(t.dim())]
    whole = None if all(p.is_replicate() for p in t.placements) else list(t.shape)
    return Part(local_part(t), sum(n * s for n, s in zip(at, steps, strict=True)), whole, t)


def local_of(t: Any) -> Any:
    """This rank's part of a DTensor; anything else as it is."""
    return t.to_local() if is_dtensor(t) else t


def unsummed(t: Any) -> Any:
    """``t``, which has no values yet; in place of terms of a sum, each rank of a DTensor has a copy."""
    if not is_dtensor(t) or not any(p.is_partial() for p in t.placements):
        return t
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if p.is_partial() else p for p in t.placements]
    return joined(t.to_local(), t.device_mesh, placements, t.shape, t.stride())


def reshaped(t: Tensor, shape: Sequence[int]) -> Tensor:
    """``t.reshape(shape)``. Where torch cannot merge or split a divided axis of a DTensor, ranks get copies first."""
    if not is_dtensor(t):
        return t.reshape(shape)
    try:
        return t.reshape(shape)
    except RuntimeError:  # the same on every rank: torch decides it by the shape of the whole
        found = all_of(t)
        return copied(local_part(found).reshape(shape), found)  # whose strides may not be those of the whole


def all_of(t: Any) -> Any:
    """A DTensor of which every rank has all elements."""
    from torch.distributed.tensor import Replicate

    return t.redistribute(placements=[Replicate()] * t.device_mesh.ndim)


def divides(t: Any, axes: Sequence[int]) -> bool:
    """Whether ``t`` is a DTensor that is divided along one of ``axes``."""
    return is_dtensor(t) and any(p.is_shard() and p.dim in axes for p in t.placements)


def copies() -> Any:
    """The placement of what every rank has."""
    from torch.distributed.tensor import Replicate

    return Replicate()


def terms() -> Any:
    """The placement of a sum of which each rank has a term: added in order where torch is to be deterministic."""
    from torch.distributed.tensor import Partial

    from triplan.functional._sharding.sums import Sum

    return Sum() if torch.are_deterministic_algorithms_enabled() else Partial()
