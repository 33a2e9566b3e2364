"""Argument checks that several ops share, with torch's messages. All work on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import torch

from triplan.errors import shown

Tensor = torch.Tensor
#: What a number of Python is, also while torch.compile traces a call.
NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
# Untyped in torch.
_check: Callable[..., None] = torch._check
broadcast: Callable[..., torch.Size] = torch.broadcast_shapes
INDEX_DTYPES = (torch.int32, torch.int64)
#: Integers that are accumulated in i32: the low bytes of a sum or product do not depend on the high ones.
NARROW = (torch.int8, torch.uint8, torch.int16, torch.bool)


def require(condition: Any, message: Callable[[], str]) -> None:
    """Raise ``RuntimeError`` unless ``condition``. A symbolic condition that is not known yet is checked later."""
    if torch.compiler.is_dynamo_compiling():
        _check(condition)  # dynamo takes constant messages only; the op's fake kernel has this message
    else:
        _check(condition, message)


def integer(value: Any) -> Any:
    """The int that ``value`` stands for, as numpy's integers do; others unchanged."""
    return value if isinstance(value, (int, torch.SymInt)) or not hasattr(value, "__index__") else index(value)


def plain_number(value: Any) -> Any:
    """Of a number of numpy, or in a tensor, that of Python: its type says the result's."""
    if isinstance(value, NUMBERS) or not hasattr(value, "item"):
        return value
    found = value.item()
    # torch takes numpy's bool for a float.
    return float(found) if isinstance(found, bool) and not isinstance(value, Tensor) else found


def axis(dim: int, rank: int) -> int:
    """``dim`` as a non-negative axis; a 0-d tensor has one axis. Raises ``IndexError``."""
    dim, rank = integer(dim), max(rank, 1)
    if not -rank <= dim < rank:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {shown(dim)})"
        )
    return dim % rank


def at_least_1d(t: Tensor) -> Tensor:
    """A view of a 0-d tensor as one element; others unchanged."""
    return t.unsqueeze(0) if t.dim() == 0 else t


def empty_in_order(shape: Sequence[int], *inputs: Tensor) -> Tensor:
    """Memory for a result of four axes: channels last where an input is, as torch has it."""
    last = any(t.size(1) > 1 and t.stride(1) == 1 and not t.is_contiguous() for t in inputs)
    order = torch.channels_last if last else torch.contiguous_format
    return torch.empty(shape, dtype=inputs[0].dtype, device=inputs[0].device, memory_format=order)


def for_each_axis(name: str, what: str, value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """One number for each axis."""
    value = integer(value)
    if isinstance(value, int):
        return (value,) * axes
    found = tuple(map(integer, value))
    if len(found) not in (1, axes):
        raise RuntimeError(
            f"{name}(): expected {what} to be a single integer value or a list of {axes} values, but "
            f"got {what}={shown(value)}"
        )
    return found * axes if len(found) != axes else found


def narrowed(t: Tensor, shape: Sequence[int], keep: int | None = None) -> Tensor:
    """A view of ``t``, narrowed to the leading ``shape`` along every axis but ``keep``."""
    for d, n in enumerate(shape):
        if d != keep and t.size(d) != n:
            t = t.narrow(d, 0, n)
    return t


def check_index_dtype(op: str, index: Tensor) -> None:
    """Raise ``RuntimeError`` unless ``index`` is i32 or i64."""
    if index.dtype not in INDEX_DTYPES:
        raise RuntimeError(f"{op}(): Expected dtype int32/int64 for index, but got {index.dtype}")


def check_same_device(op: str, *tensors: Tensor) -> None:
    """Raise ``RuntimeError`` unless all are on one device."""
    for t in tensors:
        if t.device != tensors[0].device:
            raise RuntimeError(
                f"{op}(): Expected all tensors to be on the same device, but found at least two devices, "
                f"{tensors[0].device} and {t.device}!"
            )


def check_same_dtype(op: str, name: str, source: Tensor, target: Tensor) -> None:
    """Raise ``RuntimeError`` unless ``source`` has the dtype of the tensor it is written to."""
    if source.dtype != target.dtype:
        raise RuntimeError(
            f"{op}(): Expected self.dtype to be equal to {name}.dtype, got {target.dtype}, {source.dtype}"
        )


def check_fits(op: str, index: Tensor, other: Tensor, name: str, keep: int | None = None) -> None:
    """Raise ``RuntimeError`` unless ``index`` has ``other``'s rank and is no larger along every axis but ``keep``."""
    index, other = at_least_1d(index), at_least_1d(other)
    if index.dim() != other.dim():
        raise RuntimeError(f"{op}(): Index tensor must have the same number of dimensions as {name} tensor")
    for d in range(index.dim()):
        if d != keep:
            require(
                index.size(d) <= other.size(d),
                lambda: (
                    f"{op}(): Size does not match: expected index {list(index.shape)} to be no larger than {name} "
                    f"{list(other.shape)}" + ("" if keep is None else f" apart from dimension {keep}")
                ),
            )
