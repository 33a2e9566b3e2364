"""Tensors of one number, or of numbers in a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from triplan.facade import ArangePlan, FillPlan
from triplan.functional._ops import Op
from triplan.functional._plans import run
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import plain_number
from triplan.functional._sharding import unsummed
from triplan.functional.copies.conversions import overwrite
from triplan.functional.copies.engine import MAX_RANK, Number, Tensor, as_bits, check_fillable, known, number

__all__ = ["arange", "fill_", "full", "full_like", "ones", "ones_like", "zero_", "zeros", "zeros_like"]


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
    axes="* -> *",
    shape=_fill_shape,
    update=_fill,
    setup=lambda ctx, inputs, output: None,
    backward=lambda ctx, g: (torch.zeros_like(g), None),
)


def _empty(
    input: Tensor, dtype: torch.dtype | None, device: torch.device | str | None, memory_format: torch.memory_format
) -> Tensor:
    return unsummed(torch.empty_like(input.detach(), dtype=dtype, device=device, memory_format=memory_format))  # type: ignore[no-any-return]


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


# --- without a tensor: nothing to replay ---


def _created(
    size: Sequence[int], value: Number, dtype: torch.dtype | None, device: torch.device | str | None, grad: bool
) -> Tensor:
    found = torch.empty(size, dtype=dtype, device=device)
    return _filled.in_place(found, value).requires_grad_(grad)


def full(
    size: Sequence[int],
    fill_value: Number,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """A tensor of shape ``size``, all elements ``fill_value``, whose type is the default: as ``torch.full``."""
    fill_value = plain_number(fill_value)
    if out is not None:
        if dtype not in (None, out.dtype) or requires_grad:
            raise RuntimeError(f"full(): out has {out.dtype}, and gets no gradient")
        return _filled.in_place(out if out.shape == tuple(size) else out.resize_(tuple(size)), fill_value)
    default = torch.bool if isinstance(fill_value, bool) else torch.int64 if isinstance(fill_value, int) else None
    return _created(tuple(size), fill_value, dtype or default, device, requires_grad)


def zeros(
    *size: int | Sequence[int],
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """A tensor of shape ``size``, all elements 0: as ``torch.zeros``."""
    return full(_size(size), 0.0, out=out, dtype=dtype, device=device, requires_grad=requires_grad)


def ones(
    *size: int | Sequence[int],
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """A tensor of shape ``size``, all elements 1: as ``torch.ones``."""
    return full(_size(size), 1.0, out=out, dtype=dtype, device=device, requires_grad=requires_grad)


def _size(size: Sequence[Any]) -> Sequence[int]:
    return size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size


def _count(out: Tensor, start: Number, step: Number) -> None:
    scalars = {"start": start, "step": step}
    run(ArangePlan, {"out": out}, scalars=scalars)


def _countable(target: Tensor, start: Number, step: Number) -> Sequence[int]:
    check_fillable("arange", target.dtype)
    if not known(target.dtype):
        raise NotImplementedError(f"arange(): {target.dtype} is not supported")
    return target.shape


_counted = Op(
    "arange",
    "Tensor target, Scalar start, Scalar step",
    axes=None,  # writes the number of an element among all
    shape=_countable,
    update=_count,
    setup=lambda ctx, inputs, output: None,
    backward=lambda ctx, g: (torch.zeros_like(g), None, None),
)


def arange(
    start: Number,
    end: Number | None = None,
    step: Number = 1,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """``start + i * step`` for each i >= 0 where that is before ``end``: as ``torch.arange``.

    With one argument it is the end. Floats are computed in f64 and rounded once. Raises ``RuntimeError`` where ``step``
    is 0 or leads away from ``end``.
    """
    start, end = (0, start) if end is None else (start, end)
    start, end, step = map(plain_number, (start, end, step))
    if step == 0:
        raise RuntimeError("step must be nonzero")
    if (end - start) * step < 0:
        raise RuntimeError("upper bound and lower bound inconsistent with step sign")
    if out is None and dtype is None and not any(isinstance(v, float) for v in (start, end, step)):
        dtype = torch.int64
    found = torch.empty(0, dtype=dtype, device=device) if out is None else out
    if found.dtype is torch.int64:  # which torch counts in integers, and others in doubles
        start, end, step = int(start), int(end), int(step)
    whole = all(isinstance(v, int) for v in (start, end, step))
    count = -int((start - end) // step) if whole else math.ceil((end - start) / step)
    kind = float if found.dtype.is_floating_point else int
    if found.shape != (count,):
        found = torch.empty(count, dtype=dtype, device=device) if out is None else out.resize_(count)
    return _counted.in_place(found, kind(start), kind(step)).requires_grad_(requires_grad)
