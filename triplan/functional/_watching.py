"""What watches a call of ours: gradients, transforms, modes, autocast, tensor subclasses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from triplan.sku.facts import fact

Tensor = torch.Tensor


def tensors_in(args: Sequence[Any]) -> Iterator[Tensor]:
    """Every tensor among ``args``, those in lists too."""
    for a in args:
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, (list, tuple)):
            yield from (t for t in a if isinstance(t, Tensor))


def needs_grad(args: Sequence[Any]) -> bool:
    """Whether autograd would record a call with ``args``."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(args))


def on_gpu(args: Sequence[Any]) -> bool:
    """Whether the first tensor among ``args`` is on a GPU."""
    return next((t.is_cuda for t in tensors_in(args)), False)


def transformed() -> bool:
    """Whether functorch or forward-mode AD is active. A Function says what it supports, a registered op cannot."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def nothing_watches(args: Sequence[Any], *, modes: int = 0) -> bool:
    """Whether the dispatcher would go straight to the kernel, so that it can be skipped.

    True for plain CPU and CUDA tensors (no subclass, no lazy view) without a tracer and modes; ``modes`` of our own do
    not count. Autocast converts for no op of ours. Callers handle functorch and gradients.
    """
    if torch._C._len_torch_dispatch_stack() > modes:
        return False
    if torch._C._len_torch_function_stack() or torch._C._get_tracing_state():
        return False
    inference = torch.is_inference_mode_enabled()
    return all(
        torch._C._dispatch_keys(t).raw_repr() == _plain_keys(t.device.type, inference and t.is_inference())
        for t in tensors_in(args)
    )


@fact
def _plain_keys(device_type: str, inference: bool) -> int:
    if device_type not in ("cpu", "cuda"):
        return -1
    with torch.inference_mode(inference):
        return int(torch._C._dispatch_keys(torch.empty(0, device=device_type)).raw_repr())
