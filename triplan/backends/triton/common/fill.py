"""Launches that fill a buffer, and that round a buffer of sums into an operand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch, power_of_two_in
from triplan.backends.triton.common import fill_kernels as kernels
from triplan.backends.triton.common.offsets import I32_LIMIT, extents, padded, strides, values
from triplan.descriptors import Operand

#: Elements per program of a packed buffer. Untuned.
FLAT_BLOCK = 4096
#: Elements per program of a strided operand: each offset takes two registers. Untuned.
STRIDED_BLOCK = 512


def fill_launch(pointer: Arg, numel: int, value: int, operand: Operand | None = None) -> Launch:
    """Set ``numel`` elements at ``pointer`` to ``value``: packed, or ``operand``'s in its layout."""
    # Any order will do: along the contiguous axis neighbours share a sector.
    unit = None if operand is None else operand.layout.unit_axis
    axes = [] if operand is None else sorted(range(len(operand.shape)), key=lambda axis: axis == unit)
    return elements_launch(kernels.fill_kernel, {"out": pointer}, {"VALUE": value}, numel, operand, axes)


def fold_launch(sums: Scratch, operand: Operand, keep: bool) -> Launch:
    """Round ``sums``, packed and of the operand's shape, into the operand; with ``keep``, add to what it holds."""
    args: dict[str, Arg] = {"sums": sums, "out": values(operand)}
    return elements_launch(kernels.fold_kernel, args, {"KEEP": keep}, operand.numel, operand, range(len(operand.shape)))


def elements_launch(
    kernel: Any,
    args: dict[str, Arg],
    constexprs: dict[str, Any],
    numel: int,
    operand: Operand | None,
    axes: Sequence[int],
) -> Launch:
    """One launch over ``numel`` elements; the layout is the operand's, or packed where it is None.

    ``axes``: the operand's in the order in which its elements are numbered, outermost first.
    """
    flat = operand is None or operand.layout.packed
    wide = numel >= I32_LIMIT
    shape = () if operand is None or flat else tuple(operand.shape[axis] for axis in axes)
    along = [] if operand is None or flat else strides(operand, axes, True)
    block = FLAT_BLOCK if flat else STRIDED_BLOCK
    return Launch(
        kernel,
        -(-numel // block),
        {
            **args,
            "numel": Int(numel, wide, power_of_two_in(numel)),
            "sizes": extents(shape, wide),
            "strides": padded(along, Int(0, True)),
        },
        {**constexprs, "POINT_TYPE": tl.int64 if wide else tl.int32, "FLAT": flat, "BLOCK": block},
    )
