"""One index per element: gather and scatter_add, with torch's semantics.

The backward of gather adds to the elements that the forward read. The backward of scatter_add reads the elements that
the forward added to. Indices are i32 or i64. Where the index tensor is smaller than the other tensors off the axis,
these are narrowed to views. Ranks 0 to 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from triplan.facade import GatherBackwardPlan, GatherPlan, ScatterAddPlan
from triplan.functional._forward import Linearity
from triplan.functional._ops import Op, composed
from triplan.functional._plans import run
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import (
    INDEX_DTYPES,
    NARROW,
    at_least_1d,
    axis,
    check_fits,
    check_index_dtype,
    check_same_device,
    check_same_dtype,
    narrowed,
)
from triplan.functional._sharding.axes import dots, put, shared

__all__ = ["gather", "gather_with_grad", "scatter_add", "scatter_add_"]

Tensor = torch.Tensor


# --- gather ---


def _gather_shape(
    input: Tensor, dim: int, index: Tensor, check_indices: bool = False, wrap_negative: bool = False
) -> Sequence[int]:
    check_index_dtype("gather", index)
    check_same_device("gather", input, index)
    check_fits("gather", index, input, "input", keep=axis(dim, input.dim()))
    return index.shape


def _gather_fill(
    out: Tensor, input: Tensor, dim: int, index: Tensor, check_indices: bool = False, wrap_negative: bool = False
) -> None:
    dim = axis(dim, input.dim())
    index, src = at_least_1d(index), at_least_1d(input)
    operands = {"src": narrowed(src, index.shape, keep=dim), "index": index, "out": at_least_1d(out)}
    run(GatherPlan, operands, check_indices=check_indices, gather_dim=dim, wrap_negative=wrap_negative)


def _gather_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    input, ctx.dim, index, _, ctx.wrap_negative = inputs
    ctx.save_for_backward(index)
    ctx.shape = input.shape


def _gather_grad(ctx: Any, grad: Tensor) -> Any:
    (index,) = ctx.saved_tensors
    return _gather_backward(grad, ctx.dim, index, ctx.shape, ctx.wrap_negative), None, None, None, None


def _gather_axes(input: Any, dim: int, index: Any, *_: Any) -> str | None:
    axes = shared(dim, input, index)
    return axes and f"{axes}, {put(axes, dim, 'z')} -> {put(axes, dim, 'z')}"


_gather = Op(
    "gather",
    "Tensor input, int dim, Tensor index, bool check_indices=False, bool wrap_negative=False",
    axes=_gather_axes,
    shape=_gather_shape,
    fill=_gather_fill,
    setup=_gather_setup,
    backward=_gather_grad,
    linearity=Linearity((0,)),
)


def _backward_shape(
    grad: Tensor, dim: int, index: Tensor, shape: Sequence[int], wrap_negative: bool = False
) -> Sequence[int]:
    check_index_dtype("gather_backward", index)
    check_same_device("gather_backward", grad, index)
    axis(dim, len(shape))
    if grad.shape != index.shape:
        raise RuntimeError(f"gather_backward(): grad is {list(grad.shape)}, but index {list(index.shape)}")
    return shape


def _backward_fill(
    out: Tensor, grad: Tensor, dim: int, index: Tensor, shape: Sequence[int], wrap_negative: bool = False
) -> None:
    dim = axis(dim, out.dim())
    index, whole = at_least_1d(index), at_least_1d(out)
    table = narrowed(whole, index.shape, keep=dim)
    partial = table is not whole
    if partial:  # what no index can reach is zero as well
        out.zero_()
    operands = {"dout": at_least_1d(grad), "index": index, "dsrc": table}
    run(GatherBackwardPlan, operands, gather_dim=dim, accumulate=partial, wrap_negative=wrap_negative)


def _backward_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, ctx.dim, index, _, ctx.wrap_negative = inputs
    ctx.save_for_backward(index)


def _backward_grad(ctx: Any, grad: Tensor) -> Any:
    (index,) = ctx.saved_tensors
    return _gather(grad, ctx.dim, index, False, ctx.wrap_negative), None, None, None, None


def _backward_axes(grad: Any, dim: int, index: Any, shape: Sequence[int], *_: Any) -> str | None:
    rank = len(shape)
    if not rank or len(grad.shape) != rank:
        return None
    line = put(dots(rank), dim, "z")
    return f"{line}, {line} -> {dots(rank)}+z"


_gather_backward = Op(
    "gather_backward",
    "Tensor grad, int dim, Tensor index, SymInt[] shape, bool wrap_negative=False",
    axes=_backward_axes,
    shape=_backward_shape,
    fill=_backward_fill,
    setup=_backward_setup,
    backward=_backward_grad,
    linearity=Linearity((0,)),
)


@replayed
def gather(input: Tensor, dim: int, index: Tensor, *, out: Tensor | None = None, check_indices: bool = False) -> Tensor:
    """``out[..., j, ...] = input[..., index[..., j, ...], ...]`` along ``dim`` (torch.gather).

    ``index``: i32 or i64, of the same rank as ``input`` and no larger than it except along ``dim``. Returns a tensor of
    the shape of ``index``. Differentiable in ``input``.

    Raises ``IndexError`` on the CPU for an index outside the axis (a negative one too); on CUDA such an element is 0,
    unless ``check_indices`` is set: then the call synchronises and raises. Raises ``RuntimeError`` for dtypes, shapes
    and devices that do not fit.
    """
    if index.dtype not in INDEX_DTYPES and not index.numel():  # torch takes an empty index of any dtype and rank
        return composed("gather", out, (input,), lambda: input.reshape(-1)[:0].reshape(index.shape))
    if out is None:
        return _gather(input, dim, index, check_indices, False)
    return _gather.into(out, input, dim, index, check_indices, False)


@replayed
def gather_with_grad(input: Tensor, dim: int, index: Tensor, *, check_indices: bool = False) -> Tensor:
    """The same as ``gather``, which records gradients wherever torch does."""
    return gather(input, dim, index, check_indices=check_indices)


# --- scatter_add ---


def _checked_scatter(op: str, input: Tensor, dim: int, index: Tensor, src: Tensor) -> Sequence[int]:
    check_index_dtype(op, index)
    check_same_device(op, input, index, src)
    check_same_dtype(op, "src", src, input)
    check_fits(op, index, input, "self", keep=axis(dim, input.dim()))
    check_fits(op, index, src, "src")
    return input.shape


def _scatter_operands(out: Tensor, dim: int, index: Tensor, src: Tensor) -> dict[str, Tensor]:
    index = at_least_1d(index)
    return {
        "index": index,
        "src": narrowed(at_least_1d(src), index.shape),
        "out": narrowed(at_least_1d(out), index.shape, keep=dim),
    }


def _scatter_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, ctx.dim, index, src, _, *wrap_negative = inputs
    ctx.save_for_backward(index)
    ctx.shape, ctx.wrap_negative = src.shape, any(wrap_negative)


def _grad_of_src(ctx: Any, index: Tensor, grad: Tensor) -> Tensor:
    """``grad`` at the elements where ``src`` went; 0 for elements of ``src`` beyond ``index``, which were not used."""
    return _padded(_gather(grad, ctx.dim, index, False, ctx.wrap_negative), ctx.shape)


def _padded(read: Tensor, shape: Sequence[int]) -> Tensor:
    """``read``, followed by zeros along each axis up to ``shape``."""
    if read.shape == shape:
        return read
    read = at_least_1d(read)
    beyond = [p for n, m in zip(reversed(shape or (1,)), reversed(read.shape), strict=True) for p in (0, n - m)]
    return pad(read, beyond).reshape(shape)


def _add_shape(input: Tensor, dim: int, index: Tensor, src: Tensor, check_indices: bool = False) -> Sequence[int]:
    return _checked_scatter("scatter_add", input, dim, index, src)


def _add_update(out: Tensor, dim: int, index: Tensor, src: Tensor, check_indices: bool = False) -> None:
    dim = axis(dim, out.dim())
    run(ScatterAddPlan, _scatter_operands(out, dim, index, src), check_indices=check_indices, scatter_dim=dim)


def _add_grad(ctx: Any, grad: Tensor) -> Any:
    to_input, _, _, to_src = ctx.needs_input_grad[:4]
    (index,) = ctx.saved_tensors
    return grad if to_input else None, None, None, _grad_of_src(ctx, index, grad) if to_src else None, None


def _scatter_axes(input: Any, dim: int, index: Any, src: Any, *_: Any) -> str | None:
    axes = shared(dim, input, index, src)
    return axes and f"{axes}, {axes}, {axes} -> {axes}"


def _add_axes(input: Any, dim: int, index: Any, src: Any, *_: Any) -> str | None:
    axes = shared(dim, input, index, src)
    if not axes or index.shape[dim] != src.shape[dim]:
        return _scatter_axes(input, dim, index, src)
    line = put(axes, dim, "z")
    return f"{axes}+z, {line}, {line} -> {axes}+z"


_scatter_add = Op(
    "scatter_add",
    "Tensor input, int dim, Tensor index, Tensor src, bool check_indices=False",
    axes=_add_axes,
    shape=_add_shape,
    update=_add_update,
    setup=_scatter_setup,
    backward=_add_grad,
    linearity=Linearity((0, 3)),
)


@replayed
def scatter_add(
    input: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    *,
    out: Tensor | None = None,
    check_indices: bool = False,
) -> Tensor:
    """``input`` with ``out[..., index[..., j, ...], ...] += src[..., j, ...]`` along ``dim`` (torch.scatter_add).

    ``index``: i32 or i64, no larger than ``src``, and no larger than ``input`` except along ``dim``; all of one rank.
    Differentiable in ``input`` and ``src``.

    Raises ``IndexError`` on the CPU for an index outside the axis (a negative one too); on CUDA such an element is
    dropped, unless ``check_indices`` is set: then the call synchronises and raises. Raises ``RuntimeError`` for dtypes,
    shapes and devices that do not fit.
    """
    if input.dtype in NARROW:
        return composed("scatter_add", out, (input, src), lambda: _add_narrow(input, dim, index, src, check_indices))
    return _scatter_add.into(out, input, dim, index, src, check_indices)


def _add_narrow(input: Tensor, dim: int, index: Tensor, src: Tensor, check_indices: bool) -> Tensor:
    _checked_scatter("scatter_add", input, dim, index, src)
    return _scatter_add(input.int(), dim, index, src.int(), check_indices).to(input.dtype)


@replayed
def scatter_add_(input: Tensor, dim: int, index: Tensor, src: Tensor, *, check_indices: bool = False) -> Tensor:
    """``scatter_add`` into ``input`` itself, which is returned.

    Raises as ``scatter_add``, and ``RuntimeError`` for a leaf that requires grad. After an ``IndexError`` the elements
    whose indices are good have been added.
    """
    if input.dtype in NARROW:
        return input.copy_(_add_narrow(input, dim, index, src, check_indices))
    return _scatter_add.in_place(input, dim, index, src, check_indices)


def _filled(like: Tensor, value: float, index: Tensor) -> Tensor:
    """A tensor of the shape of ``index`` in which every element is ``value``; it stores one element."""
    return like.new_full((), value).expand(index.shape)
