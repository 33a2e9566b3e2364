"""A linear layer: torch's module, with the same parameters, state and options, over our kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from triplan import functional
from triplan.nn._modules import parameter

__all__ = ["Linear"]


class Linear(torch.nn.Linear):
    """torch.nn.Linear, computed by ``triplan.functional.linear``."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        return functional.linear(input, parameter(self, "weight"), parameter(self, "bias"))
