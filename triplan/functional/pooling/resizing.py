"""Images in another size as torch has them: pixels that are copied, interpolated or averaged.

All of these are linear, so the gradient of a gradient is the resized image again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from triplan.errors import Unsupported, shown
from triplan.facade import (
    UpsampleBilinear2dBackwardPlan,
    UpsampleBilinear2dPlan,
    UpsampleNearest2dBackwardPlan,
    UpsampleNearest2dPlan,
)
from triplan.functional._autocast import widened
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import require
from triplan.functional.pooling.windows import adapted, linear_op

__all__ = ["interpolate", "upsample_bilinear", "upsample_nearest"]

Tensor = torch.Tensor
# Untyped in torch.
_sym_int: Callable[..., int] = torch.sym_int
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: The modes of ``interpolate`` by the axes of pixels they take.
_MODES = {"nearest": (1, 2), "nearest-exact": (1, 2), "area": (1, 2), "linear": (1,), "bilinear": (2,)}
#: torch's op of each mode.
_TORCHS = {
    "nearest": "upsample_nearest2d",
    "nearest-exact": "_upsample_nearest_exact2d",
    "linear": "upsample_linear1d",
    "bilinear": "upsample_bilinear2d",
}

_nearest = linear_op(
    "upsample_nearest2d",
    "SymInt[] out_size, float[] scale, bool exact",
    ("out_size", "scale", "exact"),
    (UpsampleNearest2dPlan, UpsampleNearest2dBackwardPlan),
    lambda input, out_size, *_: out_size,
)
_bilinear = linear_op(
    "upsample_bilinear2d",
    "SymInt[] out_size, float[] scale, bool align_corners",
    ("out_size", "scale", "align_corners"),
    (UpsampleBilinear2dPlan, UpsampleBilinear2dBackwardPlan),
    lambda input, out_size, *_: out_size,
)


def _for_each_axis(what: str, value: Any, axes: int, input: Tensor) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value] * axes
    if len(value) != axes:
        raise ValueError(
            f"interpolate(): expected {what} to be one number or {axes}, for an input with spatial dimensions "
            f"{list(input.shape[2:])}, but got {shown(value)}"
        )
    return list(value)


def _sizes(input: Tensor, size: Any, scale_factor: Any, recompute: bool | None) -> tuple[list[int], list[float]]:
    """The extents of the result, and the scales, 0 where the extents give them. Raises as torch does."""
    axes = input.dim() - 2
    if (size is None) == (scale_factor is None):
        raise ValueError(
            "either size or scale_factor should be defined"
            if size is None
            else "only one of size or scale_factor should be defined"
        )
    if size is not None:
        if recompute:
            raise ValueError("recompute_scale_factor is not meaningful with an explicit size.")
        sizes, scales = _for_each_axis("size", size, axes, input), [0.0] * axes
        for n in sizes:
            if not isinstance(n, (int, torch.SymInt)) or isinstance(n, bool):
                raise TypeError(f"interpolate(): expected size to be integers, but got {shown(size)}")
    else:
        scales = [float(f) for f in _for_each_axis("scale_factor", scale_factor, axes, input)]
        sizes = [_sym_int(n * f) for n, f in zip(input.shape[2:], scales, strict=True)]
        scales = [0.0] * axes if recompute else scales
    for n in sizes:
        require(
            n > 0,
            lambda: f"Input and output sizes should be greater than 0, but got {list(input.shape[2:])} and {sizes}",
        )
    return sizes, scales


def _checked(input: Tensor, mode: str, align_corners: bool | None, antialias: bool) -> int:
    """The axes of pixels. Raises ``ValueError``, ``RuntimeError`` or ``Unsupported``."""
    if mode in ("nearest", "area", "nearest-exact") and align_corners is not None:
        raise ValueError(
            "align_corners option can only be set with the interpolating modes: linear | bilinear | bicubic | trilinear"
        )
    axes = input.dim() - 2
    if axes not in _MODES.get(mode, ()):
        raise Unsupported(
            f"interpolate(): mode = {shown(mode)} of a {input.dim()}-d input is not supported, only nearest, "
            "nearest-exact and area of 3-d and 4-d inputs, linear of 3-d and bilinear of 4-d inputs"
        )
    if antialias:
        raise Unsupported("interpolate(): antialias = True is not supported, only False")
    if 0 in input.shape[1:]:
        raise RuntimeError(
            f"Non-empty {input.dim()}D data tensor expected but got a tensor with sizes {list(input.shape)}"
        )
    copies = mode.startswith("nearest")
    if mode != "area" and input.dtype not in (*_FLOATS, *[torch.uint8] * copies):
        taken = "f16, bf16, f32, f64" + " and, copied, u8" * copies
        raise Unsupported(f"interpolate(): mode = {mode!r}: {input.dtype} is not supported, only {taken}")
    return axes


def _resized(
    input: Tensor,
    size: Any,
    scale_factor: Any,
    mode: str,
    align_corners: bool | None,
    recompute_scale_factor: bool | None,
    antialias: bool = False,
) -> Tensor:
    axes = _checked(input, mode, align_corners, antialias)
    area = mode == "area"
    sizes, scales = _sizes(input, size, scale_factor, recompute_scale_factor or (area and size is None))
    if area:
        return adapted(axes, input, sizes)
    (images,) = widened(_TORCHS[mode], input)
    if axes == 1:
        images, sizes, scales = images.unsqueeze(2), [1, *sizes], [0.0, *scales]
    out: Tensor
    if mode.startswith("nearest"):
        out = _nearest(images, sizes, scales, mode == "nearest-exact")
    else:
        corners = bool(align_corners)
        out = _bilinear(images, sizes, [0.0, 0.0] if corners else scales, corners)
    return out if axes == 2 else out.squeeze(2)


@replayed
def interpolate(
    input: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """``input`` in another size (torch.nn.functional.interpolate).

    ``input`` (batch, channels, height, width) or (batch, channels, length) of f16, bf16, f32 or f64, and for copies
    also u8. ``mode``: "nearest" and "nearest-exact" copy pixels, "linear" (of three axes) and "bilinear" (of four)
    interpolate between two or four of them, "area" averages as ``adaptive_avg_pool2d``. ``size``: the extents of the
    result; else ``scale_factor`` times those of ``input``, rounded down. Positions are computed from ``scale_factor``,
    or from the extents with ``size`` or ``recompute_scale_factor``; in f32, of linear modes of f64 in f64, each
    operation rounded; an axis that keeps its extent is copied. f16 and bf16 are interpolated in f32. The result has
    channels last in memory if the input has. Differentiable, any number of times; the gradient is deterministic: each
    pixel sums the results that read it, in their order. Raises ``ValueError`` and ``RuntimeError`` for arguments that
    do not fit, ``Unsupported`` for other modes, ``antialias``, five axes and other dtypes.
    """
    return _resized(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)


@replayed
def upsample_nearest(
    input: Tensor, size: int | Sequence[int] | None = None, scale_factor: float | Sequence[float] | None = None
) -> Tensor:
    """``interpolate`` by "nearest" (torch.nn.functional.upsample_nearest)."""
    return _resized(input, size, scale_factor, "nearest", None, None)


@replayed
def upsample_bilinear(
    input: Tensor, size: int | Sequence[int] | None = None, scale_factor: float | Sequence[float] | None = None
) -> Tensor:
    """``interpolate`` by "bilinear" with ``align_corners`` (torch.nn.functional.upsample_bilinear)."""
    return _resized(input, size, scale_factor, "bilinear", True, None)
