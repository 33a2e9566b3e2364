"""What torch's autocast makes of operands, for ops that are named like one on its lists.

The lists are torch's own ("Automatic Mixed Precision package", "CUDA Ops that can autocast to float16" and "... to
float32"): matrix products take the autocast dtype, softmax, norms and losses f32. f64 is left as it is. On the CPU too
it is these lists that hold; torch's for it are shorter.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T", Tensor, Tensor | None)
#: Whether autocast is on for any device: a tenth of what asking for a tensor's takes.
_on = torch._C._is_any_autocast_enabled


def narrowed(*tensors: T) -> tuple[T, ...]:
    """``tensors`` in the autocast dtype of their device, where autocast is on."""
    return _cast(tensors, None) if _on() else tensors


def widened(*tensors: T) -> tuple[T, ...]:
    """``tensors`` in f32, where autocast is on."""
    return _cast(tensors, torch.float32) if _on() else tensors


def without(t: Tensor) -> AbstractContextManager[Any]:
    """Where autocast is on, a context in which it is off: shorter routes are for calls that nothing watches."""
    return torch.autocast(t.device.type, enabled=False) if _on() else nullcontext()


def _cast(tensors: tuple[T, ...], dtype: torch.dtype | None) -> tuple[T, ...]:
    kind = next((t.device.type for t in tensors if t is not None), "cpu")
    if not torch.is_autocast_enabled(kind):
        return tensors
    wanted = torch.get_autocast_dtype(kind) if dtype is None else dtype
    return tuple(
        t.to(wanted) if t is not None and t.is_floating_point() and t.dtype is not torch.float64 else t for t in tensors
    )
