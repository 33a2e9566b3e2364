"""Copies that are gathers and scatters: index_copy, index_fill, take_along_dim and masked_scatter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from triplan.facade import GatherPlan
from triplan.functional import _plans
from triplan.functional._forward import Linearity
from triplan.functional._ops import Op
from triplan.functional._plans import run
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import at_least_1d, axis, broadcast, check_same_device, require
from triplan.functional._sharding import reshaped
from triplan.functional._watching import needs_grad, transformed
from triplan.functional.indexing.gather import _filled, _gather, _gather_backward, gather
from triplan.functional.indexing.reduce import _scatter
from triplan.functional.indexing.select import check_vector

__all__ = ["index_copy", "index_copy_", "index_fill", "index_fill_"]
__all__ += ["masked_scatter", "masked_scatter_", "take_along_dim"]

Tensor = torch.Tensor


def _spread(input: Tensor, dim: int, index: Tensor) -> Tensor:
    """A vector ``index`` as the index of every slice of ``input`` along ``dim``; it stores each position once."""
    if input.dim() == 0:
        return index.reshape(())
    shape = [1] * input.dim()
    shape[dim] = index.numel()
    whole = list(input.shape)
    whole[dim] = index.numel()
    return index.reshape(shape).expand(whole)


def _copied(input: Tensor, dim: int, index: Tensor, source: Tensor) -> tuple[int, Tensor, Tensor]:
    """Axis, index and source of the scatter that is ``index_copy``."""
    check_vector("index_copy", index)
    dim = axis(dim, input.dim())
    expected = list(input.shape)
    expected[dim : dim + 1] = [index.numel()] if expected else []
    if source.dim() == 0 and input.dim() == 1:
        source = at_least_1d(source)
    require(
        list(source.shape) == expected and (input.dim() > 0 or index.numel() == 1),
        lambda: f"index_copy(): source is {list(source.shape)}; {expected} is expected for {index.numel()} indices",
    )
    return dim, _spread(input, dim, index), source


@replayed
def index_copy(
    input: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    *,
    out: Tensor | None = None,
    check_indices: bool = False,
) -> Tensor:
    """``input`` with ``out[..., index[j], ...] = source[..., j, ...]`` along ``dim`` (torch.index_copy).

    ``index``: i32 or i64, a vector as long as ``source`` is along ``dim``; off that axis ``source`` has the shape of
    ``input``. Differentiable in ``input`` and ``source``. Repeated and bad indices are as in ``scatter``.
    """
    return _scatter.into(out, input, *_copied(input, dim, index, source), check_indices, False)


@replayed
def index_copy_(input: Tensor, dim: int, index: Tensor, source: Tensor, *, check_indices: bool = False) -> Tensor:
    """``index_copy`` into ``input`` itself, which is returned. Raises as ``scatter_add_`` does."""
    return _scatter.in_place(input, *_copied(input, dim, index, source), check_indices, False)


def _written(input: Tensor, dim: int, index: Tensor, value: Tensor | float) -> tuple[int, Tensor, Tensor]:
    """Axis, index and source of the scatter that is ``index_fill``; each of the latter stores few elements."""
    check_vector("index_fill", index)
    if isinstance(value, Tensor) and value.dim():
        raise RuntimeError(
            f"index_fill(): only supports a 0-dimensional value tensor, but got {value.dim()} dimensions"
        )
    dim = axis(dim, input.dim())
    at = _spread(at_least_1d(input), dim, index.reshape(-1))
    return dim, at, value.to(input).expand(at.shape) if isinstance(value, Tensor) else _filled(input, value, at)


@replayed
def index_fill(input: Tensor, dim: int, index: Tensor, value: Tensor | float, *, check_indices: bool = False) -> Tensor:
    """``input`` with ``out[..., index[j], ...] = value`` along ``dim`` (torch.index_fill).

    ``index``: i32 or i64, a vector or 0-d; negative ones count from the end. ``value``: a number or a 0-d tensor.
    Differentiable in ``input`` and ``value``. Bad indices are as in ``scatter``.
    """
    dim, at, source = _written(input, dim, index, value)
    whole = at_least_1d(input)
    if isinstance(value, Tensor) and (needs_grad((value,)) or transformed()):
        # Not a scatter of ``value``: where an index repeats, the gradient of ``value`` counts it once.
        mask = whole.new_zeros(whole.shape, dtype=torch.bool)
        filled = _scatter(mask, dim, at, _filled(mask, True, at), check_indices, True)
        return torch.where(filled, value.to(input), whole).reshape(input.shape)
    return _scatter(whole, dim, at, source, check_indices, True).reshape(input.shape)


@replayed
def index_fill_(
    input: Tensor, dim: int, index: Tensor, value: Tensor | float, *, check_indices: bool = False
) -> Tensor:
    """``index_fill`` into ``input`` itself, which is returned. Raises as ``scatter_add_`` does."""
    if isinstance(value, Tensor) and (needs_grad((value,)) or transformed()):
        return input.copy_(index_fill(input, dim, index, value, check_indices=check_indices))
    _scatter.in_place(at_least_1d(input), *_written(input, dim, index, value), check_indices, True)
    return input


@replayed
def take_along_dim(
    input: Tensor,
    indices: Tensor,
    dim: int | None = None,
    *,
    out: Tensor | None = None,
    check_indices: bool = False,
) -> Tensor:
    """``gather`` along ``dim`` of two tensors that are broadcast off it; without ``dim``, of both flattened
    (torch.take_along_dim).

    ``indices``: i32 or i64, of the rank of ``input``; with ``dim``, negative ones count from the end. Differentiable in
    ``input``. Raises as ``gather`` does.
    """
    if dim is None:
        return gather(input.reshape(-1), 0, indices.reshape(-1), out=out, check_indices=check_indices)
    require(
        input.dim() == indices.dim(),
        lambda: (
            "take_along_dim(): input and indices should have the same number of dimensions, but got "
            f"{input.dim()} dimensions for input, and {indices.dim()} dimensions for indices"
        ),
    )
    dim = axis(dim, input.dim())
    before = broadcast(input.shape[:dim], indices.shape[:dim])
    behind = broadcast(input.shape[dim + 1 :], indices.shape[dim + 1 :])
    table, at = (t.expand((*before, *t.shape[dim : dim + 1], *behind)) for t in (input, indices))
    return _gather.into(out, table, dim, at, check_indices, True)


def _masked_shape(input: Tensor, mask: Tensor, source: Tensor) -> Sequence[int]:
    check_same_device("masked_scatter", input, mask, source)
    if mask.dtype != torch.bool or source.dtype != input.dtype:
        raise RuntimeError(
            f"masked_scatter(): expected a bool mask and a source of {input.dtype}, got {mask.dtype} and {source.dtype}"
        )
    return broadcast(input.shape, mask.shape)


def _masked_update(out: Tensor, mask: Tensor, source: Tensor) -> None:
    if source.numel() >= out.numel():  # torch's kernel reads beyond a source that is too short
        out.masked_scatter_(mask, source)
        return
    places, front = _places(mask.expand(out.shape))
    values = torch.cat([source.new_zeros(front), source.reshape(-1)]) if front else source.reshape(-1)
    read = torch.empty(places.shape, dtype=out.dtype, device=out.device)
    run(GatherPlan, {"src": values, "index": places, "out": read}, gather_dim=0)
    torch.where(mask, read.reshape(out.shape), out, out=out)


def _places(mask: Tensor) -> tuple[Tensor, int]:
    """For each element of ``mask``, a vector: where what is written there if it is true is in the source.

    That is after so many more elements in front: one where bad indices raise, for what is not chosen to read.
    """
    chosen = reshaped(mask, (-1,))
    count = chosen.cumsum(0)
    return (torch.where(chosen, count, 0), 1) if _plans.always_checks(mask.device) else (count.sub_(1), 0)


def _masked_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, mask, source = inputs
    ctx.save_for_backward(mask)
    ctx.shape = source.shape


def _masked_grad(ctx: Any, grad: Tensor) -> Any:
    to_input, _, to_source = ctx.needs_input_grad
    (mask,) = ctx.saved_tensors
    read = None
    if to_source:
        places, front = _places(mask.expand(grad.shape))
        chosen, size = reshaped(torch.where(mask, grad, 0), (-1,)), front + math.prod(ctx.shape)
        read = _gather_backward(chosen, 0, places, (size,), False)[front:].reshape(ctx.shape)
    return torch.where(mask, 0, grad) if to_input else None, None, read


_masked_scatter = Op(
    "masked_scatter",
    "Tensor input, Tensor mask, Tensor source",
    axes=None,  # values choose where elements are written
    shape=_masked_shape,
    update=_masked_update,
    setup=_masked_setup,
    backward=_masked_grad,
    linearity=Linearity((0, 2)),
)


@replayed
def masked_scatter(input: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """``input`` with the elements of ``source``, in order, where ``mask`` is true (torch.masked_scatter).

    ``mask``: bool; it and ``input`` are broadcast together. ``source``: of the dtype of ``input``. Differentiable in
    ``input`` and ``source``. Never synchronises: if ``source`` has too few elements, the call raises ``IndexError`` on
    the CPU, and writes 0 on CUDA. The kernel is torch's where ``source`` has as many elements as the result.
    """
    return _masked_scatter(input.expand(_masked_shape(input, mask, source)), mask, source)


@replayed
def masked_scatter_(input: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """``masked_scatter`` into ``input`` itself, which is returned; ``mask`` is broadcast to its shape."""
    return _masked_scatter.in_place(input, mask.expand(input.shape), source)
