"""Pooling and resizing as modules: those of torch.nn, with the same options, over our kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triplan import functional

__all__ = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AvgPool1d",
    "AvgPool2d",
    "MaxPool1d",
    "MaxPool2d",
    "Upsample",
    "UpsamplingBilinear2d",
    "UpsamplingNearest2d",
]


def _largest(m: Any) -> tuple[Any, ...]:
    return m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode, m.return_indices


class MaxPool1d(torch.nn.MaxPool1d):
    """torch.nn.MaxPool1d, computed by ``triplan.functional.max_pool1d``."""

    def forward(self, input: Tensor) -> Any:
        return functional.max_pool1d(input, *_largest(self))


class MaxPool2d(torch.nn.MaxPool2d):
    """torch.nn.MaxPool2d, computed by ``triplan.functional.max_pool2d``."""

    def forward(self, input: Tensor) -> Any:
        return functional.max_pool2d(input, *_largest(self))


class AvgPool1d(torch.nn.AvgPool1d):
    """torch.nn.AvgPool1d, computed by ``triplan.functional.avg_pool1d``."""

    def forward(self, input: Tensor) -> Tensor:
        how = (self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad)
        return functional.avg_pool1d(input, *how)


class AvgPool2d(torch.nn.AvgPool2d):
    """torch.nn.AvgPool2d, computed by ``triplan.functional.avg_pool2d``."""

    def forward(self, input: Tensor) -> Tensor:
        how = (self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad)
        return functional.avg_pool2d(input, *how, self.divisor_override)


class AdaptiveAvgPool1d(torch.nn.AdaptiveAvgPool1d):
    """torch.nn.AdaptiveAvgPool1d, computed by ``triplan.functional.adaptive_avg_pool1d``."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.adaptive_avg_pool1d(input, self.output_size)


class AdaptiveAvgPool2d(torch.nn.AdaptiveAvgPool2d):
    """torch.nn.AdaptiveAvgPool2d, computed by ``triplan.functional.adaptive_avg_pool2d``."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.adaptive_avg_pool2d(input, self.output_size)


def _resized(m: Any, input: Tensor) -> Tensor:
    how = (m.size, m.scale_factor, m.mode, m.align_corners, m.recompute_scale_factor)
    return functional.interpolate(input, *how)


class Upsample(torch.nn.Upsample):
    """torch.nn.Upsample, computed by ``triplan.functional.interpolate``."""

    def forward(self, input: Tensor) -> Tensor:
        return _resized(self, input)


class UpsamplingNearest2d(torch.nn.UpsamplingNearest2d):
    """torch.nn.UpsamplingNearest2d, computed by ``triplan.functional.interpolate``."""

    def forward(self, input: Tensor) -> Tensor:
        return _resized(self, input)


class UpsamplingBilinear2d(torch.nn.UpsamplingBilinear2d):
    """torch.nn.UpsamplingBilinear2d, computed by ``triplan.functional.interpolate``."""

    def forward(self, input: Tensor) -> Tensor:
        return _resized(self, input)
