"""Several indices per element: index_put, with torch's semantics.

The registered op has index tensors for the leading axes. Other axes are moved there in views; masks become indices,
which synchronises: only the device knows how many elements they select. Negative indices count from the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from triplan.errors import Unsupported
from triplan.facade import IndexPutPlan
from triplan.functional._forward import Linearity
from triplan.functional._ops import Op
from triplan.functional._plans import run
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import INDEX_DTYPES, NARROW, broadcast, check_same_device
from triplan.functional.indexing.select import _index_select

__all__ = ["index_put", "index_put_"]

Tensor = torch.Tensor


def _index_shape(indices: Sequence[Tensor]) -> tuple[int, ...]:
    try:
        return tuple(broadcast(*(i.shape for i in indices)))
    except RuntimeError:
        shapes = ", ".join(str(list(i.shape)) for i in indices)
        raise IndexError(
            f"index_put(): shape mismatch: indexing tensors could not be broadcast together with shapes {shapes}"
        ) from None


def _put_shape(
    input: Tensor,
    indices: Sequence[Tensor],
    values: Tensor,
    accumulate: bool = False,
    check_indices: bool = False,
) -> Sequence[int]:
    if not indices:
        raise IndexError("index_put(): at least one index tensor is needed")
    for index in indices:
        if index.dtype not in INDEX_DTYPES:
            raise IndexError(f"index_put(): tensors used as indices must be int32 or int64, but got {index.dtype}")
    check_same_device("index_put", input, *indices, values)
    if values.dtype != input.dtype:
        raise RuntimeError(
            f"index_put(): Index put requires the source and destination dtypes match, got {input.dtype} for the "
            f"destination and {values.dtype} for the source."
        )
    chosen = (*_index_shape(indices), *input.shape[len(indices) :])
    try:
        fits = tuple(broadcast(values.shape, chosen)) == chosen
    except RuntimeError:
        fits = False
    if not fits:
        raise RuntimeError(
            f"index_put(): shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing "
            f"result of shape {list(chosen)}"
        )
    return input.shape


def _put_update(
    out: Tensor,
    indices: Sequence[Tensor],
    values: Tensor,
    accumulate: bool = False,
    check_indices: bool = False,
) -> None:
    shape = _index_shape(indices) or (1,)
    dtype = torch.int32 if all(i.dtype == torch.int32 for i in indices) else torch.int64
    operands = {
        "indices": [i.to(dtype).expand(shape) for i in indices],
        "values": values.expand(*shape, *out.shape[len(indices) :]),
        "out": out,
    }
    run(IndexPutPlan, operands, check_indices=check_indices, accumulate=accumulate, wrap_negative=True)


def _put_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, indices, values, ctx.accumulate, _ = inputs
    ctx.save_for_backward(*indices)
    ctx.shape = values.shape


def _put_grad(ctx: Any, grad: Tensor) -> Any:
    to_input, _, to_values = ctx.needs_input_grad[:3]
    indices = ctx.saved_tensors
    kept = read = None
    if to_input:
        kept = grad if ctx.accumulate else _index_put(grad, indices, grad.new_zeros(()), False, False)
    if to_values:
        read = _read(grad, indices).sum_to_size(ctx.shape)
    return kept, [None] * len(indices), read, None, None


def _read(grad: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """``grad[indices]``; zero where any of the indices is out of bounds, as nothing was written there."""
    if len(indices) == 1:
        number = indices[0]
    else:
        extents = grad.shape[: len(indices)]
        # Good indices add less than the product of the extents: a bad one leaves a number that is out of bounds.
        bad = -2 * math.prod(extents)
        parts = [
            torch.remainder(i, n).masked_fill((i < -n) | (i >= n), bad)
            for i, n in zip((index.long() for index in indices), extents, strict=True)
        ]
        number = parts[-1]
        for k, part in enumerate(parts[:-1]):
            number = torch.add(number, part, alpha=math.prod(extents[k + 1 :]))
    rest = grad.shape[len(indices) :]
    table = grad.reshape(math.prod(grad.shape[: len(indices)]), *rest)  # torch batches no flatten in autograd.grad
    read = _index_select(table, 0, number.reshape(-1), False, True)
    return read.reshape((*number.shape, *rest))


_index_put = Op(
    "index_put",
    "Tensor input, Tensor[] indices, Tensor values, bool accumulate=False, bool check_indices=False",
    axes=None,  # values choose where elements are written
    shape=_put_shape,
    update=_put_update,
    setup=_put_setup,
    backward=_put_grad,
    linearity=Linearity((0, 2)),
)


def _positions(input: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """``indices`` with every mask replaced by the positions at which it is true. Synchronises if there is one."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            found.append(index)
            continue
        at = len(found)
        if index.shape != input.shape[at : at + index.dim()]:
            raise IndexError(
                f"index_put(): the shape of the mask {list(index.shape)} at index {at} does not match the shape of the "
                f"indexed tensor {list(input.shape)}"
            )
        if index.is_cuda and torch.cuda.is_current_stream_capturing():
            raise Unsupported(
                "index_put(): a mask cannot be captured in a CUDA graph, as the host must wait for the number of its "
                "elements; use torch.where, or make the indices before with mask.nonzero(as_tuple=True)"
            )
        found.extend(index.nonzero(as_tuple=True) if index.dim() else (index.reshape(1).nonzero()[:, 0],))
    return found


