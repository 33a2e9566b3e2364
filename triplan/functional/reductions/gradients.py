"""Gradients of reductions.

They are composed of torch's elementwise ops, so that they can be differentiated again. Where nothing watches and no
second gradient is wanted, those of ``_FUSED`` are one launch instead, after those of what they are made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from triplan import expr
from triplan.descriptors.reductions import INDEXED
from triplan.facade import plan_type
from triplan.functional._ops import RECORDED
from triplan.functional._plans import run, run_expression, run_reduced_expression
from triplan.functional._replay.recording import is_plain
from triplan.functional._sharding import is_dtensor

Tensor = torch.Tensor
#: Operands of an expression have this many axes at most.
_MAX_AXES = 8

_x, _mean, _out, _grad, _count, _correction = map(expr.operand, ("x", "mean", "out", "grad", "count", "correction"))
_extreme, _equal, _others = map(expr.operand, ("extreme", "equal", "others"))
#: Equal elements share the gradient of an extremum. NaN equals nothing, and its line's gradient is NaN.
_CHOSEN = expr.where(expr.eq(_x, _extreme), 1, 0)
_slope = _grad / (_count - _correction)
#: The gradient of x by op, for vector_norm by op and order, in the names of ``_fused``.
_FUSED = {
    "var": 2 * _slope * (_x - _mean),
    "std": expr.where(expr.eq(_out, 0), 0, _slope / _out) * (_x - _mean),
    "logsumexp": _grad * expr.exp(_x - expr.where(expr.isinf(_out), 0, _out)),
    "amax": _grad * _CHOSEN / _equal,
    "amin": _grad * _CHOSEN / _equal,
    "prod": _grad * _others,
    ("vector_norm", 1.0): _grad * expr.sign(_x),
    ("vector_norm", 2.0): expr.where(expr.eq(_out, 0) | expr.eq(_x, 0), 0, _grad * (_x / _out)),
}


def expanded(t: Tensor, axes: Sequence[int]) -> Tensor:
    """``t`` with axes of one element where it was reduced."""
    for a in axes:
        t = t.unsqueeze(a)
    return t


def gradient(ctx: Any, grads: Any, mean: Callable[[Tensor, torch.dtype], Tensor]) -> Any:
    """The gradient of what was reduced; ``mean(x, dtype)`` is that over the reduced axes, which stay."""
    if ctx.op in ("sum", "mean"):
        shared = _share(ctx, grads[0]) if ctx.op == "mean" else grads[0].to(ctx.dtype)
        return expanded(shared, ctx.gone).expand(ctx.shape)
    root = _FUSED.get((ctx.op, ctx.order) if ctx.op == "vector_norm" else ctx.op)
    if root is None or not ctx.axes or len(ctx.shape) > _MAX_AXES or torch.is_grad_enabled():
        return _composed(ctx, expanded(grads[0], ctx.gone))
    x, out = ctx.saved_tensors
    if not is_plain(x, grads[0]):
        return _composed(ctx, expanded(grads[0], ctx.gone))
    operands = {"grad": expanded(grads[0], ctx.gone)}
    scalars = {}
    if ctx.op in ("var", "std"):
        operands["mean"] = mean(x, torch.promote_types(x.dtype, torch.float32))
        scalars = {"count": math.prod([ctx.shape[a] for a in ctx.axes]), "correction": ctx.correction}
    if ctx.op in ("amax", "amin"):
        extreme = expanded(out, ctx.gone)
        operands |= {"x": x, "extreme": extreme, "equal": _equal_to(extreme, x, ctx.axes)}
    elif ctx.op == "prod":
        operands["others"] = _products_of_others(x.to(_wide(x, out)), ctx.axes)
    else:
        operands["x"] = x
        if ctx.op != "var" and (ctx.op, ctx.order) != ("vector_norm", 1.0):
            operands["out"] = expanded(out, ctx.gone)
    found = torch.empty_like(x)
    run_expression({**operands, "dx": found}, "dx", root, scalars)
    return found


def _share(ctx: Any, grad: Tensor) -> Tensor:
    """Each element's share of the gradient of a mean."""
    dtype: torch.dtype = ctx.dtype
    count: int = math.prod([ctx.shape[a] for a in ctx.axes])
    if torch.is_grad_enabled() or not is_plain(grad) or grad.dim() > _MAX_AXES:
        return (grad / count).to(dtype)
    found = torch.empty_like(grad, dtype=dtype)
    # The layout of a tensor without axes cannot say that it is aligned less.
    operands = {"grad": grad, "dx": found} if grad.dim() else {"grad": grad.reshape(1), "dx": found.view(1)}
    run_expression(operands, "dx", _grad / _count, {"count": count})
    return found


