"""rms_norm and layer_norm over trailing axes, as torch has them, and l2_norm along any axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

from triplan.functional import _norms
from triplan.functional._autocast import widened
from triplan.sku import ElementKind

__all__ = ["l2_norm", "layer_norm", "rms_norm"]

Tensor = torch.Tensor


def _axes(
    name: str,
    input: Tensor,
    normalized_shape: Sequence[int],
    residual: Tensor | None,
    **parameters: Tensor | None,
) -> int:
    """How many axes a row has."""
    shape = tuple(normalized_shape)
    at = input.dim() - len(shape)
    if not shape or at < 0 or tuple(input.shape[at:]) != shape:
        raise RuntimeError(
            f"{name}(): Given normalized_shape={list(shape)}, expected input with shape "
            f"[*, {', '.join(map(str, shape))}], but got input of size{list(input.shape)}"
        )
    for what, p in parameters.items():
        if p is None:
            continue
        if tuple(p.shape) != shape:
            raise RuntimeError(
                f"{name}(): Expected {what} to be of same shape as normalized_shape, got {list(p.shape)}"
            )
        if p.device != input.device:
            raise RuntimeError(f"{name}(): {what} is on {p.device}, but input on {input.device}")
    for what, p in {"input": input, **parameters}.items():
        if p is not None and not p.is_floating_point():
            raise RuntimeError(f"{name}(): expected floating-point tensors, but {what} is {p.dtype}")
    if residual is not None and (
        residual.shape != input.shape or residual.dtype != input.dtype or residual.device != input.device
    ):
        raise RuntimeError(
            f"{name}(): residual is {residual.dtype} of {list(residual.shape)} on {residual.device}, but input "
            f"{input.dtype} of {list(input.shape)} on {input.device}"
        )
    return len(shape)


@overload
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: int = 0,
    residual: None = None,
) -> Tensor: ...


@overload
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: int = 0,
    residual: Tensor,
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: int = 0,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``input / sqrt(mean(input**2) + eps) * weight`` over the trailing axes (torch.nn.functional.rms_norm).

    ``input``: f16, bf16, f32 or f64; ``weight``: of ``normalized_shape``; ``eps``: by default that of the dtype in
    which ``input`` is computed. ``weight_offset`` (0 or 1) is added to the weight. A weight of another dtype makes all
    be computed in the one that holds both, from copies; the result is rounded to ``input``'s. Under autocast all go to
    f32. Returns ``input``'s shape; with a ``residual`` of that shape and dtype the norm of ``input + residual``, and
    that sum, from one reading of both. Differentiable in ``input``, ``weight`` and ``residual``, any number of times.
    Raises ``RuntimeError`` for shapes, dtypes and devices that do not fit, ``InvalidProblem`` for an offset without a
    weight.
    """
    (input,), (weight, residual) = widened(input), widened(weight, residual)
    axes = _axes("rms_norm", input, normalized_shape, residual, weight=weight)
    if eps is None:
        eps = torch.finfo(ElementKind.of(input.dtype).compute.torch).eps
    out, _, _, summed = _norms.rms_norm(input, axes, weight, None, residual, eps, weight_offset)
    return out if residual is None else (out, summed)


@overload
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: int = 0,
    residual: None = None,
) -> Tensor: ...


@overload
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: int = 0,
    residual: Tensor,
) -> tuple[Tensor, Tensor]: ...


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: int = 0,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``(input - mean) / sqrt(var + eps) * weight + bias`` over the trailing axes (torch.nn.functional.layer_norm).

    ``input``: f16, bf16, f32 or f64; ``weight`` and ``bias``: of ``normalized_shape``, their dtypes as those of
    ``rms_norm``, which also has ``weight_offset`` and ``residual``. Returns ``input``'s shape, with a residual twice.
    Differentiable in all tensors, any number of times. Raises as ``rms_norm``.
    """
    (input,), (weight, bias, residual) = widened(input), widened(weight, bias, residual)
    axes = _axes("layer_norm", input, normalized_shape, residual, weight=weight, bias=bias)
    out, _, _, summed = _norms.layer_norm(input, axes, weight, bias, residual, eps, weight_offset)
    return out if residual is None else (out, summed)


def l2_norm(input: Tensor, dim: int = -1, eps: float = 1e-12) -> Tensor:
    """``input / max(sqrt(sum(input**2)), eps)`` along ``dim`` (torch.nn.functional.normalize; its dim is 1).

    ``input``: f16, bf16, f32 or f64; under autocast it goes to f32. Returns ``input``'s shape. Differentiable, any
    number of times. Along another than the last axis it is copied. Raises ``IndexError`` for a ``dim`` that it has not,
    ``RuntimeError`` for integers.
    """
    (input,) = widened(input)
    if not input.is_floating_point():
        raise RuntimeError(f"l2_norm(): expected a floating-point tensor, but got {input.dtype}")
    moved = input.movedim(dim, -1) if input.dim() else input.reshape(1)
    rows = 1
    for extent in moved.shape[:-1]:
        rows = rows * extent
    out: Tensor = _norms.l2_norm(moved.reshape(rows, moved.shape[-1]), eps)[0]
    out = out.reshape(moved.shape)
    return out.movedim(-1, dim) if input.dim() else out.reshape(())
