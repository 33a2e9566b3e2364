"""What torch's FlopCounterMode counts for our ops: 2 for each product of a matrix product or convolution, as torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from triplan.functional._shapes import broadcast

Shape = Sequence[int]
#: The positions of the factors among the arguments of each product, and the axis of the second whose extent is n.
PRODUCTS = {"mm": (0, 1, -1), "bmm": (0, 1, -1), "addmm": (1, 2, -1), "baddbmm": (1, 2, -1)}
PRODUCTS |= {"addbmm": (1, 2, -1), "linear": (0, 1, 0)}


def register() -> None:
    """Register the formulas, once the ops are."""
    for name, (first, second, axis) in PRODUCTS.items():
        _product(name, first, second, axis)
        _product(f"{name}_out", first + 1, second + 1, axis)

    @register_flop_formula(torch.ops.triplan.gemm_backward)
    def backward(dc: Shape, a: Shape, b: Shape, to_a: bool, to_b: bool, *rest: Any, **options: Any) -> int:
        return 2 * math.prod(a) * b[-1] * (to_a + to_b)

    @register_flop_formula(torch.ops.triplan.broadcast_bmm)
    def batches(a: Shape, b: Shape, *rest: Any, **options: Any) -> int:
        return int(2 * math.prod(broadcast(a[:-2], b[:-2])) * math.prod(a[-2:]) * b[-1])

    # An element of the smaller side of each product meets every tap and channel of a filter.
    for name, filters, sides in (
        ("conv2d", 1, None),
        ("conv2d_backward_input", 1, 0),
        ("conv2d_backward_weight", None, 1),
    ):
        _convolution(name, filters, sides)


def _convolution(name: str, filters: int | None, results: int | None) -> None:
    """2 * the elements of a convolution's result * those of a filter; None: of what the op returns."""

    @register_flop_formula(getattr(torch.ops.triplan, name))
    def flops(*args: Any, out_shape: Shape, **options: Any) -> int:
        filter_shape = out_shape if filters is None else args[filters]
        result = out_shape if results is None else args[results]
        return int(2 * math.prod(result) * math.prod(filter_shape[1:]))


def _product(name: str, first: int, second: int, axis: int) -> None:
    @register_flop_formula(getattr(torch.ops.triplan, name))
    def flops(*args: Any, **options: Any) -> int:  # the wrapper gives shapes for tensors
        return int(2 * math.prod(args[first]) * args[second][axis])
