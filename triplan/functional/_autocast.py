"""The conversions of torch's autocast, for ops that share a name with one on its lists.

The lists are torch's own ("Automatic Mixed Precision package", "CUDA Ops that can autocast to float16" and "... to
float32"): matrix products are computed in the autocast dtype, losses in f32, and on GPUs softmax and norms in f32 too;
torch's list of the CPU lacks these. f64 stays f64.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T", Tensor, Tensor | None)
#: Whether autocast is on for any device. Asking for a tensor's device takes ten times as long.
_on = torch._C._is_any_autocast_enabled


def narrowed(*tensors: T) -> tuple[T, ...]:
    """``tensors``, converted to the autocast dtype of their device if autocast is on."""
    return _cast(tensors, None) if _on() else tensors


def widened(*tensors: T, on_cpu: bool = False) -> tuple[T, ...]:
    """``tensors``, converted to f32 if autocast is on: on GPUs, and ``on_cpu``."""
    if not _on() or not (on_cpu or any(t is not None and t.device.type != "cpu" for t in tensors)):
        return tensors
    return _cast(tensors, torch.float32)


def without(t: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast: the routes that skip the dispatcher are open only to calls that no mode watches."""
    return torch.autocast(t.device.type, enabled=False) if _on() else nullcontext()


def _cast(tensors: tuple[T, ...], dtype: torch.dtype | None) -> tuple[T, ...]:
    kind = next((t.device.type for t in tensors if t is not None), "cpu")
    if not torch.is_autocast_enabled(kind):
        return tensors
    wanted = torch.get_autocast_dtype(kind) if dtype is None else dtype
    return tuple(
        t.to(wanted) if t is not None and t.is_floating_point() and t.dtype is not torch.float64 else t for t in tensors
    )
