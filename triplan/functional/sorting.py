"""Sorting of rows, their largest elements, and positions in sorted rows, with torch's names.

Results are a function of the input alone: of equal elements the one with the lower position always comes first, also
where torch leaves it open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from triplan.facade import ArgsortPlan, KthValuePlan, SearchSortedPlan, SortPlan, TopKPlan
from triplan.functional._ops import RECORDED, Recorded, check_out
from triplan.functional._plans import run
from triplan.functional._replay.recording import is_plain
from triplan.functional._replay.replay import repeats, replayed
from triplan.functional._shapes import axis, check_same_device

__all__ = ["argsort", "kthvalue", "searchsorted", "sort", "topk"]

#: The most elements that the kernels of topk order in one program. More of them are the first of a sorted row.
_MOST_TAKEN = 1024


# --- rows along any axis ---


def _check(name: str, input: Tensor) -> None:
    if input.is_complex():
        raise RuntimeError(f"{name}(): {input.dtype} has no order; expected floats, integers or bool")


def _matrix(t: Tensor, at: int) -> Tensor:
    """[rows, n], the rows along axis ``at``: a view, where strides allow one."""
    n = t.shape[at] if t.dim() else 1
    moved = t.movedim(at, -1) if t.dim() else t
    return moved.reshape(moved.shape[:-1].numel(), n)


def _shaped(t: Tensor, like: Tensor, at: int) -> Tensor:
    """Rows [rows, k] as they lie in the result: along axis ``at``, contiguous."""
    if like.dim() == 0:
        return _owned(t.reshape(()))
    others = [n for a, n in enumerate(like.shape) if a != at]
    return _owned(t.reshape(*others, t.shape[1]).movedim(-1, at).contiguous())


def _owned(t: Tensor) -> Tensor:
    """``t``, no view to autograd, which refuses to write in place a view that a Function of several results returns."""
    return t.data


def _run(plan: Any, x: Tensor, outs: dict[str, Tensor], **options: Any) -> None:
    if next(iter(outs.values())).numel():
        run(plan, {"x": x, **outs}, **options)


def _empty(input: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    return input.new_empty(shape), input.new_empty(shape, dtype=torch.int64)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    """Of (input, option, axis, ...)."""
    ctx.dim, ctx.shape, ctx.nothing, ctx.gone = inputs[2], inputs[0].shape, (None,) * (len(inputs) - 1), []
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
    """Each element of the gradient goes to where the value was; the others are 0."""
    (indices,) = ctx.saved_tensors
    for a in ctx.gone:
        grad, indices = grad.unsqueeze(a), indices.unsqueeze(a)
    scatter: Any = RECORDED["scatter"]
    # In place, where that can be done: the op itself copies the zeros.
    put = scatter.in_place if not torch.is_grad_enabled() and is_plain(grad) else scatter
    return (put(grad.new_zeros(ctx.shape), ctx.dim, indices, grad, False, False), *ctx.nothing)


# --- topk ---


def _taken(input: Tensor, k: int, dim: int) -> list[int]:
    """The shape of the results."""
    at = axis(dim, input.dim())
    if not 0 <= k <= (input.shape[at] if input.dim() else 1):
        raise RuntimeError("selected index k out of range")
    return [k if a == at else n for a, n in enumerate(input.shape)]


def _topk_kernel(input: Tensor, k: int, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    _taken(input, k, dim)
    k = k if input.dim() else 1  # a tensor without axes is its own largest element, whatever k
    at = axis(dim, input.dim())
    x = _matrix(input, at)
    values, indices = _empty(x, (x.shape[0], k))
    if k <= _MOST_TAKEN:
        _run(TopKPlan, x, {"values": values, "indices": indices}, largest=largest)
    else:
        whole, places = _empty(x, x.shape)
        _run(SortPlan, x, {"values": whole, "indices": places}, descending=largest)
        values, indices = whole[:, :k], places[:, :k]
    return _shaped(values, input, at), _shaped(indices, input, at)


_topk = Recorded(
    "topk",
    "(Tensor input, int k, int dim, bool largest) -> (Tensor, Tensor)",
    _topk_kernel,
    lambda input, k, dim, largest: _empty(input, _taken(input, k, dim)),
    axes=None,
    setup=_setup,
    backward=_backward,
)


# --- kthvalue ---


def _kept(input: Tensor, k: int, dim: int, keepdim: bool) -> list[int]:
    at = axis(dim, input.dim())
    n = input.shape[at] if input.dim() else 1
    if n == 0 and input.dim():
        raise IndexError(f"kthvalue(): Expected reduction dim {dim} to have non-zero size.")
    if not 1 <= k <= n:
        raise RuntimeError("kthvalue(): selected number k out of range for dimension " + str(at))
    shape = list(input.shape)
    return [*shape[:at], *([1] if keepdim else []), *shape[at + 1 :]] if shape else []


def _kth_kernel(input: Tensor, k: int, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    shape = _kept(input, k, dim, keepdim)
    x = _matrix(input, axis(dim, input.dim()))
    values, indices = _empty(x, x.shape[:1])
    _run(KthValuePlan, x, {"values": values, "indices": indices}, k=k)
    return _owned(values.view(shape)), _owned(indices.view(shape))


def _kth_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _setup(ctx, inputs, output)
    ctx.gone = [] if inputs[3] or inputs[0].dim() == 0 else [axis(inputs[2], inputs[0].dim())]


_kthvalue = Recorded(
    "kthvalue",
    "(Tensor input, int k, int dim, bool keepdim) -> (Tensor, Tensor)",
    _kth_kernel,
    lambda input, k, dim, keepdim: _empty(input, _kept(input, k, dim, keepdim)),
    axes=None,
    setup=_kth_setup,
    backward=_backward,
)


# --- sort ---


def _sort_kernel(input: Tensor, descending: bool, dim: int) -> tuple[Tensor, Tensor]:
    at = axis(dim, input.dim())
    x = _matrix(input, at)
    values, indices = _empty(x, x.shape)
    _run(SortPlan, x, {"values": values, "indices": indices}, descending=descending)
    return _shaped(values, input, at), _shaped(indices, input, at)


def _argsort_kernel(input: Tensor, descending: bool, dim: int) -> Tensor:
    at = axis(dim, input.dim())
    x = _matrix(input, at)
    indices = x.new_empty(x.shape, dtype=torch.int64)
    _run(ArgsortPlan, x, {"indices": indices}, descending=descending)
    return _shaped(indices, input, at)


def _sort_fake(input: Tensor, descending: bool, dim: int) -> tuple[Tensor, Tensor]:
    axis(dim, input.dim())
    return _empty(input, input.shape)


_sort = Recorded(
    "sort",
    "(Tensor input, bool descending, int dim) -> (Tensor, Tensor)",
    _sort_kernel,
    _sort_fake,
    axes=None,
    setup=_setup,
    backward=_backward,
)
_argsort = Recorded(
    "argsort",
    "(Tensor input, bool descending, int dim) -> Tensor",
    _argsort_kernel,
    lambda input, descending, dim: _sort_fake(input, descending, dim)[1],
    axes=None,
    setup=lambda ctx, inputs, output: ctx.mark_non_differentiable(output),
    backward=lambda ctx, g: (None, None, None),
)


# --- searchsorted ---


def _positions(sequence: Tensor, input: Tensor, sorter: Tensor | None, right: bool, out_int32: bool) -> Tensor:
    """A new tensor for the result."""
    name = "torch.searchsorted()"
    if sequence.dim() == 0:
        raise RuntimeError(f"{name}: the sorted sequence should have at least one dimension, but got a scalar")
    if sequence.dim() > 1 and (sequence.dim() != input.dim() or sequence.shape[:-1] != input.shape[:-1]):
        raise RuntimeError(
            f"{name}: boundaries tensor should be 1 dimension or the first N-1 dimensions of boundaries tensor and "
            f"input value tensor must match, but we got boundaries tensor {list(sequence.shape)} and input value "
            f"tensor {list(input.shape)}"
        )
    if sequence.dtype != input.dtype:
        raise RuntimeError(
            f"{name}: boundary tensor and input value tensor should have same dtype, but got boundary tensor dtype "
            f"{sequence.dtype} and input value tensor dtype {input.dtype}"
        )
    if sorter is not None and (sorter.shape != sequence.shape or sorter.dtype != torch.int64):
        raise RuntimeError(
            f"{name}: sorter of shape {list(sorter.shape)} and dtype {sorter.dtype}; expected int64 of the boundaries' "
            f"shape {list(sequence.shape)}"
        )
    if out_int32 and sequence.shape[-1] >= 2**31:
        raise RuntimeError(f"{name}: the size of boundaries' last dimension should be less than {2**31 - 1}")
    return input.new_empty(input.shape, dtype=torch.int32 if out_int32 else torch.int64)


def _search_kernel(sequence: Tensor, input: Tensor, sorter: Tensor | None, right: bool, out_int32: bool) -> Tensor:
    out = _positions(sequence, input, sorter, right, out_int32)
    if out.numel() == 0:
        return out
    n = sequence.shape[-1]
    rows = 1 if sequence.dim() == 1 else sequence.shape[:-1].numel()
    given = {"sequence": sequence.reshape(rows, n)}
    if sorter is not None:
        given["sorter"] = sorter.reshape(rows, n)
    run(SearchSortedPlan, {**given, "x": input.reshape(rows, -1), "out": out.view(rows, -1)}, right=right)
    return out


_searchsorted = Recorded(
    "searchsorted",
    "(Tensor sequence, Tensor input, Tensor? sorter, bool right, bool out_int32) -> Tensor",
    _search_kernel,
    _positions,
    axes=None,
    setup=lambda ctx, inputs, output: ctx.mark_non_differentiable(output),
    backward=lambda ctx, g: (None,) * 5,
)


# --- public ---


def _into(name: str, out: Any, found: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """``found``, or torch's ``out=`` with their values."""
    if out is None:
        return tuple(found)
    for o, t in zip(out, found, strict=True):
        check_out(name, o, (t.detach(),), lambda t=t: t.shape)  # type: ignore[misc]
        o.copy_(t)
    return tuple(out)


