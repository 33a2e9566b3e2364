"""Several indices per element: index_put, with torch's semantics and index tensors for the leading axes.

Negative indices count from the end. Boolean masks are refused: only the device knows how many elements they select.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from triplan.errors import Unsupported
from triplan.facade import IndexPutPlan
from triplan.functional._ops import Op
from triplan.functional._plans import Ran, run
from triplan.functional._shapes import INDEX_DTYPES, broadcast, check_same_device
from triplan.functional.indexing.select import index_select

__all__ = ["index_put"]

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
    if len(indices) > input.dim():
        raise IndexError(f"index_put(): too many indices for tensor of dimension {input.dim()} (got {len(indices)})")
    for index in indices:
        if index.dtype in (torch.bool, torch.uint8):
            raise Unsupported("index_put(): masks are not supported; pass mask.nonzero(as_tuple=True) as indices")
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
) -> Ran:
    shape = _index_shape(indices) or (1,)
    dtype = torch.int32 if all(i.dtype == torch.int32 for i in indices) else torch.int64
    operands = {
        "indices": [i.to(dtype).expand(shape) for i in indices],
        "values": values.expand(*shape, *out.shape[len(indices) :]),
        "out": out,
    }
    return run(IndexPutPlan, operands, check_indices=check_indices, accumulate=accumulate, wrap_negative=True)


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
    rows = grad.shape[: len(indices)]
    number = torch.zeros((), dtype=torch.int64, device=grad.device)
    good = torch.ones((), dtype=torch.bool, device=grad.device)
    for index, n in zip(indices, rows, strict=True):
        at = index.to(torch.int64)
        at = torch.where(at < 0, at + n, at)
        good = good & (at >= 0) & (at < n)
        number = number * n + at
    rest = grad.shape[len(indices) :]
    table = grad.reshape((math.prod(rows), *rest))
    read = index_select(table, 0, torch.where(good, number, -1).reshape(-1))
    return read.reshape((*number.shape, *rest))


_index_put = Op(
    "index_put",
    "Tensor input, Tensor[] indices, Tensor values, bool accumulate=False, bool check_indices=False",
    shape=_put_shape,
    update=_put_update,
    setup=_put_setup,
    backward=_put_grad,
)


def index_put(
    input: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    *,
    check_indices: bool = False,
) -> Tensor:
    """``input`` with ``out[indices] = values``, or ``+= values`` with ``accumulate`` (torch.index_put).

    ``indices``: i32 or i64 tensors for the leading axes of ``input``, broadcast together; negative ones count from the
    end. ``values``: of the dtype of ``input``, broadcast to that shape followed by the remaining axes. Differentiable
    in ``input`` and ``values``.

    Without ``accumulate``, where an index repeats, any one of the writes stays; under
    ``torch.use_deterministic_algorithms(True)`` the last. As in torch, the gradient of such an element goes to every
    value with that index.

    Raises ``IndexError`` on the CPU for an index outside its axis; on CUDA such a value is dropped, unless
    ``check_indices`` is set: then the call synchronises and raises. Raises ``Unsupported`` for masks and for None
    before the last index tensor, and ``RuntimeError`` or ``IndexError`` for dtypes, shapes and devices that do not fit.
    """
    given = list(indices)
    while given and given[-1] is None:
        given.pop()
    if any(i is None for i in given):
        raise Unsupported("index_put(): None before an index tensor is not supported; move the axis first by movedim")
    return _index_put(input, given, values, accumulate, check_indices)