def _wide(x: Tensor, out: Tensor) -> torch.dtype:
    """The dtype in which gradients are computed."""
    return torch.promote_types(torch.promote_types(x.dtype, out.dtype), torch.float32)


def _equal_to(extreme: Tensor, x: Tensor, axes: Sequence[int]) -> Tensor:
    """How many elements of each line equal ``extreme``, by one launch; ``axes`` have one element."""
    count = x.new_empty([n for a, n in enumerate(x.shape) if a not in axes], dtype=torch.int64)
    run_reduced_expression("sum", {"x": x, "extreme": extreme, "out": count}, axes, _CHOSEN)
    return expanded(count, axes)


def _products_of_others(x: Tensor, axes: Sequence[int]) -> Tensor:
    """As ``_exclusive_products`` of one axis or all, by two launches: the gradient of a cumulative product's end."""
    rows, at = (x, axes[0]) if len(axes) == 1 else (x.reshape(-1), 0)
    last = torch.arange(rows.shape[at], device=x.device) == rows.shape[at] - 1
    last = last.to(rows.dtype).reshape([-1 if a == at else 1 for a in range(rows.dim())])
    products, found = torch.empty_like(rows), torch.empty_like(rows)
    run(plan_type("cumprod"), {"x": rows, "out": products}, op="cumprod", scan_axis=at)
    operands = {"dout": last.expand(rows.shape), "x": rows, "out": products, "dx": found}
    run(plan_type("cumprod_backward"), operands, scan_axis=at)
    return found.view(x.shape) if len(axes) > 1 else found


#: Along the last axis. torch's own have no sharding rules before 2.13.
_ON_DTENSORS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: RECORDED["move"](t, "flip", [0] * (t.dim() - 1) + [1], 0),
    lambda t: RECORDED["cumprod"](t, -1),
)


def _exclusive_products(x: Tensor, axes: Sequence[int]) -> Tensor:
    """The product over ``axes`` of all other elements, without a division: zeros are numbers like others."""
    kept = [a for a in range(x.dim()) if a not in axes]
    order = [*kept, *axes]
    lines = x.permute(order).reshape([*(x.shape[a] for a in kept), -1])
    one = torch.ones_like(lines[..., :1])
    flip, cumprod = _ON_DTENSORS if is_dtensor(x) else (lambda t: t.flip(-1), lambda t: t.cumprod(-1))
    before = cumprod(torch.cat([one, lines[..., :-1]], -1))
    behind = flip(cumprod(torch.cat([one, flip(lines)[..., :-1]], -1)))
    found = (before * behind).reshape([x.shape[a] for a in order])
    return found.permute([order.index(a) for a in range(x.dim())])


def _composed(ctx: Any, grad: Tensor) -> Any:
    op, axes = ctx.op, ctx.axes
    count = math.prod([ctx.shape[a] for a in axes])
    x, out, *indices = ctx.saved_tensors
    wide = _wide(x, out)
    out = expanded(out, ctx.gone)
    if op in ("amax", "amin"):  # equal elements share it; NaN equals nothing, and its line's gradient is NaN
        chosen = x == out
        return (grad * chosen) / chosen.sum(axes, keepdim=True) if axes else grad * chosen
    if op in INDEXED:
        lines = torch.arange(count, device=x.device).reshape([n if a in axes else 1 for a, n in enumerate(x.shape)])
        return torch.where(lines == expanded(indices[0], ctx.gone), grad, 0)  # not 0 * grad, which may be infinite
    if op == "prod":
        return (grad.to(wide) * _exclusive_products(x.to(wide), axes)).to(x.dtype) if x.numel() else torch.zeros_like(x)
    if op == "logsumexp":
        return grad * (x - torch.where(out.isinf(), 0, out)).exp() if axes else grad * torch.ones_like(x)
    if op in ("var", "std"):
        v = x.to(wide)
        apart = v - (v.mean(axes, keepdim=True) if axes else v)
        scale = grad.to(wide) * (2 / (count - ctx.correction) if count != ctx.correction else math.inf)
        if op == "std":
            scale = torch.where(out == 0, 0, scale / (2 * out))
        return (scale * apart).to(x.dtype)
    # vector_norm
    v, n, p = x.to(wide), out.to(wide), ctx.order
    if p == 1:
        return (grad * v.sgn()).to(x.dtype)
    found = v / n if p == 2 else v.sgn() * (v / n).abs().pow(p - 1)
    return (grad * torch.where(n == 0, 0, torch.where(v == 0, 0, found))).to(x.dtype)
