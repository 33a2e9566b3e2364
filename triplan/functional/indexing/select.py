"""One index per slice: index_select, index_add and embedding, with torch's semantics.

The backward of index_select and embedding adds to the slices that the forward read. The backward of index_add reads the
slices that the forward added to, times alpha. The index is i32 or i64, a vector or 0-d; embedding takes any shape.
Ranks 0 to 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from triplan.descriptors.fields import MAX_RANK
from triplan.errors import Unsupported
from triplan.facade import (
    EmbeddingBackwardPlan,
    EmbeddingPlan,
    IndexAddPlan,
    IndexSelectBackwardPlan,
    IndexSelectPlan,
)
from triplan.functional._ops import Op
from triplan.functional._plans import Ran, run
from triplan.functional._shapes import (
    at_least_1d,
    axis,
    check_index_dtype,
    check_same_device,
    check_same_dtype,
    require,
)

__all__ = ["embedding", "index_add", "index_add_", "index_select"]

Tensor = torch.Tensor


def _check_vector(op: str, index: Tensor) -> None:
    check_index_dtype(op, index)
    if index.dim() > 1:
        raise IndexError(f"{op}(): Index is supposed to be a vector, but got dim: {index.dim()}")


# --- index_select ---


def _select_shape(input: Tensor, dim: int, index: Tensor, check_indices: bool = False) -> Sequence[int]:
    _check_vector("index_select", index)
    check_same_device("index_select", input, index)
    dim = axis(dim, input.dim())
    if input.dim() == 0:
        require(index.numel() == 1, lambda: "index_select(): Index to scalar can have only 1 value")
        return ()
    return (*input.shape[:dim], index.numel(), *input.shape[dim + 1 :])


def _select_fill(out: Tensor, input: Tensor, dim: int, index: Tensor, check_indices: bool = False) -> Ran:
    operands = {"src": at_least_1d(input), "index": at_least_1d(index), "out": at_least_1d(out)}
    return run(IndexSelectPlan, operands, check_indices=check_indices, select_dim=axis(dim, input.dim()))


def _select_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    input, ctx.dim, index, _ = inputs
    ctx.save_for_backward(index)
    ctx.shape = input.shape


def _select_grad(ctx: Any, grad: Tensor) -> Any:
    (index,) = ctx.saved_tensors
    return _index_select_backward(grad, ctx.dim, index, ctx.shape), None, None, None


_index_select = Op(
    "index_select",
    "Tensor input, int dim, Tensor index, bool check_indices=False",
    shape=_select_shape,
    fill=_select_fill,
    setup=_select_setup,
    backward=_select_grad,
)


def _select_backward_shape(grad: Tensor, dim: int, index: Tensor, shape: Sequence[int]) -> Sequence[int]:
    _check_vector("index_select_backward", index)
    check_same_device("index_select_backward", grad, index)
    expected = list(shape)
    if expected:
        expected[axis(dim, len(shape))] = index.numel()
    if list(grad.shape) != expected:
        raise RuntimeError(f"index_select_backward(): grad is {list(grad.shape)}; {expected} is expected")
    return shape


def _select_backward_fill(out: Tensor, grad: Tensor, dim: int, index: Tensor, shape: Sequence[int]) -> None:
    operands = {"dout": at_least_1d(grad), "index": at_least_1d(index), "dsrc": at_least_1d(out)}
    run(IndexSelectBackwardPlan, operands, select_dim=axis(dim, out.dim()), accumulate=False)


def _select_backward_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, ctx.dim, index, _ = inputs
    ctx.save_for_backward(index)


def _select_backward_grad(ctx: Any, grad: Tensor) -> Any:
    (index,) = ctx.saved_tensors
    return _index_select(grad, ctx.dim, index, False), None, None, None


_index_select_backward = Op(
    "index_select_backward",
    "Tensor grad, int dim, Tensor index, SymInt[] shape",
    shape=_select_backward_shape,
    fill=_select_backward_fill,
    setup=_select_backward_setup,
    backward=_select_backward_grad,
)


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
        return _index_select(input, dim, index, check_indices)
    return _index_select.into(out, input, dim, index, check_indices)


# --- index_add ---


def _add_shape(
    input: Tensor, dim: int, index: Tensor, source: Tensor, alpha: float = 1, check_indices: bool = False
) -> Sequence[int]:
    _check_vector("index_add", index)
    check_same_device("index_add", input, index, source)
    check_same_dtype("index_add", "source", source, input)
    if input.dtype == torch.bool:
        raise Unsupported("index_add(): bool tensors cannot be added; convert them to an integer dtype")
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
) -> Ran:
    operands = {"index": at_least_1d(index), "src": at_least_1d(source), "out": at_least_1d(out)}
    scalars = {"alpha": None if alpha == 1 else int(alpha) if isinstance(alpha, bool) else alpha}
    return run(IndexAddPlan, operands, scalars=scalars, check_indices=check_indices, add_dim=axis(dim, out.dim()))


def _add_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, ctx.dim, index, _, ctx.alpha, _ = inputs
    ctx.save_for_backward(index)


def _add_grad(ctx: Any, grad: Tensor) -> Any:
    to_input, _, _, to_source = ctx.needs_input_grad[:4]
    (index,) = ctx.saved_tensors
    read = None
    if to_source:
        read = _index_select(grad, ctx.dim, index, False)
        read = read if ctx.alpha == 1 else read * ctx.alpha
    return grad if to_input else None, None, None, read, None, None


_index_add = Op(
    "index_add",
    "Tensor input, int dim, Tensor index, Tensor source, Scalar alpha=1, bool check_indices=False",
    shape=_add_shape,
    update=_add_update,
    setup=_add_setup,
    backward=_add_grad,
)


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
    return _index_add.into(out, input, dim, index, source, alpha, check_indices)


def index_add_(
    input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1, check_indices: bool = False
) -> Tensor:
    """``index_add`` into ``input`` itself, which is returned.

    Raises as ``index_add``, and ``RuntimeError`` for a leaf that requires grad. After an ``IndexError`` for an index
    outside the axis, the slices whose indices are good have been added.
    """
    return _index_add.in_place(input, dim, index, source, alpha, check_indices)


# --- embedding ---


def _embedding_shape(
    weight: Tensor, indices: Tensor, padding_idx: int | None = None, check_indices: bool = False
) -> Sequence[int]:
    if weight.dim() != 2:
        raise RuntimeError("embedding(): 'weight' must be 2-D")
    check_index_dtype("embedding", indices)
    check_same_device("embedding", weight, indices)
    return (*indices.shape, weight.size(1))


def _as_rows(indices: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """``indices`` and the ``rows`` that belong to them, flattened if descriptors do not take their rank."""
    if 1 <= indices.dim() < MAX_RANK:
        return indices, rows
    return indices.reshape(-1), rows.reshape(indices.numel(), rows.size(-1))


def _embedding_fill(
    out: Tensor, weight: Tensor, indices: Tensor, padding_idx: int | None = None, check_indices: bool = False
) -> Ran:
    index, rows = _as_rows(indices, out)
    return run(EmbeddingPlan, {"weight": weight, "index": index, "out": rows}, check_indices=check_indices)


def _embedding_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    weight, indices, ctx.padding_idx, _ = inputs
    ctx.save_for_backward(indices)
    ctx.num_embeddings = weight.size(0)


def _embedding_grad(ctx: Any, grad: Tensor) -> Any:
    (indices,) = ctx.saved_tensors
    return _embedding_backward(grad, indices, ctx.num_embeddings, ctx.padding_idx), None, None, None


_embedding = Op(
    "embedding",
    "Tensor weight, Tensor indices, SymInt? padding_idx=None, bool check_indices=False",
    shape=_embedding_shape,
    fill=_embedding_fill,
    setup=_embedding_setup,
    backward=_embedding_grad,
)


def _embedding_backward_shape(
    grad: Tensor,
    indices: Tensor,
    num_embeddings: int,
    padding_idx: int | None = None,
) -> Sequence[int]:
    check_index_dtype("embedding_backward", indices)
    check_same_device("embedding_backward", grad, indices)
    if grad.shape[:-1] != indices.shape:
        raise RuntimeError(f"embedding_backward(): grad is {list(grad.shape)}, but indices {list(indices.shape)}")
    return (num_embeddings, grad.size(-1))


def _embedding_backward_fill(
    out: Tensor,
    grad: Tensor,
    indices: Tensor,
    num_embeddings: int,
    padding_idx: int | None = None,
) -> None:
    index, rows = _as_rows(indices, grad)
    operands = {"dout": rows, "index": index, "dweight": out}
    run(EmbeddingBackwardPlan, operands, padding_idx=padding_idx, accumulate=False)


def _embedding_backward_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, indices, _, ctx.padding_idx = inputs
    ctx.save_for_backward(indices)


def _embedding_backward_grad(ctx: Any, grad: Tensor) -> Any:
    (indices,) = ctx.saved_tensors
    read = _embedding(grad, indices, None, False)
    if ctx.padding_idx is not None:
        read = read.masked_fill((indices == ctx.padding_idx).unsqueeze(-1), 0)
    return read, None, None, None


_embedding_backward = Op(
    "embedding_backward",
    "Tensor grad, Tensor indices, SymInt num_embeddings, SymInt? padding_idx=None",
    shape=_embedding_backward_shape,
    fill=_embedding_backward_fill,
    setup=_embedding_backward_setup,
    backward=_embedding_backward_grad,
)


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *, check_indices: bool = False) -> Tensor:
    """``out[..., :] = weight[input[...], :]`` (torch.nn.functional.embedding, without max_norm and sparse gradients).

    ``input``: indices, i32 or i64, of any shape. ``weight``: (rows, width). ``padding_idx``: a row that receives no
    gradient; a negative one counts from the end. Returns a tensor of the shape of ``input`` followed by the width.
    Differentiable in ``weight``.

    Raises ``IndexError`` on the CPU for an index outside the rows; on CUDA such a row is 0, unless ``check_indices`` is
    set: then the call synchronises and raises. Raises ``RuntimeError`` for dtypes, shapes and devices that do not fit,
    and for a ``padding_idx`` outside the rows.
    """
    if padding_idx is not None:
        rows = weight.size(0)
        if not -rows <= padding_idx < rows:
            raise RuntimeError(f"embedding(): padding_idx = {padding_idx} must be within num_embeddings = {rows}")
        padding_idx += rows if padding_idx < 0 else 0
    return _embedding(weight, input, padding_idx, check_indices)
