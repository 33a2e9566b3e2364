"""Dimensions of reductions: extents and strides, of which adjacent ones are merged."""

from __future__ import annotations

from typing import NamedTuple

from triplan.backends.triton.common.strides import Along
from triplan.backends.triton.reductions.expression_kernels import CONSTANT, STRIDED, UNIT
from triplan.descriptors import Operand
from triplan.descriptors.reductions import ReductionProblem

#: How an operand's offset changes along the rows or the columns of a tile.
STEPS: tuple[int, ...] = (CONSTANT.value, UNIT.value, STRIDED.value)


class Dim(NamedTuple):
    """A dimension: its extent, its stride in each tensor that is read, and in both results if it is kept."""

    size: int
    reads: tuple[int | Along, ...]
    out: int | Along = 0
    second: int | Along = 0


def distance(o: Operand, stride: int | Along) -> int:
    """A divisor of ``stride``, in bytes."""
    return (o.layout.stride_multiple if isinstance(stride, Along) else stride) * o.element.itemsize


def line_distance(desc: ReductionProblem, o: Operand) -> int:
    """A divisor of the distance between contiguous lines of ``o``, in elements. Of all axes there is one line."""
    if not desc.kept_axes:
        return 16
    return desc.reduced if o.layout.packed else o.layout.stride_multiple


def step_along(strides: list[int | Along]) -> int:
    """Which of STEPS an offset takes along dimensions with these strides."""
    return STEPS[0 if all(s == 0 for s in strides) else 1 if strides == [1] else 2]


def merged(dims: list[Dim]) -> list[Dim]:
    """The dimensions, outermost first, with those as one that are one in every operand."""
    found: list[Dim] = []
    for d in dims:
        outer = found[-1] if found else None
        if outer is not None and all(
            isinstance(s, int) and isinstance(t, int) and s == t * d.size
            for s, t in zip((*outer.reads, *outer[2:]), (*d.reads, *d[2:]), strict=True)
        ):
            found[-1] = Dim(outer.size * d.size, *d[1:])
        else:
            found.append(d)
    return found


def in_order(dims: list[Dim], results: int) -> bool:
    """Whether each of so many results lies in memory as the points of ``dims``, outermost first, are numbered."""
    apart = 1
    for d in reversed(dims):
        if any(s != apart for s in (d.out, d.second)[:results]):
            return False
        apart *= d.size
    return True
