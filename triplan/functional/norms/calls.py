"""rms_norm and layer_norm over trailing axes, as torch has them, and l2_norm along any axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

from triplan.errors import shown
from triplan.functional._autocast import widened
from triplan.functional._ops import composed
from triplan.functional._replay.replay import replayed
from triplan.functional.norms.ops import is_branch, l2_norm_op, layer_norm_op, rms_norm_op
from triplan.sku import ElementKind

__all__ = ["l2_norm", "layer_norm", "normalize", "rms_norm"]

Tensor = torch.Tensor


def _axes(
    name: str,
    input: Tensor,
    normalized_shape: Sequence[int],
    residual: Tensor | None,
    **parameters: Tensor | None,
) -> int:
    """The number of trailing axes that make a row."""
    shape = tuple(normalized_shape)
    at = input.dim() - len(shape)
    if not shape or at < 0 or tuple(input.shape[at:]) != shape:
        given = shown(list(shape))
        raise RuntimeError(
            f"{name}(): Given normalized_shape={given}, expected input with shape [*, {given[1:]}, but got input of "
            f"size{list(input.shape)}"
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
        residual.shape != input.shape
        or not (residual.dtype == input.dtype or is_branch(input, residual))
        or residual.device != input.device
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


@replayed
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

    ``input``: f16, bf16, f32 or f64; ``weight``: of ``normalized_shape``; ``eps``: by default torch's ``eps`` of the
    dtype in which ``input`` is computed. ``weight_offset`` (0 or 1) is added to the weight. If the dtypes differ, all
    is computed from copies in the narrowest that holds both, and the result is rounded to ``input``'s. Under autocast
    all are converted to f32 where torch does so.

    Returns a tensor of ``input``'s shape; with a ``residual`` of that shape and dtype, the norm of ``input + residual``
    and that sum, both from one pass. If ``input`` is f16 or bf16, ``residual`` may be f32 or f64: so is the sum then,
    the norm is of ``input``'s dtype, and autocast converts neither. Differentiable in ``input``, ``weight`` and
    ``residual``, any number of times. Raises ``RuntimeError`` for shapes, dtypes and devices that do not fit,
    ``InvalidProblem`` for an offset without a weight.
    """
    if residual is None or not is_branch(input, residual):
        (input,), (weight, residual) = widened("rms_norm", input), widened("rms_norm", weight, residual)
    axes = _axes("rms_norm", input, normalized_shape, residual, weight=weight)
    if eps is None:
        eps = torch.finfo(ElementKind.of((input if residual is None else residual).dtype).compute.torch).eps
    out, _, _, summed = rms_norm_op(input, axes, weight, None, residual, eps, weight_offset)
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


@replayed
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

    ``input``: f16, bf16, f32 or f64; ``weight`` and ``bias``: of ``normalized_shape``. ``weight_offset``, ``residual``,
    other dtypes, results and errors are as in ``rms_norm``. Differentiable in all tensors, any number of times.
    """
    if residual is None or not is_branch(input, residual):
        (input,), (weight, bias, residual) = widened("layer_norm", input), widened("layer_norm", weight, bias, residual)
    axes = _axes("layer_norm", input, normalized_shape, residual, weight=weight, bias=bias)
    out, _, _, summed = layer_norm_op(input, axes, weight, bias, residual, eps, weight_offset)
    return out if residual is None else (out, summed)


@replayed
def l2_norm(input: Tensor, dim: int = -1, eps: float = 1e-12) -> Tensor:
    """``input / max(sqrt(sum(input**2)), eps)`` along ``dim`` (torch.nn.functional.normalize; its dim is 1).

    ``input``: f16, bf16, f32 or f64; under autocast it is converted to f32 where torch does so. Returns a tensor of its
    shape. Differentiable, any number of times. A contiguous ``input`` has a contiguous result, as in torch; both are
    copied unless ``dim`` is the last axis. Raises ``IndexError`` for a ``dim`` out of range, ``RuntimeError`` for
    integers.
    """
    (input,) = widened("norm", input)
    if not input.is_floating_point():
        raise RuntimeError(f"l2_norm(): expected a floating-point tensor, but got {input.dtype}")
    moved = input.movedim(dim, -1) if input.dim() else input.reshape(1)
    rows = 1
    for extent in moved.shape[:-1]:
        rows = rows * extent
    out: Tensor = l2_norm_op(moved.reshape(rows, moved.shape[-1]), eps)[0]
    if input.dim() == 0:
        return out.reshape(())
    out = out.reshape(moved.shape).movedim(-1, dim)
    return out.contiguous() if input.is_contiguous() else out


@replayed
def normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Tensor | None = None) -> Tensor:
    """``l2_norm`` with torch's name and defaults (torch.nn.functional.normalize).

    A ``p`` other than 2, which is rare and has no kernel, is computed by torch's own, without a plan and its guarantee.
    """
    if p != 2:
        return composed("normalize", out, (input,), lambda: torch.nn.functional.normalize(input, p, dim, eps))
    return composed("normalize", out, (input,), lambda: l2_norm(input, dim, eps))
