"""One index per slice: index_select and index_add, with torch's semantics.

The backward of index_select adds to the slices that the forward read. The backward of index_add reads the
slices that the forward added to, times alpha. The index is i32 or i64, a vector or 0-d. Ranks 0 to 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from triplan.facade import (
    IndexAddPlan,
    IndexSelectBackwardPlan,
    IndexSelectPlan,
)
from triplan.functional._forward import Linearity
from triplan.functional._ops import Op, composed
from triplan.functional._plans import run
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import (
    NARROW,
    at_least_1d,
    axis,
    check_index_dtype,
    check_same_device,
    check_same_dtype,
    require,
)
from triplan.functional._sharding.axes import but, dots, put

__all__ = ["index_add", "index_add_", "index_select"]

Tensor = torch.Tensor


def check_vector(op: str, index: Tensor) -> None:
    """Raise unless ``index`` is an i32 or i64 vector, or 0-d."""
    check_index_dtype(op, index)
    if index.dim() > 1:
        raise IndexError(f"{op}(): Index is supposed to be a vector, but got dim: {index.dim()}")


# --- index_select ---


def _select_shape(
    input: Tensor, dim: int, index: Tensor, check_indices: bool = False, wrap_negative: bool = False
) -> Sequence[int]:
    check_vector("index_select", index)
    check_same_device("index_select", input, index)
    dim = axis(dim, input.dim())
    if input.dim() == 0:
        require(index.numel() == 1, lambda: "index_select(): Index to scalar can have only 1 value")
        return ()
    return (*input.shape[:dim], index.numel(), *input.shape[dim + 1 :])


def _select_fill(
    out: Tensor, input: Tensor, dim: int, index: Tensor, check_indices: bool = False, wrap_negative: bool = False
) -> None:
    operands = {"src": at_least_1d(input), "index": at_least_1d(index), "out": at_least_1d(out)}
    options: dict[str, Any] = {"select_dim": axis(dim, input.dim()), "wrap_negative": wrap_negative}
    run(IndexSelectPlan, operands, check_indices=check_indices, **options)


def _select_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    input, ctx.dim, index, _, ctx.wrap_negative = inputs
    ctx.save_for_backward(index)
    ctx.shape = input.shape


def _select_grad(ctx: Any, grad: Tensor) -> Any:
    (index,) = ctx.saved_tensors
    return _index_select_backward(grad, ctx.dim, index, ctx.shape, ctx.wrap_negative), None, None, None, None


def _select_axes(input: Any, dim: int, index: Any, *_: Any) -> str | None:
    rank = len(input.shape)
    axes = but(rank, dim)
    return f"{axes}, z -> {put(axes, dim, 'z')}" if rank and len(index.shape) == 1 else None


_index_select = Op(
    "index_select",
    "Tensor input, int dim, Tensor index, bool check_indices=False, bool wrap_negative=False",
    axes=_select_axes,
    shape=_select_shape,
    fill=_select_fill,
    setup=_select_setup,
    backward=_select_grad,
    linearity=Linearity((0,)),
)


def _select_backward_shape(
    grad: Tensor, dim: int, index: Tensor, shape: Sequence[int], wrap_negative: bool = False
) -> Sequence[int]:
    check_vector("index_select_backward", index)
    check_same_device("index_select_backward", grad, index)
    expected = list(shape)
    if expected:
        expected[axis(dim, len(shape))] = index.numel()
    if list(grad.shape) != expected:
        raise RuntimeError(f"index_select_backward(): grad is {list(grad.shape)}; {expected} is expected")
    return shape


def _select_backward_fill(
    out: Tensor, grad: Tensor, dim: int, index: Tensor, shape: Sequence[int], wrap_negative: bool = False
) -> None:
    operands = {"dout": at_least_1d(grad), "index": at_least_1d(index), "dsrc": at_least_1d(out)}
    options: dict[str, Any] = {"select_dim": axis(dim, out.dim()), "wrap_negative": wrap_negative}
    run(IndexSelectBackwardPlan, operands, accumulate=False, **options)


def _select_backward_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, ctx.dim, index, _, ctx.wrap_negative = inputs
    ctx.save_for_backward(index)


def _select_backward_grad(ctx: Any, grad: Tensor) -> Any:
    (index,) = ctx.saved_tensors
    return _index_select(grad, ctx.dim, index, False, ctx.wrap_negative), None, None, None, None


def _select_backward_axes(grad: Any, dim: int, index: Any, shape: Sequence[int], *_: Any) -> str | None:
    rank = len(shape)
    if not rank or len(index.shape) != 1:
        return None
    return f"{put(dots(rank), dim, 'z')}, z -> {dots(rank)}+z"


_index_select_backward = Op(
    "index_select_backward",
    "Tensor grad, int dim, Tensor index, SymInt[] shape, bool wrap_negative=False",
    axes=_select_backward_axes,
    shape=_select_backward_shape,
    fill=_select_backward_fill,
    setup=_select_backward_setup,
    backward=_select_backward_grad,
    linearity=Linearity((0,)),
)


@replayed
def index_select(
    input: Tensor, dim: int, index: Tensor, *, out: Tensor | None = None, check_indices: bool = False
) -> Tensor:
    """``out[..., j, ...] = input[..., index[j], ...]`` along ``dim`` (torch.index_select).

    ``index``: i32 or i64, a vector or 0-d. Returns a tensor of the shape of ``input``, but as long as ``index`` along
    ``dim``. Differentiable in ``input``.

    Raises ``IndexError`` on the CPU for an index outside the axis (a negative one too); on CUDA such a slice is 0,
    unless ``check_indices`` is set: then the call synchronises and raises. Raises ``RuntimeError`` or ``IndexError``
    for dtypes, shapes and devices that do not fit.
    """
    if out is None:
        return _index_select(input, dim, index, check_indices, False)
    return _index_select.into(out, input, dim, index, check_indices, False)


# --- index_add ---


def _add_shape(
    input: Tensor, dim: int, index: Tensor, source: Tensor, alpha: float = 1, check_indices: bool = False
) -> Sequence[int]:
    check_vector("index_add", index)
    check_same_device("index_add", input, index, source)
    check_same_dtype("index_add", "source", source, input)
    if isinstance(alpha, complex):
        raise RuntimeError("index_add(): For non-complex input tensors, argument alpha must not be a complex number.")
    if isinstance(alpha, float) and not input.is_floating_point():
        raise RuntimeError(
            "index_add(): For integral input tensors, argument alpha must not be a floating point number."
        )
    dim = axis(dim, input.dim())
    expected = list(input.shape)
    if expected:
        expected[dim] = index.numel()
    if source.dim() != input.dim():
        raise RuntimeError(f"index_add(): source has {source.dim()} dimensions, but self {input.dim()}")
    require(
        index.numel() == (source.size(dim) if source.dim() else 1),
        lambda: (
            f"index_add(): Number of indices ({index.numel()}) should be equal to source.size(dim): "
            f"({source.size(dim) if source.dim() else 1}), for dim: {dim}"
        ),
    )
    for n, m in zip(source.shape, expected, strict=True):
        require(
            n == m,
            lambda: (
                "index_add(): source tensor shape must match self tensor shape, excluding the specified dimension. "
                f"Got self.shape = {list(input.shape)} source.shape = {list(source.shape)}"
            ),
        )
    return input.shape


def _add_update(
    out: Tensor, dim: int, index: Tensor, source: Tensor, alpha: float = 1, check_indices: bool = False
) -> None:
    operands = {"index": at_least_1d(index), "src": at_least_1d(source), "out": at_least_1d(out)}
    scalars = {"alpha": None if alpha == 1 else int(alpha) if isinstance(alpha, bool) else alpha}
    run(IndexAddPlan, operands, scalars=scalars, check_indices=check_indices, add_dim=axis(dim, out.dim()))


def _add_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, ctx.dim, index, _, ctx.alpha, _ = inputs
    ctx.save_for_backward(index)


def _add_grad(ctx: Any, grad: Tensor) -> Any:
    to_input, _, _, to_source = ctx.needs_input_grad[:4]
    (index,) = ctx.saved_tensors
    read = None
    if to_source:
        read = _index_select(grad, ctx.dim, index, False, False)
        read = read if ctx.alpha == 1 else read * ctx.alpha
    return grad if to_input else None, None, None, read, None, None


def _add_axes(input: Any, dim: int, index: Any, source: Any, *_: Any) -> str | None:
    rank = len(input.shape)
    if not rank or len(index.shape) != 1 or len(source.shape) != rank:
        return None
    axes = but(rank, dim)
    return f"{axes}+z, z, {put(axes, dim, 'z')} -> {axes}+z"


_index_add = Op(
    "index_add",
    "Tensor input, int dim, Tensor index, Tensor source, Scalar alpha=1, bool check_indices=False",
    axes=_add_axes,
    shape=_add_shape,
    update=_add_update,
    setup=_add_setup,
    backward=_add_grad,
    linearity=Linearity((0, 3)),
)


@replayed
def index_add(
    input: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    *,
    alpha: float = 1,
    out: Tensor | None = None,
    check_indices: bool = False,
) -> Tensor:
    """``input`` with ``out[..., index[j], ...] += alpha * source[..., j, ...]`` along ``dim`` (torch.index_add).

    ``index``: i32 or i64, a vector as long as ``source`` is along ``dim``; off that axis ``source`` has the shape of
    ``input``. ``alpha``: a number, an int for integer tensors. Differentiable in ``input`` and ``source``.

    Raises ``IndexError`` on the CPU for an index outside the axis (a negative one too); on CUDA such a slice is
    dropped, unless ``check_indices`` is set: then the call synchronises and raises. Raises ``RuntimeError`` or
    ``IndexError`` for dtypes, shapes and devices that do not fit.
    """
    if input.dtype in NARROW:
        args = (dim, index, source, alpha, check_indices)
        return composed("index_add", out, (input, source), lambda: _add_narrow(input, *args))
    return _index_add.into(out, input, dim, index, source, alpha, check_indices)


def _add_narrow(input: Tensor, dim: int, index: Tensor, source: Tensor, alpha: float, check_indices: bool) -> Tensor:
    _add_shape(input, dim, index, source, alpha)
    return _index_add(input.int(), dim, index, source.int(), int(alpha), check_indices).to(input.dtype)


@replayed
def index_add_(
    input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1, check_indices: bool = False
) -> Tensor:
    """``index_add`` into ``input`` itself, which is returned.

    Raises as ``index_add``, and ``RuntimeError`` for a leaf that requires grad. After an ``IndexError`` for an index
    outside the axis, the slices whose indices are good have been added.
    """
    if input.dtype in NARROW:
        return input.copy_(_add_narrow(input, dim, index, source, alpha, check_indices))
    return _index_add.in_place(input, dim, index, source, alpha, check_indices)
