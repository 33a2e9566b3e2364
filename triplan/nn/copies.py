"""Padding as modules: those of torch.nn, whose forward is ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triplan.functional import pad

__all__ = ["ConstantPad1d", "ConstantPad2d", "ConstantPad3d", "ZeroPad1d", "ZeroPad2d", "ZeroPad3d"]


def _module(name: str) -> type[torch.nn.Module]:
    def forward(self: Any, input: Tensor) -> Tensor:
        return pad(input, self.padding, "constant", self.value)

    doc = "``functional.pad`` as a module, with the arguments of torch's."
    return type(name, (getattr(torch.nn, name),), {"forward": forward, "__doc__": doc, "__module__": __name__})


ConstantPad1d = _module("ConstantPad1d")
ConstantPad2d = _module("ConstantPad2d")
ConstantPad3d = _module("ConstantPad3d")
ZeroPad1d = _module("ZeroPad1d")
ZeroPad2d = _module("ZeroPad2d")
ZeroPad3d = _module("ZeroPad3d")
