"""The norms' registered ops, on rows: what ``norming`` calls.

Rows, their statistics and their sums with a residual are found in one op; the adjoint of each is an op of its own,
which cannot be differentiated again.
"""

from __future__ import annotations

from typing import Any

import torch

from triplan.facade import (
    L2NormBackwardPlan,
    L2NormPlan,
    LayerNormBackwardPlan,
    LayerNormPlan,
    RmsNormBackwardPlan,
    RmsNormPlan,
)
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
    """Room for what belongs to an operand; empty where that is absent, as an op's results are tensors."""
    return x.new_empty(0) if parameter is None else x.new_empty(parameter.shape)


# --- rms_norm ---


def _rms_norm_fake(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, weight_offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), _statistic(x), _like(residual, x)


def _rms_norm_kernel(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, weight_offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    out, rstd, summed = _rms_norm_fake(x, weight, residual, eps, weight_offset)
    operands = _present(x=x, out=out, rstd=rstd, weight=weight, residual=residual)
    if residual is not None:
        operands["summed"] = summed
    run(RmsNormPlan, operands, eps=eps, weight_offset=weight_offset)
    return out, rstd, summed


def _rms_norm_backward_fake(
    dout: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, dsummed: Tensor | None, weight_offset: int
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _like(weight, x)


def _rms_norm_backward_kernel(
    dout: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, dsummed: Tensor | None, weight_offset: int
) -> tuple[Tensor, Tensor]:
    dx, dweight = _rms_norm_backward_fake(dout, x, rstd, weight, dsummed, weight_offset)
    operands = _present(dout=dout, x=x, rstd=rstd, dx=dx, weight=weight, dsummed=dsummed)
    if weight is not None:
        operands["dweight"] = dweight
    run(RmsNormBackwardPlan, operands, weight_offset=weight_offset)
    return dx, dweight


rms_norm = _register(
    "rms_norm",
    "(Tensor x, Tensor? weight, Tensor? residual, float eps, int weight_offset) -> (Tensor, Tensor, Tensor)",
    _rms_norm_kernel,
    _rms_norm_fake,
)
_rms_norm_backward = _register(
    "rms_norm_backward",
    "(Tensor dout, Tensor x, Tensor rstd, Tensor? weight, Tensor? dsummed, int weight_offset) -> (Tensor, Tensor)",
    _rms_norm_backward_kernel,
    _rms_norm_backward_fake,
)


def _rms_norm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, residual, _, ctx.weight_offset = inputs
    _, rstd, summed = output
    ctx.added = residual is not None
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(summed if ctx.added else x, rstd, weight)


def _rms_norm_grad(ctx: Any, grad: Tensor, _: Any, dsummed: Tensor) -> Any:
    x, rstd, weight = ctx.saved_tensors
    dx, dweight = _rms_norm_backward(grad, x, rstd, weight, dsummed if ctx.added else None, ctx.weight_offset)
    return dx, None if weight is None else dweight, dx if ctx.added else None, None, None


torch.library.register_autograd("triplan::rms_norm", _rms_norm_grad, setup_context=_rms_norm_setup, lib=_LIBRARY)


# --- layer_norm ---


def _layer_norm_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float, weight_offset: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), _statistic(x), _statistic(x), _like(residual, x)


def _layer_norm_kernel(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float, weight_offset: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, mean, rstd, summed = _layer_norm_fake(x, weight, bias, residual, eps, weight_offset)
    operands = _present(x=x, out=out, mean=mean, rstd=rstd, weight=weight, bias=bias, residual=residual)
    if residual is not None:
        operands["summed"] = summed
    run(LayerNormPlan, operands, eps=eps, weight_offset=weight_offset)
    return out, mean, rstd, summed


def _layer_norm_backward_fake(
    dout: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dsummed: Tensor | None,
    weight_offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), _like(weight, x), _like(bias, x)


def _layer_norm_backward_kernel(
    dout: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dsummed: Tensor | None,
    weight_offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = _layer_norm_backward_fake(dout, x, mean, rstd, weight, bias, dsummed, weight_offset)
    operands = _present(dout=dout, x=x, mean=mean, rstd=rstd, dx=dx, weight=weight, dsummed=dsummed)
    if weight is not None:
        operands["dweight"] = dweight
    if bias is not None:
        operands["dbias"] = dbias
    run(LayerNormBackwardPlan, operands, weight_offset=weight_offset)
    return dx, dweight, dbias


layer_norm = _register(
    "layer_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, int weight_offset)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _layer_norm_kernel,
    _layer_norm_fake,
)
_layer_norm_backward = _register(
    "layer_norm_backward",
    "(Tensor dout, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, Tensor? dsummed,"
    " int weight_offset) -> (Tensor, Tensor, Tensor)",
    _layer_norm_backward_kernel,
    _layer_norm_backward_fake,
)


def _layer_norm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, residual, _, ctx.weight_offset = inputs
    _, mean, rstd, summed = output
    ctx.added = residual is not None
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(summed if ctx.added else x, mean, rstd, weight, bias)


def _layer_norm_grad(ctx: Any, grad: Tensor, _mean: Any, _rstd: Any, dsummed: Tensor) -> Any:
    x, mean, rstd, weight, bias = ctx.saved_tensors
    added = dsummed if ctx.added else None
    dx, dweight, dbias = _layer_norm_backward(grad, x, mean, rstd, weight, bias, added, ctx.weight_offset)
    parameters = (None if weight is None else dweight, None if bias is None else dbias)
    return dx, *parameters, dx if ctx.added else None, None, None


torch.library.register_autograd("triplan::layer_norm", _layer_norm_grad, setup_context=_layer_norm_setup, lib=_LIBRARY)


# --- l2_norm ---


def _l2_norm_fake(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _statistic(x)


def _l2_norm_kernel(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, norm = _l2_norm_fake(x, eps)
    run(L2NormPlan, {"x": x, "out": out, "norm": norm}, eps=eps)
    return out, norm


def _l2_norm_backward_fake(dout: Tensor, x: Tensor, norm: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _l2_norm_backward_kernel(dout: Tensor, x: Tensor, norm: Tensor, eps: float) -> Tensor:
    dx = x.new_empty(x.shape)
    run(L2NormBackwardPlan, {"dout": dout, "x": x, "norm": norm, "dx": dx}, eps=eps)
    return dx


l2_norm = _register("l2_norm", "(Tensor x, float eps) -> (Tensor, Tensor)", _l2_norm_kernel, _l2_norm_fake)
_l2_norm_backward = _register(
    "l2_norm_backward",
    "(Tensor dout, Tensor x, Tensor norm, float eps) -> Tensor",
    _l2_norm_backward_kernel,
    _l2_norm_backward_fake,
)


def _l2_norm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.eps = inputs
    _, norm = output
    ctx.mark_non_differentiable(norm)
    ctx.save_for_backward(x, norm)


def _l2_norm_grad(ctx: Any, grad: Tensor, _: Any) -> Any:
    x, norm = ctx.saved_tensors
    return _l2_norm_backward(grad, x, norm, ctx.eps), None


torch.library.register_autograd("triplan::l2_norm", _l2_norm_grad, setup_context=_l2_norm_setup, lib=_LIBRARY)
