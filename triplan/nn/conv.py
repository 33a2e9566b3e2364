"""Convolutions as modules: those of torch.nn, with the same parameters, state and options, over our kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triplan import functional
from triplan.errors import Unsupported, shown

__all__ = ["Conv1d", "Conv2d"]


def _convolved(call: Callable[..., Tensor], module: Any, input: Tensor) -> Tensor:
    if module.padding_mode != "zeros":
        raise Unsupported(
            f"padding_mode = {shown(module.padding_mode)}: only zeros; pad the input by torch.nn.functional.pad, and "
            "convolve without padding"
        )
    stride, padding, dilation = module.stride, module.padding, module.dilation
    return call(input, module.weight, module.bias, stride, padding, dilation, module.groups)


class Conv1d(torch.nn.Conv1d):
    """torch.nn.Conv1d, computed by ``triplan.functional.conv1d``; its forward refuses other padding than zeros."""

    def forward(self, input: Tensor) -> Tensor:
        return _convolved(functional.conv1d, self, input)


class Conv2d(torch.nn.Conv2d):
    """torch.nn.Conv2d, computed by ``triplan.functional.conv2d``; its forward refuses other padding than zeros."""

    def forward(self, input: Tensor) -> Tensor:
        return _convolved(functional.conv2d, self, input)