@replayed
def _largest(input: Tensor, k: int, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    _check("topk", input)
    values, indices = _topk(input, k, dim, largest)
    return values, indices


@repeats(_largest)
def topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *, out: Any = None) -> Any:
    """The ``k`` largest (smallest) elements along ``dim`` and their positions: a named tuple (torch.topk).

    ``input``: floats, integers or bool of any shape and strides. The results are contiguous and always sorted, whatever
    ``sorted``. NaN is largest, -0.0 equals 0.0; of equal elements those with the lowest positions are taken, and stand
    in this order, so that the same input gives the same result always, unlike torch's. The values' gradient goes to the
    elements that were taken. ``out``: a pair of tensors.

    Raises ``IndexError`` for ``dim``, ``RuntimeError`` for ``k`` and complex numbers.
    """
    found: Any = _into("topk", out, _largest(input, k, dim, largest))
    return torch.return_types.topk(found)


@replayed
def _kth(input: Tensor, k: int, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    _check("kthvalue", input)
    values, indices = _kthvalue(input, k, dim, keepdim)
    return values, indices


@repeats(_kth)
def kthvalue(input: Tensor, k: int, dim: int = -1, keepdim: bool = False, *, out: Any = None) -> Any:
    """The ``k``-th smallest element along ``dim`` and its position: a named tuple (torch.kthvalue).

    Element ``k - 1`` of the stable ``sort``: torch leaves open which of equal elements it is. Else as ``topk``.
    """
    found: Any = _into("kthvalue", out, _kth(input, k, dim, keepdim))
    return torch.return_types.kthvalue(found)


@replayed
def _sorted(input: Tensor, descending: bool, dim: int) -> tuple[Tensor, Tensor]:
    _check("sort", input)
    values, indices = _sort(input, descending, dim)
    return values, indices


@repeats(_sorted)
def sort(input: Tensor, dim: int = -1, descending: bool = False, stable: bool | None = True, *, out: Any = None) -> Any:
    """The elements in order along ``dim``, and where they were: a named tuple (torch.sort).

    Always stable, whatever ``stable``: equal elements keep their order, also if ``descending``. NaN is largest, -0.0
    equals 0.0. ``input``: floats, integers or bool of any shape and strides; the results are contiguous. The values'
    gradient goes to where they were. ``out``: a pair of tensors. Raises ``IndexError`` for ``dim``, ``RuntimeError``
    for complex numbers.
    """
    found: Any = _into("sort", out, _sorted(input, descending, dim))
    return torch.return_types.sort(found)


@replayed
def argsort(
    input: Tensor, dim: int = -1, descending: bool = False, stable: bool = True, *, out: Tensor | None = None
) -> Tensor:
    """Where the elements that ``sort`` returns were (torch.argsort), without those: less is written."""
    _check("argsort", input)
    (found,) = _into("argsort", None if out is None else [out], [_argsort(input, descending, dim)])
    return found


@replayed
def searchsorted(
    sorted_sequence: Tensor,
    input: Tensor | float,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: Literal["left", "right"] | None = None,
    sorter: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """For each element of ``input``, how many of its row of ``sorted_sequence`` are less (torch.searchsorted).

    Args:
        sorted_sequence: ascending along its last axis, or in the order of ``sorter``; its other axes are those of
            ``input``, or it has one axis.
        input: a tensor of its dtype, or a number.
        out_int32: the result is i32 in place of i64.
        right: elements that are equal count too.
        side: "right" is ``right=True``.
        sorter: i64 positions that sort ``sorted_sequence``, as ``argsort`` returns them. A position outside is moved
            to the nearest inside.

    Not differentiable. Raises ``RuntimeError`` for shapes and dtypes that do not fit.
    """
    if side not in (None, "left", "right"):
        raise RuntimeError(f"torch.searchsorted(): side can only be 'left' or 'right' but got {side}")
    if side == "left" and right:
        raise RuntimeError(
            "torch.searchsorted(): side and right can't be set to opposites, got side of left while right was True"
        )
    _check("searchsorted", sorted_sequence)
    if not isinstance(input, Tensor):
        input = torch.scalar_tensor(input, dtype=sorted_sequence.dtype, device=sorted_sequence.device)
        if sorted_sequence.dim() != 1:
            raise RuntimeError(
                "torch.searchsorted(): input value can be a scalar only when boundaries tensor dimension is 1, but we "
                f"got boundaries tensor dim({sorted_sequence.dim()})"
            )
    check_same_device("searchsorted", sorted_sequence, input, *(() if sorter is None else (sorter,)))
    found = _searchsorted(sorted_sequence.detach(), input.detach(), sorter, right or side == "right", out_int32)
    return _into("searchsorted", None if out is None else [out], [found])[0]
