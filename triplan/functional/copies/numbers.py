"""Tensors of one number."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triplan.facade import FillPlan
from triplan.functional._ops import Op
from triplan.functional._plans import run
from triplan.functional._replay.replay import replayed
from triplan.functional.copies.conversions import overwrite
from triplan.functional.copies.engine import MAX_RANK, Number, Tensor, as_bits, check_fillable, number

__all__ = ["fill_", "full_like", "ones_like", "zero_", "zeros_like"]


def _fill(out: Tensor, value: Number) -> None:
    if out.dim() > MAX_RANK:
        for part in out.unbind():
            _fill(part, value)
        return
    scalars = {"value": number(value, out.dtype)}
    run(FillPlan, {"out": as_bits(out if out.dim() else out.view(1))}, scalars=scalars)


def _fill_shape(target: Tensor, value: Number) -> Sequence[int]:
    check_fillable("fill_", target.dtype)
    return target.shape


_filled = Op(
    "fill",
    "Tensor target, Scalar value",
    shape=_fill_shape,
    update=_fill,
    setup=lambda ctx, inputs, output: None,
    backward=lambda ctx, g: (torch.zeros_like(g), None),
)


def _empty(
    input: Tensor, dtype: torch.dtype | None, device: torch.device | str | None, memory_format: torch.memory_format
) -> Tensor:
    return torch.empty_like(input.detach(), dtype=dtype, device=device, memory_format=memory_format)


@replayed
def fill_(input: Tensor, value: Number | Tensor) -> Tensor:
    """Write a number, or a tensor of one element, into all of ``input``; returns it. As ``Tensor.fill_``."""
    if isinstance(value, Tensor):
        if value.dim():
            raise RuntimeError(f"fill_ only supports 0-dimension value tensor but got tensor with {value.dim()} dims")
        return overwrite.in_place(input, value)
    return _filled.in_place(input, value)


@replayed
def zero_(input: Tensor) -> Tensor:
    """Write 0 into all of ``input``; returns it. As ``Tensor.zero_``."""
    return _filled.in_place(input, 0)


@replayed
def full_like(
    input: Tensor,
    fill_value: Number,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Tensor:
    """A tensor of ``input``'s shape, all elements ``fill_value``: as ``torch.full_like``."""
    return _filled.in_place(_empty(input, dtype, device, memory_format), fill_value)


@replayed
def zeros_like(
    input: Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Tensor:
    """A tensor of ``input``'s shape, all elements 0: as ``torch.zeros_like``."""
    return _filled.in_place(_empty(input, dtype, device, memory_format), 0)


@replayed
def ones_like(
    input: Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Tensor:
    """A tensor of ``input``'s shape, all elements 1: as ``torch.ones_like``."""
    return _filled.in_place(_empty(input, dtype, device, memory_format), 1)
