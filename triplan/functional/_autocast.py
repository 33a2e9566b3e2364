"""The conversions of torch's autocast, for ops that share a name with one that torch converts.

Which ops it converts, on which device, differs between versions of torch (rms_norm on GPUs: not before 2.12),
so torch's own dispatch table is asked. To what it converts, the table does not say: matrix products are computed in the
autocast dtype; losses, softmax and norms in f32. f64 stays f64.
"""

from __future__ import annotations

import re
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", Tensor, Tensor | None)
#: Whether autocast is on for any device. Asking for a tensor's device takes ten times as long.
_on = torch._C._is_any_autocast_enabled


#: The ops of torch that a function of ours stands for; conversion of any of them converts its operands.
_OPS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("mm", "bmm", "addmm", "addbmm", "baddbmm", "linear", "matmul")},
    **{name: (name,) for name in ("conv1d", "conv2d")},
    **{name: (name,) for name in ("rms_norm", "layer_norm", "group_norm", "nll_loss", "cumsum", "cumprod")},
    "scaled_dot_product_attention": ("scaled_dot_product_attention",),
    "l2_norm": ("norm.ScalarOpt_dim",),
    "sum": ("sum.dim_IntList",),
    "prod": ("prod.dim_int",),
    "vector_norm": ("linalg_vector_norm",),
    **{name: (f"{name}.dim",) for name in ("mean", "var", "std")},
    "logsumexp": ("logsumexp",),
    "softmax": ("softmax.int",),
    "log_softmax": ("log_softmax.int",),
    "cross_entropy": ("cross_entropy_loss", "nll_loss"),
    **{name: (name,) for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")},
    "interpolate nearest": ("upsample_nearest2d",),
    "interpolate nearest-exact": ("_upsample_nearest_exact2d",),
    "interpolate linear": ("upsample_linear1d",),
    "interpolate bilinear": ("upsample_bilinear2d",),
}
#: Elementwise functions that torch may compute in f32; of the others it converts for, promotion does the same.
_WIDENED = re.compile(r"aten::((acos|asin|cosh|expm?1?|log(2|10|1p)?|pow|reciprocal|rsqrt|sinh|softplus|tan)\b(?!_).*)")
for _op in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
    if (_found := _WIDENED.fullmatch(_op)) is not None:
        _OPS[_found[2]] = (*_OPS.get(_found[2], ()), _found[1])
_OPS["prelu"] = ("prelu",)
#: The functions whose operands the installed torch converts, by kind of device.
CONVERTED = {
    kind: frozenset(
        name
        for name, ops in _OPS.items()
        if any(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", key) for op in ops)
    )
    for kind, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA"))
}


def narrowed(name: str, *tensors: T) -> tuple[T, ...]:
    """``tensors``, converted to the autocast dtype of their device if autocast is on and converts for ``name``."""
    return _cast(name, tensors, None) if _on() else tensors


def widened(name: str, *tensors: T) -> tuple[T, ...]:
    """``tensors``, converted to f32 if autocast is on and converts for the function ``name``."""
    return _cast(name, tensors, torch.float32) if _on() else tensors


def _cast(name: str, tensors: tuple[T, ...], dtype: torch.dtype | None) -> tuple[T, ...]:
    kind = next((t.device.type for t in tensors if t is not None), "cpu")
    if name not in CONVERTED.get(kind, ()) or not torch.is_autocast_enabled(kind):
        return tensors
    wanted = torch.get_autocast_dtype(kind) if dtype is None else dtype
    return tuple(
        t.to(wanted) if t is not None and t.is_floating_point() and t.dtype is not torch.float64 else t for t in tensors
    )
