"""Dropout as modules: those of torch.nn, whose forward is ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triplan.functional import dropout, dropout1d, dropout2d, dropout3d

__all__ = ["Dropout", "Dropout1d", "Dropout2d", "Dropout3d"]


def _module(name: str, function: Callable[..., Tensor]) -> type[torch.nn.Module]:
    def forward(self: Any, input: Tensor) -> Tensor:
        return function(input, self.p, self.training, self.inplace)

    doc = f"``functional.{function.__name__}`` as a module, with the arguments of torch's."
    return type(name, (getattr(torch.nn, name),), {"forward": forward, "__doc__": doc, "__module__": __name__})


Dropout = _module("Dropout", dropout)
Dropout1d = _module("Dropout1d", dropout1d)
Dropout2d = _module("Dropout2d", dropout2d)
Dropout3d = _module("Dropout3d", dropout3d)
