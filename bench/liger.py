"""liger-kernel (0.8) as a contestant of the rowwise bench, if it is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from bench.rows import Buffers

OPS = ("softmax", "rms_norm", "layer_norm")


def liger_function(op: str, n: int, eps: float = 0.0) -> Callable[[Buffers], Any] | None:
    """liger's function for ``op`` on rows of ``n`` elements; None if it has none or is not installed.

    The function raises ``RuntimeError`` for rows that are too long for liger.
    """
    name = op.removesuffix("_backward")
    if name not in OPS or find_spec("liger_kernel") is None:
        return None
    ops: Any = import_module(f"liger_kernel.ops.{name}")

    def forward(b: Buffers) -> Any:
        if name == "softmax":
            return ops._softmax_forward(b.x)
        if name == "rms_norm":
            return ops.rms_norm_forward(b.x, b.weight, eps, 0.0, "llama", None)
        return ops.layer_norm_forward(b.x, b.weight, b.bias, eps)

    if not op.endswith("_backward"):
        return forward
    # The forward computes these settings for the backward; cached, so that they are not timed.
    settings: Any = lru_cache(import_module("liger_kernel.ops.utils").calculate_settings)

    def backward(b: Buffers) -> Any:
        block, warps = settings(n)
        if name == "softmax":
            return ops._softmax_backward(b.dout, b.out, block, warps, False)
        if name == "rms_norm":
            mode = ops._CASTING_MODE_LLAMA.value
            return ops.rms_norm_backward(b.dout, b.x, b.weight, b.rstd, 0.0, mode, block, warps, False, None)
        return ops.layer_norm_backward(b.dout, b.x, b.weight, b.weight, b.mean, b.rstd)

    return backward
