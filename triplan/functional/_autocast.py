"""The conversions of torch's autocast, for functions that stand for one that torch converts for.

Which these are, on which device, differs between versions of torch (rms_norm on GPUs: not before 2.12), so torch's own
dispatch table is asked. To what it converts, the table does not say: matrix products are computed in the autocast
dtype; losses, softmax and norms in f32. f64 stays f64.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", Tensor, Tensor | None)
#: Whether autocast is on for any device. Asking for a tensor's device takes ten times as long.
_on = torch._C._is_any_autocast_enabled
#: The ops whose operands the installed torch converts, by kind of device; without the names of their overloads.
CONVERTED = {
    kind: frozenset(
        op.removeprefix("aten::").partition(".")[0]
        for op in torch._C._dispatch_get_registrations_for_dispatch_key(key)
        if op.startswith("aten::")
    )
    for kind, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA"))
}


def narrowed(op: str, *tensors: T) -> tuple[T, ...]:
    """``tensors``, converted to their device's autocast dtype if autocast is on and converts for torch's ``op``."""
    return _cast(op, tensors, None) if _on() else tensors


def widened(op: str, *tensors: T) -> tuple[T, ...]:
    """``tensors``, converted to f32 if autocast is on and converts for torch's ``op``."""
    return _cast(op, tensors, torch.float32) if _on() else tensors


def _cast(op: str, tensors: tuple[T, ...], dtype: torch.dtype | None) -> tuple[T, ...]:
    kind = next((t.device.type for t in tensors if t is not None), "cpu")
    if op not in CONVERTED.get(kind, ()) or not torch.is_autocast_enabled(kind):
        return tensors
    wanted = torch.get_autocast_dtype(kind) if dtype is None else dtype
    return tuple(
        t.to(wanted) if t is not None and t.is_floating_point() and t.dtype is not torch.float64 else t for t in tensors
    )
