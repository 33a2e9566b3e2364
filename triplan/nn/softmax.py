"""Softmax as modules: those of torch.nn, whose forward is ours."""

from __future__ import annotations

from triplan.functional import log_softmax, softmax
from triplan.nn._modules import module

__all__ = ["LogSoftmax", "Softmax"]

LogSoftmax = module("LogSoftmax", log_softmax, "dim")
Softmax = module("Softmax", softmax, "dim")
