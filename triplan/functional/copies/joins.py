"""Tensors that are joined: by one launch for up to eight of them, or by one for each, which writes its part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import torch

from triplan.descriptors.copies import MOST_JOINED
from triplan.descriptors.layout import is_packed
from triplan.facade import JoinPlan
from triplan.functional._ops import Recorded, composed
from triplan.functional._plans import run
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import axis, check_same_device
from triplan.functional._sharding.axes import but
from triplan.functional.copies.conversions import converted
from triplan.functional.copies.engine import Tensor, as_bits, write

__all__ = ["cat", "stack"]


def _joined_shape(tensors: Sequence[Tensor], dim: int) -> list[int]:
    first = tensors[0]
    for t in tensors[1:]:
        if t.dim() != first.dim() or any(a != dim and t.size(a) != n for a, n in enumerate(first.shape)):
            raise RuntimeError(
                f"cat(): sizes of tensors must match except in dimension {dim}, but got {list(first.shape)} and "
                f"{list(t.shape)}"
            )
    return [sum(t.size(dim) for t in tensors) if a == dim else n for a, n in enumerate(first.shape)]


def _joined_fake(*args: Any) -> Tensor:
    *tensors, dim = args
    check_same_device("cat", *tensors)
    out: Tensor = tensors[0].new_empty(
        _joined_shape(tensors, dim), dtype=reduce(torch.promote_types, (t.dtype for t in tensors))
    )
    return out


def _joined(*args: Any) -> Tensor:
    *tensors, dim = args
    out, at = _joined_fake(*args), 0
    given = [t for t in tensors if t.numel()]
    for i in range(0, len(given), MOST_JOINED):
        group = given[i : i + MOST_JOINED]
        n = sum(t.size(dim) for t in group)
        _write(out.narrow(dim, at, n), group, dim)
        at += n
    return out


def _write(out: Tensor, tensors: Sequence[Tensor], dim: int) -> None:
    """``out = tensors`` along ``dim``."""
    if len(tensors) > 1 and (found := _matrices([*tensors, out], dim)) is not None:
        run(JoinPlan, {**{f"x{i}": x for i, x in enumerate(found[:-1])}, "out": found[-1]})
        return
    at = 0
    for t in tensors:
        write(out.narrow(dim, at, t.size(dim)), t)
        at += t.size(dim)


def _matrices(tensors: Sequence[Tensor], dim: int) -> list[Tensor] | None:
    """``tensors`` as matrices, whose columns are the positions along ``dim`` and the axes after it.

    None if dtypes differ, if the columns are not contiguous, if the rows are not equally far apart, or are many of few
    bytes, unless all tensors are packed and all their rows short.
    """
    if any(t.dtype is not tensors[0].dtype for t in tensors):
        return None
    *parts, out = tensors
    # Packed tensors of short rows fill a packed result as a whole.
    are_short = all(math.prod(t.shape[dim:]) * t.element_size() < _LONG for t in parts)
    least = 1 if out.nbytes < _FEW or (are_short and all(t.is_contiguous() for t in tensors)) else _LONG
    found = []
    for t in tensors:
        t = as_bits(t.resolve_conj().resolve_neg())
        rows, columns = math.prod(t.shape[:dim]), math.prod(t.shape[dim:])
        outer = [d for d in zip(t.shape[:dim], t.stride()[:dim], strict=True) if d[0] != 1]
        even = all(s == n * step for (_, s), (n, step) in pairwise(outer))
        short = rows > 1 and columns * t.element_size() < least
        if short or not even or not is_packed(t.shape[dim:], t.stride()[dim:]):
            return None
        found.append(t.as_strided((rows, columns), (outer[-1][1] if outer else columns, 1)))
    return found


def _joined_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.dim = inputs
    ctx.parts = [(t.size(ctx.dim), t.dtype) for t in tensors]


def _joined_back(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    found: list[Tensor | None] = []
    at = 0
    for (n, dtype), needed in zip(ctx.parts, ctx.needs_input_grad, strict=False):
        found.append(converted(g.narrow(ctx.dim, at, n), dtype) if needed else None)
        at += n
    return *found, None


def _joined_axes(*args: Any) -> str:
    *tensors, dim = args
    axes = but(len(tensors[0].shape), dim)
    return f"{', '.join([axes] * len(tensors))} -> {axes}"


#: Bytes of a tensor's rows from which on one launch joins it to others: its threads take consecutive columns, and most
#: would be idle. Not so where the result has few bytes: there launches cost more. Both untuned.
_LONG, _FEW = 64, 1 << 21
#: Tensors that one op in a compiled graph joins.
_MOST = 16
#: By the number of tensors: compiled code finds these, others are registered when they are first called.
_CAT: dict[int, Recorded] = {}


def _cat_op(n: int) -> Recorded:
    found = _CAT.get(n)
    if found is None:
        signature = f"({', '.join(f'Tensor t{i}' for i in range(n))}, SymInt dim) -> Tensor"
        how: dict[str, Any] = {"axes": _joined_axes, "setup": _joined_setup, "backward": _joined_back}
        made = Recorded(f"cat_{n}", signature, _joined, _joined_fake, **how)
        found = _CAT.setdefault(n, made)
    return found


for _n in range(1, _MOST + 1):
    _cat_op(_n)


@replayed
def cat(tensors: Sequence[Tensor], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
    """``tensors`` one after another along ``dim``, as ``torch.cat``: of the dtype that theirs promote to.

    Any number of tensors, of equal shapes but for ``dim``; those of shape (0,) are left out, as in torch. One launch
    joins up to eight of one dtype whose rows are contiguous; of others each is one launch. Raises ``RuntimeError`` for
    shapes and devices that do not fit.
    """
    if not tensors:
        raise RuntimeError("cat(): expected a non-empty list of Tensors")
    if any(t.dim() == 0 for t in tensors):
        raise RuntimeError("cat(): zero-dimensional tensors cannot be concatenated")
    given = [t for t in tensors if t.dim() != 1 or t.size(0)] or list(tensors[:1])
    return _cat(given, axis(dim, given[0].dim()), out, tensors)


def _cat(given: Sequence[Tensor], dim: int, out: Tensor | None, tensors: Sequence[Tensor]) -> Tensor:
    dtype = reduce(torch.promote_types, (t.dtype for t in tensors))
    whole: list[Tensor] = [converted(given[0], dtype), *given[1:]] if given[0].dtype != dtype else list(given)
    return composed("cat", out, whole, lambda: _all(whole, dim))


def _all(tensors: Sequence[Tensor], dim: int) -> Tensor:
    if torch.compiler.is_compiling() and len(tensors) > _MOST:  # dynamo registers no ops
        return _all([_all(tensors[i : i + _MOST], dim) for i in range(0, len(tensors), _MOST)], dim)
    found: Tensor = _cat_op(len(tensors))(*tensors, dim)
    return found


@replayed
def stack(tensors: Sequence[Tensor], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
    """``tensors`` of one shape along a new axis ``dim``, as ``torch.stack``."""
    if not tensors:
        raise RuntimeError("stack(): expected a non-empty list of Tensors")
    for t in tensors:
        if t.shape != tensors[0].shape:
            raise RuntimeError(
                f"stack(): expects each tensor to be equal size, but got {list(tensors[0].shape)} and {list(t.shape)}"
            )
    at = axis(dim, tensors[0].dim() + 1)
    given = [t.unsqueeze(at) for t in tensors]
    return _cat(given, at, out, given)
