"""Dropout as modules: those of torch.nn, whose forward is ours."""

from __future__ import annotations

from triplan.functional import dropout, dropout1d, dropout2d, dropout3d
from triplan.nn._modules import module

__all__ = ["Dropout", "Dropout1d", "Dropout2d", "Dropout3d"]

_HOW = ("p", "training", "inplace")

Dropout = module("Dropout", dropout, *_HOW)
Dropout1d = module("Dropout1d", dropout1d, *_HOW)
Dropout2d = module("Dropout2d", dropout2d, *_HOW)
Dropout3d = module("Dropout3d", dropout3d, *_HOW)
