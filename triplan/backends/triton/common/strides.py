"""Strides that are known when planning or read from the tensor, and tiles of rows: for kernels over any layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from triplan.backends.runtime.launch import Arg, Int, Stride, power_of_two_in
from triplan.backends.triton.common.offsets import ceil_power
from triplan.descriptors import Operand, packed_strides
from triplan.descriptors.layout import ordered_strides


class Along(NamedTuple):
    """A stride that only the tensor tells: that of its axis."""

    axis: int


def known_strides(o: Operand, rank: int) -> list[int | Along]:
    """The stride of ``o`` along each axis of a result of ``rank`` axes; 0 where it is broadcast."""
    order = o.layout.order
    known = ordered_strides(o.shape, order) if order else packed_strides(o.shape)
    found: list[int | Along] = [0] * (rank - len(o.shape))
    for axis, n in enumerate(o.shape):
        if n == 1 or axis in o.layout.zero_axes:
            found.append(0)
        elif o.layout.packed or order:
            found.append(known[axis])
        else:
            found.append(1 if axis == o.layout.unit_axis else Along(axis))
    return found


def in_memory(stride: int | Along) -> int:
    """Sorts dimensions by a tensor's stride: the known ones last, by decreasing strides. (A tensor knows all or, but
    for a 1, none.)"""
    return -(1 << 62) if isinstance(stride, Along) else -stride


def continues(outer: Sequence[int | Along], inner: Sequence[int | Along], size: int) -> bool:
    """Whether an axis with the strides ``outer``, one for each operand, and an axis of ``size`` with the strides
    ``inner`` within it are one axis in all operands."""
    pairs = zip(outer, inner, strict=True)
    return all(isinstance(s, int) and isinstance(t, int) and s == t * size for s, t in pairs)


def stride_arg(o: Operand, stride: int | Along, wide: bool = True) -> Arg:
    """The stride as a kernel argument, with the divisibility that the layout promises; a known one of 64 bits if
    ``wide``."""
    if isinstance(stride, Along):
        return Stride(o.name, stride.axis, divisibility=o.layout.stride_multiple)
    return Int(stride, wide, power_of_two_in(stride))


def axis_strides(o: Operand) -> tuple[Arg, ...]:
    """The stride of ``o`` along each axis as an argument; None for 1."""
    known = packed_strides(o.shape)

    def along(axis: int) -> Arg:
        if o.layout.packed:
            return None if known[axis] == 1 else Int(known[axis], True, power_of_two_in(known[axis]))
        if axis in o.layout.zero_axes:
            return Int(0, True, 16)
        return None if axis == o.layout.unit_axis else Stride(o.name, axis, divisibility=o.layout.stride_multiple)

    return tuple(along(axis) for axis in range(len(o.shape)))


def moving_strides(o: Operand) -> tuple[Arg, ...]:
    """As ``axis_strides``, but 0 along axes of one element: None says then that neighbours are adjacent."""
    return tuple(Int(0, True, 16) if n == 1 else s for n, s in zip(o.shape, axis_strides(o), strict=True))


def count(n: int) -> Int:
    """A number that masks compare with: they are of whole vectors if it is divisible by their length."""
    return Int(n, False, power_of_two_in(n))


def row_tile(elements: int, rows: int, *columns: int) -> tuple[int, int]:
    """(rows, columns) of a tile of ``elements``: the widest of those that leave few lanes idle.

    Few: at most a 32nd more tiles than of the shape that leaves the fewest. ``columns``: of tensors side by side.
    """
    widest = ceil_power(max(columns))
    widths = [w for w in (elements, elements // 2, elements // 4, elements // 8) if w <= widest]

    def tiles(width: int) -> int:
        return sum(-(-n // width) for n in columns) * -(-rows // (elements // width))

    widths = widths or [widest]
    fewest = min(map(tiles, widths))
    width = max(w for w in widths if 32 * tiles(w) <= 33 * fewest)
    return elements // width, width
