"""Padding and flattening as modules: those of torch.nn, whose forward is ours."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from triplan import functional
from triplan.functional._replay.replay import replayed
from triplan.functional._sharding import is_dtensor, reshaped
from triplan.nn._modules import module

# fmt: off
__all__ = [
    "ConstantPad1d", "ConstantPad2d", "ConstantPad3d", "Flatten", "ZeroPad1d", "ZeroPad2d", "ZeroPad3d",
]
# fmt: on


def pad(input: Tensor, padding: tuple[int, ...], value: float) -> Tensor:
    return functional.pad(input, padding, "constant", value)


@replayed
def _flattened(input: Tensor, start: int, end: int) -> Tensor:
    first, last = (axis % max(input.dim(), 1) for axis in (start, end))
    size, stride = input.shape, input.stride()
    if any(stride[i] != stride[i + 1] * size[i + 1] for i in range(first, last)):
        input = functional.contiguous(input)
    return reshaped(input, (*size[:first], math.prod(size[first : last + 1]), *size[last + 1 :]))


class Flatten(torch.nn.Flatten):
    """torch.nn.Flatten: a view where the strides allow one, else our copy."""

    def forward(self, input: Tensor) -> Tensor:
        if input.is_contiguous() and not is_dtensor(input):
            return super().forward(input)
        return _flattened(input, self.start_dim, self.end_dim)


ConstantPad1d = module("ConstantPad1d", pad, "padding", "value")
ConstantPad2d = module("ConstantPad2d", pad, "padding", "value")
ConstantPad3d = module("ConstantPad3d", pad, "padding", "value")
ZeroPad1d = module("ZeroPad1d", pad, "padding", "value")
ZeroPad2d = module("ZeroPad2d", pad, "padding", "value")
ZeroPad3d = module("ZeroPad3d", pad, "padding", "value")
