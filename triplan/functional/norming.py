"""rms_norm and layer_norm over trailing axes, as torch has them, and l2_norm along any axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

from triplan.functional import _norms
from triplan.sku import ElementKind

Tensor = torch.Tensor


def _as_rows(name: str, input: Tensor, normalized_shape: Sequence[int], **parameters: Tensor | None) -> Tensor:
    """``input`` as (rows, elements of a row)."""
    shape = tuple(normalized_shape)
    at = input.dim() - len(shape)
    if not shape or at < 0 or tuple(input.shape[at:]) != shape:
        raise RuntimeError(
            f"{name}(): Given normalized_shape={list(shape)}, expected input with shape "
            f"[*, {', '.join(map(str, shape))}], but got input of size{list(input.shape)}"
        )
    if not input.is_floating_point():
        raise RuntimeError(f"{name}(): expected a floating-point tensor, but got {input.dtype}")
    for what, p in parameters.items():
        if p is None:
            continue
        if tuple(p.shape) != shape:
            raise RuntimeError(
                f"{name}(): Expected {what} to be of same shape as normalized_shape, got {list(p.shape)}"
            )
        if p.dtype != input.dtype or p.device != input.device:
            raise RuntimeError(
                f"{name}(): {what} is {p.dtype} on {p.device}, but input {input.dtype} on {input.device}"
            )
    n = 1
    for extent in shape:
        n = n * extent
    rows = 1
    for extent in input.shape[:at]:
        rows = rows * extent
    return input.reshape(rows, n)


def _flat(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.reshape(-1).contiguous()


def _added(name: str, x: Tensor, input: Tensor, residual: Tensor | None) -> Tensor | None:
    """``residual`` as rows, as ``input`` is."""
    if residual is None:
        return None
    if residual.shape != input.shape or residual.dtype != input.dtype or residual.device != input.device:
        raise RuntimeError(
            f"{name}(): residual is {residual.dtype} of {list(residual.shape)} on {residual.device}, but input "
            f"{input.dtype} of {list(input.shape)} on {input.device}"
        )
    return residual.reshape(x.shape)


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

    ``input``: f16, bf16, f32 or f64; ``weight``: of ``normalized_shape`` and ``input``'s dtype; ``eps``: by default
    that of the dtype in which it is computed. ``weight_offset`` (0 or 1) is added to the weight. Returns ``input``'s
    shape; with a ``residual`` of that shape the norm of ``input + residual``, and that sum, from one reading of both.
    Differentiable once in ``input``, ``weight`` and ``residual``. Raises ``RuntimeError`` for shapes, dtypes and
    devices that do not fit, ``InvalidProblem`` for an offset without a weight.
    """
    x = _as_rows("rms_norm", input, normalized_shape, weight=weight)
    if eps is None:
        eps = torch.finfo(ElementKind.of(input.dtype).compute.torch).eps
    out, _, summed = _norms.rms_norm(x, _flat(weight), _added("rms_norm", x, input, residual), eps, weight_offset)
    out = out.reshape(input.shape)
    return out if residual is None else (out, summed.reshape(input.shape))


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

    ``input``: f16, bf16, f32 or f64; ``weight`` and ``bias``: of ``normalized_shape`` and ``input``'s dtype.
    ``weight_offset`` and ``residual`` as ``rms_norm`` has them. Returns ``input``'s shape, with a residual twice.
    Differentiable once in all tensors. Raises as ``rms_norm``.
    """
    x = _as_rows("layer_norm", input, normalized_shape, weight=weight, bias=bias)
    added = _added("layer_norm", x, input, residual)
    out, _, _, summed = _norms.layer_norm(x, _flat(weight), _flat(bias), added, eps, weight_offset)
    out = out.reshape(input.shape)
    return out if residual is None else (out, summed.reshape(input.shape))


def l2_norm(input: Tensor, dim: int = -1, eps: float = 1e-12) -> Tensor:
    """``input / max(sqrt(sum(input**2)), eps)`` along ``dim`` (torch.nn.functional.normalize; its dim is 1).

    ``input``: f16, bf16, f32 or f64. Returns ``input``'s shape. Differentiable once. Along another than the last axis
    it is copied. Raises ``IndexError`` for a ``dim`` that it has not, ``RuntimeError`` for integers.
    """
    if not input.is_floating_point():
        raise RuntimeError(f"l2_norm(): expected a floating-point tensor, but got {input.dtype}")
    moved = input.movedim(dim, -1) if input.dim() else input.reshape(1)
    rows = 1
    for extent in moved.shape[:-1]:
        rows = rows * extent
    out: Tensor = _norms.l2_norm(moved.reshape(rows, moved.shape[-1]), eps)[0]
    out = out.reshape(moved.shape)
    return out.movedim(-1, dim) if input.dim() else out.reshape(())