def _leading(
    input: Tensor, indices: Sequence[Tensor | None], values: Tensor
) -> tuple[Tensor, list[Tensor], Tensor, list[int]]:
    """``input`` and ``values`` with the indexed axes first, the index tensors, and the axes' order in ``input``."""
    at = [a for a, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if at and at[-1] >= input.dim():
        raise IndexError(f"index_put(): too many indices for tensor of dimension {input.dim()} (got {at[-1] + 1})")
    order = [*at, *(a for a in range(input.dim()) if a not in at)]
    if at and at[0] and at[-1] - at[0] == len(at) - 1:  # adjacent: torch has the indices' axes where the first stood
        rank = len(_index_shape(given))
        if values.dim() > rank + input.dim() - len(at):
            raise RuntimeError(f"index_put(): values of shape {list(values.shape)} have too many axes")
        values = values.reshape((1,) * (rank + input.dim() - len(at) - values.dim()) + values.shape)
        values = values.movedim(list(range(at[0], at[0] + rank)), list(range(rank)))
    return input.permute(order), given, values, order


@replayed
def index_put(
    input: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    *,
    check_indices: bool = False,
) -> Tensor:
    """``input`` with ``out[indices] = values``, or ``+= values`` with ``accumulate`` (torch.index_put).

    ``indices``: i32 or i64 tensors, broadcast together, negative ones counting from the end; bool or u8 masks; None for
    an axis that is taken whole. ``values``: of the dtype of ``input``, broadcast to ``input[indices]``.
    Differentiable in ``input`` and ``values``.

    A mask makes the host wait for the device, and cannot be captured in a CUDA graph (``Unsupported``).

    Without ``accumulate``, where an index repeats, any one of the writes stays; under
    ``torch.use_deterministic_algorithms(True)`` the last. As in torch, the gradient of such an element goes to every
    value with that index.

    Raises ``IndexError`` on the CPU for an index outside its axis; on CUDA such a value is dropped, unless
    ``check_indices`` is set: then the call synchronises and raises. Raises ``RuntimeError`` or ``IndexError`` for
    dtypes, shapes and devices that do not fit.
    """
    table, given, values, order = _leading(input, _positions(input, indices), values)
    if accumulate and input.dtype in NARROW:
        result = _index_put(table.int(), given, values.int(), True, check_indices).to(input.dtype)
    else:
        result = _index_put(table, given, values, accumulate, check_indices)
    return result if order == sorted(order) else result.permute([order.index(a) for a in range(len(order))])


@replayed
def index_put_(
    input: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    *,
    check_indices: bool = False,
) -> Tensor:
    """``index_put`` into ``input`` itself, which is returned. Raises as ``scatter_add_`` does."""
    _, given, rows, order = _leading(input, _positions(input, indices), values)
    if order != sorted(order) or (accumulate and input.dtype in NARROW):
        return input.copy_(index_put(input, indices, values, accumulate, check_indices=check_indices))
    return _index_put.in_place(input, given, rows, accumulate, check_indices)
