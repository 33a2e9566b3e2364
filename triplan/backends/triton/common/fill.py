"""Launches that fill a buffer, or round a buffer of sums into an operand."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch, power_of_two_in
from triplan.backends.triton.common import fill_kernels as kernels
from triplan.backends.triton.common.offsets import I32_LIMIT, padded, strides, values
from triplan.descriptors import Operand


def fill_launch(pointer: Arg, numel: int, value: int, operand: Operand | None = None) -> Launch:
    """Fill a packed buffer, or ``operand`` under its promised strides."""
    return _flat_launch(kernels.fill_kernel, {"out": pointer}, {"VALUE": value}, numel, operand)


def fold_launch(sums: Scratch, operand: Operand, keep: bool) -> Launch:
    """Round ``sums``, a packed buffer of the operand's shape, into the operand."""
    return _flat_launch(
        kernels.fold_kernel, {"sums": sums, "out": values(operand)}, {"KEEP": keep}, operand.numel, operand
    )


def _flat_launch(
    kernel: Any, args: dict[str, Arg], constexprs: dict[str, Any], numel: int, operand: Operand | None
) -> Launch:
    flat = operand is None or operand.layout.packed
    big = numel >= I32_LIMIT
    shape = () if operand is None or flat else operand.shape
    walked = [] if operand is None or flat else strides(operand, range(len(shape)), True)
    block = 4096 if flat else 512  # offsets of strided elements take a register pair each
    return Launch(
        kernel,
        -(-numel // block),
        {
            **args,
            "numel": Int(numel, big, power_of_two_in(numel)),
            "sizes": padded((Int(n, big) for n in shape), Int(1, big)),
            "strides": padded(walked, Int(0, True)),
        },
        {**constexprs, "POINT_TYPE": tl.int64 if big else tl.int32, "FLAT": flat, "BLOCK": block},
    )
