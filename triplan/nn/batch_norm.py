"""Batch and group normalisation as modules of torch.nn, with its parameters, state and options, over our kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triplan import functional
from triplan.nn._modules import buffer, parameter

__all__ = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GroupNorm"]


def normalised(m: Any, input: Tensor, function: Callable[..., Tensor] = functional.batch_norm, *more: Any) -> Tensor:
    """As torch's modules: momentum None is the average over all batches; without running statistics, a batch's own.

    ``function``: ``batch_norm``, or one that takes ``more``.
    """
    m._check_input_dim(input)
    momentum = 0.0 if m.momentum is None else m.momentum
    if m.training and m.track_running_stats and (count := buffer(m, "num_batches_tracked")) is not None:
        count.add_(1)
        if m.momentum is None:
            momentum = 1.0 / float(count)
    mean, var = buffer(m, "running_mean"), buffer(m, "running_var")
    own = m.training or (mean is None and var is None)
    if m.training and not m.track_running_stats:
        mean = var = None
    return function(input, mean, var, parameter(m, "weight"), parameter(m, "bias"), own, momentum, m.eps, *more)


class BatchNorm1d(torch.nn.BatchNorm1d):
    """torch.nn.BatchNorm1d, computed by ``triplan.functional.batch_norm``."""

    def forward(self, input: Tensor) -> Tensor:
        return normalised(self, input)


class BatchNorm2d(torch.nn.BatchNorm2d):
    """torch.nn.BatchNorm2d, computed by ``triplan.functional.batch_norm``."""

    def forward(self, input: Tensor) -> Tensor:
        return normalised(self, input)


class BatchNorm3d(torch.nn.BatchNorm3d):
    """torch.nn.BatchNorm3d, computed by ``triplan.functional.batch_norm``."""

    def forward(self, input: Tensor) -> Tensor:
        return normalised(self, input)


class GroupNorm(torch.nn.GroupNorm):
    """torch.nn.GroupNorm, computed by ``triplan.functional.group_norm``."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.group_norm(
            input, self.num_groups, parameter(self, "weight"), parameter(self, "bias"), self.eps
        )
