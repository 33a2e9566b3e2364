"""What the modules share: one from a function, and parameters and buffers read quickly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def module(name: str, function: Callable[..., Tensor], *attributes: str) -> type[torch.nn.Module]:
    """torch.nn's module of that name, or one without parameters where torch has none, whose forward is ``function``
    of the input and of these attributes of the module."""

    def forward(self: Any, input: Tensor) -> Tensor:
        return function(input, *[getattr(self, a) for a in attributes])

    base = getattr(torch.nn, name, torch.nn.Module)
    doc = f"``functional.{function.__name__}`` as a module, with the arguments of torch's, if there is one."
    made: type[torch.nn.Module] = type(name, (base,), {"forward": forward, "__doc__": doc, "__module__": "triplan.nn"})
    return made


def parameter(module: torch.nn.Module, name: str) -> Any:
    """``module.name``, without the half microsecond that torch takes to look for an ordinary attribute first."""
    own = module._parameters
    return own[name] if name in own else getattr(module, name)  # a parametrisation has taken its place


def buffer(module: torch.nn.Module, name: str) -> Any:
    """``module.name``, of a buffer as quickly as ``parameter``."""
    own = module._buffers
    return own[name] if name in own else getattr(module, name)
