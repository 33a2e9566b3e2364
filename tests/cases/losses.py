"""Losses over classes: problems with those options that an op has."""

from __future__ import annotations

from typing import Any

import triplan as tp
from cases.rows import strided

__all__ = ["build", "strided"]


def build(op: str, shape: tuple[int, ...], axis: int = 1, element: str = "f32", **options: Any) -> tp.Descriptor:
    """With those options that the op has; class 1 is ignored, which random targets hit."""
    cls = tp.descriptor_types()[op]
    options = {"class_axis": axis, "ignore_index": 1, **options}
    return cls(input_shape=shape, element=element, **{k: v for k, v in options.items() if k in cls.model_fields})
