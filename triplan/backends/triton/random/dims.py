"""Dimensions of random tensors: extents and strides, of which adjacent ones are merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triplan.backends.runtime.launch import Arg, Int
from triplan.backends.triton.common.offsets import I32_LIMIT, padded
from triplan.backends.triton.common.strides import Along, continues, known_strides, stride_arg
from triplan.descriptors import Operand, RandomDescriptor, packed_strides


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension of the result. strides: of the index in the stream, and of each of ``tensors``."""

    size: int
    strides: tuple[int | Along, ...]


def tensors(desc: RandomDescriptor) -> list[Operand]:
    """``out``, and ``x`` if there is one."""
    return [o for name in ("out", "x") for o in desc.operands() if o.name == name]


def dims(desc: RandomDescriptor) -> list[Dim]:
    """The dimensions, innermost last, without those of extent 1; adjacent ones are merged where all strides allow it.

    Indices are consecutive along the last one.
    """
    shape = desc.out_shape
    whole = packed_strides(shape if desc.global_shape is None else desc.global_shape)
    strides = [whole, *(known_strides(o, len(shape)) for o in tensors(desc))]
    merged: list[Dim] = []
    for axis, n in enumerate(shape):
        dim = Dim(n, tuple(s[axis] for s in strides))
        if n != 1 and merged and continues(merged[-1].strides, dim.strides, n):
            merged[-1] = Dim(merged[-1].size * n, dim.strides)
        elif n != 1:
            merged.append(dim)
    if not merged or merged[-1].strides[0] != 1:
        merged.append(Dim(1, (1,) + (0,) * len(tensors(desc))))
    return merged


def beside(outer: Sequence[Dim], columns: Dim) -> list[Dim]:
    """The dimensions along which a tensor is contiguous that is not along the columns."""
    return [d for d in outer if any(s == 1 != t for s, t in zip(d.strides[1:], columns.strides[1:], strict=True))]


def stride_args(
    desc: RandomDescriptor, i: int, outer: Sequence[Dim], tile: Sequence[Dim | None], count: int | None = None
) -> tuple[Arg, ...]:
    """Strides of the index (``i`` = 0) or of a tensor: (along ``outer``, along each of ``tile``).

    count: of how many of ``outer``; None: of as many as tuples are padded to. Of those of ``tile``, along which
    accesses may be consecutive, None is 1.
    """
    o = tensors(desc)[max(i - 1, 0)]
    far = i == 0 or o.numel >= I32_LIMIT or any(isinstance(d.strides[i], Along) for d in (*outer, *tile) if d)

    def along(dim: Dim) -> Arg:
        stride = dim.strides[i]
        return Int(stride, far) if i == 0 and isinstance(stride, int) else stride_arg(o, stride, far)

    known = (None if dim is None or dim.strides[i] == 1 else along(dim) for dim in tile)
    return padded([along(dim) for dim in outer], Int(0, far, 16))[:count], *known
