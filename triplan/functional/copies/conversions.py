"""Copies and conversions with autograd: the gradient of each is a copy, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from triplan.functional._ops import Op, Recorded
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import broadcast, check_same_device
from triplan.functional._sharding import reshaped
from triplan.functional.copies.engine import Tensor, write

__all__ = ["cast", "clone", "contiguous", "copy_", "expand_copy", "permute_copy", "t_copy", "tile", "transpose_copy"]


def _cast_kernel(x: Tensor, dtype: torch.dtype, memory_format: torch.memory_format) -> Tensor:
    out = torch.empty_like(x, dtype=dtype, memory_format=memory_format)
    write(out, x)
    return out


def _cast_fake(x: Tensor, dtype: torch.dtype, memory_format: torch.memory_format) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=memory_format)


def _keep_dtype(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.dtype = inputs[0].dtype


_cast = Recorded(
    "cast",
    "(Tensor x, ScalarType dtype, MemoryFormat memory_format) -> Tensor",
    _cast_kernel,
    _cast_fake,
    axes="* -> *",
    setup=_keep_dtype,
    backward=lambda ctx, g: (converted(g, ctx.dtype), None, None),
)


def converted(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t`` as ``dtype``; itself, if it has it."""
    found: Tensor = t if t.dtype == dtype else _cast(t, dtype, torch.preserve_format)
    return found


_contiguous = Op(
    "contiguous",
    "Tensor x",
    axes="* -> *",
    shape=lambda x: x.shape,
    fill=write,
    setup=lambda ctx, inputs, output: None,
    backward=lambda ctx, g: (g,),
)


def _copy_shape(target: Tensor, source: Tensor) -> Sequence[int]:
    check_same_device("copy_", target, source)
    if broadcast(target.shape, source.shape) != target.shape:
        raise RuntimeError(
            f"copy_(): output with shape {list(target.shape)} doesn't match the broadcast shape "
            f"{list(broadcast(target.shape, source.shape))}"
        )
    return target.shape


def _copy_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _keep_dtype(ctx, inputs[1:], output)
    ctx.shape = inputs[1].shape


overwrite = Op(
    "copy",
    "Tensor target, Tensor source",
    axes="*, * -> *",
    shape=_copy_shape,
    fill=lambda out, target, source: write(out, source),
    update=write,
    setup=_copy_setup,
    backward=lambda ctx, g: (torch.zeros_like(g), converted(g.sum_to_size(ctx.shape), ctx.dtype)),
)


@replayed
def copy_(input: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """Write ``src``, which broadcasts and is converted, into ``input``; returns it. As ``Tensor.copy_``, of one device.

    Differentiable in ``src``. Raises ``RuntimeError`` for other shapes and devices.
    """
    return overwrite.in_place(input, src)


@replayed
def clone(input: Tensor, *, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
    """A copy of ``input``, of any dtype, as ``torch.clone``."""
    return _cast(input, input.dtype, memory_format)  # type: ignore[no-any-return]


@replayed
def contiguous(input: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    """``input`` itself if it is contiguous, else a copy that is: as ``Tensor.contiguous``."""
    if input.is_contiguous(memory_format=memory_format):
        return input
    return _cast(input, input.dtype, memory_format)  # type: ignore[no-any-return]


@replayed
def cast(
    input: Tensor,
    dtype: torch.dtype,
    copy: bool = False,
    *,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Tensor:
    """``input`` as ``dtype``, as ``Tensor.to``: itself, unless the dtype differs or ``copy`` is set.

    Floats are rounded to nearest, or truncated if ``dtype`` is of integers; one that these cannot hold gives any value.
    """
    if input.dtype == dtype and not copy:
        return input
    return _cast(input, dtype, memory_format)  # type: ignore[no-any-return]


@replayed
def permute_copy(input: Tensor, dims: Sequence[int], *, out: Tensor | None = None) -> Tensor:
    """``input`` with its axes in the order ``dims``, contiguous: as ``torch.permute_copy``."""
    return _contiguous.into(out, input.permute(tuple(dims)))


@replayed
def transpose_copy(input: Tensor, dim0: int, dim1: int, *, out: Tensor | None = None) -> Tensor:
    """``input`` with two axes exchanged, contiguous: as ``torch.transpose_copy``."""
    return _contiguous.into(out, input.transpose(dim0, dim1))


@replayed
def t_copy(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The transpose of a matrix, contiguous: as ``torch.t_copy``."""
    return _contiguous.into(out, input.t())


@replayed
def expand_copy(input: Tensor, size: Sequence[int], *, implicit: bool = False, out: Tensor | None = None) -> Tensor:
    """``input`` broadcast to ``size``, contiguous: as ``torch.expand_copy``. Its gradient is a sum."""
    return _contiguous.into(out, input.expand(tuple(size)))


@replayed
def tile(input: Tensor, dims: Sequence[int]) -> Tensor:
    """``input`` repeated ``dims`` times along its axes, aligned at the last: as ``torch.tile``."""
    rank = max(len(dims), input.dim())
    counts = [1] * (rank - len(dims)) + list(dims)
    shape = [1] * (rank - input.dim()) + list(input.shape)
    pairs = input.reshape([n for size in shape for n in (1, size)])
    repeated = pairs.expand([n for pair in zip(counts, shape, strict=True) for n in pair])
    return reshaped(_contiguous(repeated), [r * n for r, n in zip(counts, shape, strict=True)])
