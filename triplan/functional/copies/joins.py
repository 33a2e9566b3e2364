"""Tensors that are joined: a launch for each writes its part of the result."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch

from triplan.functional._ops import Recorded, composed
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import axis, check_same_device
from triplan.functional._sharding.axes import but
from triplan.functional.copies.conversions import converted
from triplan.functional.copies.engine import Tensor, write

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
    for t in tensors:
        if t.numel():
            write(out.narrow(dim, at, t.size(dim)), t)
        at += t.size(dim)
    return out


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

    Any number of tensors, of equal shapes but for ``dim``; those of shape (0,) are left out, as in torch. Each is one
    launch. Raises ``RuntimeError`` for shapes and devices that do not fit.
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
