"""rms_norm and layer_norm over trailing axes, as torch has them.

Rows and their statistics are found in one op, of two or three results; the adjoint of each is an op of its own, which
cannot be differentiated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from triplan.facade import LayerNormBackwardPlan, LayerNormPlan, RmsNormBackwardPlan, RmsNormPlan
from triplan.functional._ops import _LIBRARY, _register
from triplan.functional._plans import run
from triplan.sku import ElementKind

Tensor = torch.Tensor


def _statistic(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:1], dtype=ElementKind.of(x.dtype).compute.torch)


def _present(**operands: Tensor | None) -> dict[str, Any]:
    """Without those that are absent; tensors have no gradient here."""
    return {name: t for name, t in operands.items() if t is not None}


def _like(parameter: Tensor | None, x: Tensor) -> Tensor:
    """Room for a parameter's gradient; empty where there is none, as an op's results are tensors."""
    return x.new_empty(0) if parameter is None else x.new_empty(parameter.shape)


# --- rms_norm ---


def _rms_norm_fake(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _statistic(x)


def _rms_norm_kernel(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    out, rstd = _rms_norm_fake(x, weight, eps)
    operands = _present(x=x, out=out, rstd=rstd, weight=weight)
    run(RmsNormPlan, operands, eps=eps)
    return out, rstd


def _rms_norm_backward_fake(dout: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _like(weight, x)


def _rms_norm_backward_kernel(dout: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    dx, dweight = _rms_norm_backward_fake(dout, x, rstd, weight)
    operands = _present(dout=dout, x=x, rstd=rstd, dx=dx, weight=weight)
    if weight is not None:
        operands["dweight"] = dweight
    run(RmsNormBackwardPlan, operands)
    return dx, dweight


_rms_norm = _register(
    "rms_norm", "(Tensor x, Tensor? weight, float eps) -> (Tensor, Tensor)", _rms_norm_kernel, _rms_norm_fake
)
_rms_norm_backward = _register(
    "rms_norm_backward",
    "(Tensor dout, Tensor x, Tensor rstd, Tensor? weight) -> (Tensor, Tensor)",
    _rms_norm_backward_kernel,
    _rms_norm_backward_fake,
)


def _rms_norm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _ = inputs
    _, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(x, rstd, weight)


def _rms_norm_grad(ctx: Any, grad: Tensor, _: Any) -> Any:
    x, rstd, weight = ctx.saved_tensors
    dx, dweight = _rms_norm_backward(grad, x, rstd, weight)
    return dx, None if weight is None else dweight, None


torch.library.register_autograd("triplan::rms_norm", _rms_norm_grad, setup_context=_rms_norm_setup, lib=_LIBRARY)


# --- layer_norm ---


def _layer_norm_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), _statistic(x), _statistic(x)


def _layer_norm_kernel(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    out, mean, rstd = _layer_norm_fake(x, weight, bias, eps)
    operands = _present(x=x, out=out, mean=mean, rstd=rstd, weight=weight, bias=bias)
    run(LayerNormPlan, operands, eps=eps)
    return out, mean, rstd


def _layer_norm_backward_fake(
    dout: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), _like(weight, x), _like(bias, x)


def _layer_norm_backward_kernel(
    dout: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = _layer_norm_backward_fake(dout, x, mean, rstd, weight, bias)
    operands = _present(dout=dout, x=x, mean=mean, rstd=rstd, dx=dx, weight=weight)
    if weight is not None:
        operands["dweight"] = dweight
    if bias is not None:
        operands["dbias"] = dbias
    run(LayerNormBackwardPlan, operands)
    return dx, dweight, dbias


_layer_norm = _register(
    "layer_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    _layer_norm_kernel,
    _layer_norm_fake,
)
_layer_norm_backward = _register(
    "layer_norm_backward",
    "(Tensor dout, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias) -> (Tensor, Tensor, Tensor)",
    _layer_norm_backward_kernel,
    _layer_norm_backward_fake,
)


def _layer_norm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, _ = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, mean, rstd, weight, bias)


def _layer_norm_grad(ctx: Any, grad: Tensor, *_: Any) -> Any:
    x, mean, rstd, weight, bias = ctx.saved_tensors
    dx, dweight, dbias = _layer_norm_backward(grad, x, mean, rstd, weight, bias)
    return dx, None if weight is None else dweight, None if bias is None else dbias, None


torch.library.register_autograd("triplan::layer_norm", _layer_norm_grad, setup_context=_layer_norm_setup, lib=_LIBRARY)


# --- calls ---


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


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """``input / sqrt(mean(input**2) + eps) * weight`` over the trailing axes (torch.nn.functional.rms_norm).

    ``input``: f16, bf16, f32 or f64; ``weight``: of ``normalized_shape`` and ``input``'s dtype; ``eps``: by default
    that of the dtype in which it is computed. Returns ``input``'s shape. Differentiable once in ``input`` and
    ``weight``. Raises ``RuntimeError`` for shapes, dtypes and devices that do not fit.
    """
    x = _as_rows("rms_norm", input, normalized_shape, weight=weight)
    if eps is None:
        eps = torch.finfo(ElementKind.of(input.dtype).compute.torch).eps
    out: Tensor = _rms_norm(x, _flat(weight), eps)[0]
    return out.reshape(input.shape)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``(input - mean) / sqrt(var + eps) * weight + bias`` over the trailing axes (torch.nn.functional.layer_norm).

    ``input``: f16, bf16, f32 or f64; ``weight`` and ``bias``: of ``normalized_shape`` and ``input``'s dtype. Returns
    ``input``'s shape. Differentiable once in all three. Raises as ``rms_norm``.
    """
    x = _as_rows("layer_norm", input, normalized_shape, weight=weight, bias=bias)
    out: Tensor = _layer_norm(x, _flat(weight), _flat(bias), eps)[0]
    return out.reshape(input.shape)
