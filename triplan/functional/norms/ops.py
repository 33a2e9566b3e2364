"""The registered ops: norms of rows and their gradients.

The results of one registered op are the norm, its statistics and the sum with a residual; its backward is another op.
Each is differentiated as a function of all its tensors, statistics among them, so that derivatives of every order
follow from two formulas. That of the backward is in plain torch.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import torch

from triplan.facade import (
    L2NormBackwardPlan,
    L2NormPlan,
    LayerNormBackwardPlan,
    LayerNormPlan,
    Plan,
    RmsNormBackwardPlan,
    RmsNormPlan,
)
from triplan.functional._ops import Recorded
from triplan.functional._plans import run
from triplan.functional._sharding.axes import dots
from triplan.sku import ElementKind

Tensor = torch.Tensor
_PARAMETERS = ("weight", "bias", "dweight", "dbias")


def is_branch(input: Tensor, wide: Tensor) -> bool:
    """Whether ``input`` is what a layer in 16 bits adds to a wider sum of all layers."""
    return input.dtype in (torch.float16, torch.bfloat16) and wide.dtype in (torch.float32, torch.float64)


def _element(*tensors: Tensor | None) -> torch.dtype:
    """The element in which ``tensors`` are computed together: the narrowest that holds the elements of all."""
    return reduce(torch.promote_types, (t.dtype for t in tensors if t is not None))


def _statistic(x: Tensor, axes: int, element: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[: x.dim() - axes], dtype=ElementKind.of(element).compute.torch)


def _like(parameter: Tensor | None, x: Tensor) -> Tensor:
    """A gradient of ``parameter``, uninitialised; empty if that is absent, because an op's results must be tensors."""
    return x.new_empty(0) if parameter is None else parameter.new_empty(parameter.shape)


def _rows(t: Tensor, axes: int) -> Tensor:
    """``t`` as (rows, elements of a row)."""
    at = t.dim() - axes
    return t.reshape(math.prod(t.shape[:at]), math.prod(t.shape[at:]))


def _present(**operands: Tensor | None) -> dict[str, Tensor]:
    return {name: t for name, t in operands.items() if t is not None}


def _run(
    plan: type[Plan[Any, Any]],
    axes: int,
    element: torch.dtype,
    read: dict[str, Tensor],
    written: dict[str, Tensor],
    statistics: dict[str, Tensor],
    branch: tuple[str, ...] = (),
    **options: Any,
) -> None:
    """Run ``plan`` by rows, all in ``element`` but ``branch``: a tensor of another is converted, and rounded once."""
    results = {
        n: t if t.dtype == element or n in branch else t.new_empty(t.shape, dtype=element) for n, t in written.items()
    }
    operands = {n: t.contiguous().view(-1) for n, t in statistics.items()}
    for name, t in {**read, **results}.items():
        t = t if name in branch else t.to(element)
        operands[name] = t.reshape(-1).contiguous() if name in _PARAMETERS else _rows(t, axes)
    run(plan, operands, **options)
    for name, t in written.items():
        if results[name] is not t:
            t.copy_(results[name])


# --- rms_norm and layer_norm, over the last axes ---


def _make(
    name: str, forward_plan: type[Plan[Any, Any]], backward_plan: type[Plan[Any, Any]]
) -> tuple[Recorded, Recorded]:
    centred = name == "layer_norm"

    def fake(
        x: Tensor, axes: int, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, *_: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rstd = _statistic(x, axes, _element(x, weight, bias, residual))
        mean = rstd.new_empty(rstd.shape) if centred else x.new_empty(0)
        return x.new_empty(x.shape), mean, rstd, x.new_empty(0) if residual is None else residual.new_empty(x.shape)

    def kernel(
        x: Tensor,
        axes: int,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        eps: float,
        weight_offset: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out, mean, rstd, summed = found = fake(x, axes, weight, bias, residual)
        read = _present(x=x, weight=weight, bias=bias, residual=residual)
        written = _present(out=out, summed=None if residual is None else summed)
        statistics = _present(mean=mean if centred else None, rstd=rstd)
        element = _element(x, weight, bias, residual)
        branch = ("x", "out") if residual is not None and is_branch(x, residual) else ()
        _run(forward_plan, axes, element, read, written, statistics, branch, eps=eps, weight_offset=weight_offset)
        return found

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.axes, weight, bias, residual, _, ctx.weight_offset = inputs
        _, mean, rstd, summed = output
        ctx.added, ctx.dtype = residual is not None, x.dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(summed if ctx.added else x, mean, rstd, weight, bias)

    def grad(ctx: Any, dout: Tensor | None, dmean: Tensor | None, drstd: Tensor | None, dsummed: Tensor | None) -> Any:
        x, mean, rstd, weight, bias = ctx.saved_tensors
        dout = torch.zeros_like(x, dtype=ctx.dtype) if dout is None else dout
        added = dsummed if ctx.added else None
        dx, dweight, dbias, dbranch = backward(dout, x, mean, rstd, weight, bias, added, ctx.axes, ctx.weight_offset)
        # The statistics are results of the registered op, not of the call: only second derivatives reach them.
        if drstd is not None:
            c = _rows(x, ctx.axes).to(rstd.dtype)
            c = c - mean.reshape(-1, 1) if centred else c
            dx = dx - (c * (drstd * rstd**3 / c.size(1)).reshape(-1, 1)).to(x.dtype).reshape(x.shape)
        if centred and dmean is not None:
            spread = (dmean / math.prod(x.shape[x.dim() - ctx.axes :])).reshape(-1, 1)
            dx = dx + spread.expand(_rows(x, ctx.axes).shape).to(x.dtype).reshape(x.shape)
        parameters = (None if weight is None else dweight, None if bias is None else dbias)
        # input and residual share one gradient tensor, as in torch's addition: autograd then knows to steal neither.
        rounded = dbranch if is_branch(dout, x) and drstd is None and dmean is None else dx.to(ctx.dtype)
        return rounded, None, *parameters, dx if ctx.added else None, None, None

    def backward_fake(
        dout: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        narrow = dout.new_empty(x.shape if is_branch(dout, x) else 0)
        return x.new_empty(x.shape), _like(weight, x), _like(bias, x), narrow

    def backward_kernel(
        dout: Tensor,
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        dsummed: Tensor | None,
        axes: int,
        weight_offset: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dx, dweight, dbias, dbranch = found = backward_fake(dout, x, mean, rstd, weight, bias)
        branch, element = ("dout", "dbranch") if is_branch(dout, x) else (), _element(x, weight, bias)
        read = _present(dout=dout, x=x, weight=weight, dsummed=dsummed)
        parameters = {"dweight": None if weight is None else dweight, "dbias": None if bias is None else dbias}
        written = _present(dx=dx, dbranch=dbranch if branch else None, **parameters)
        statistics = _present(mean=mean if centred else None, rstd=rstd)
        _run(backward_plan, axes, element, read, written, statistics, branch, weight_offset=weight_offset)
        return found

    def backward_setup(ctx: Any, inputs: Any, output: Any) -> None:
        dout, x, mean, rstd, weight, bias, dsummed, ctx.axes, ctx.weight_offset = inputs
        ctx.biased, ctx.added, ctx.branch = bias is not None, dsummed is not None, is_branch(dout, x)
        ctx.save_for_backward(dout, x, mean, rstd, weight)

    def backward_grad(ctx: Any, of_dx: Tensor, of_dweight: Tensor, of_dbias: Tensor, of_dbranch: Tensor) -> Any:
        dout, x, mean, rstd, weight = ctx.saved_tensors
        of_dx = of_dx + of_dbranch if ctx.branch else of_dx
        d, v, c = (_rows(t, ctx.axes).to(rstd.dtype) for t in (dout, of_dx, x))
        r = rstd.reshape(-1, 1)
        c = c - mean.reshape(-1, 1) if centred else c
        hat = c * r
        w = 1 if weight is None else weight.reshape(-1).to(rstd.dtype) + ctx.weight_offset
        # dx = r * (g - mean(g) - hat * mean(g * hat)); rms_norm has no mean(g).
        g = d * w
        v_hat, g_hat = ((t * hat).mean(1, keepdim=True) for t in (v, g))
        centre = v.mean(1, keepdim=True) if centred else 0
        to_g = r * (v - centre - hat * v_hat)
        to_c = -r * r * (v * g_hat + g * v_hat)
        to_r = ((v - centre) * g).sum(1) - 3 * c.size(1) * (v_hat * g_hat).squeeze(1)
        to_d, to_weight = to_g * w, None
        if weight is not None:
            u = of_dweight.reshape(-1).to(rstd.dtype)
            to_d, to_c, to_r = to_d + u * hat, to_c + u * d * r, to_r + (u * d * c).sum(1)
            to_weight = (to_g * d).sum(0).to(weight.dtype).reshape(weight.shape)
        if ctx.biased:
            to_d = to_d + of_dbias.reshape(-1).to(rstd.dtype)
        return (
            to_d.to(dout.dtype).reshape(dout.shape),
            to_c.to(x.dtype).reshape(x.shape),
            -to_c.sum(1).reshape(rstd.shape) if centred else None,
            to_r.reshape(rstd.shape),
            to_weight,
            None,
            of_dx if ctx.added else None,
            None,
            None,
        )

    def axes_of(x: Any, axes: int, weight: Any, bias: Any, residual: Any, *_: Any) -> str:
        row = dots(axes)
        summed = f"*{row}" if residual is not None else ""
        return f"*{row}, {row}, {row}, *{row} -> *{row}, {'*' * centred}, *, {summed}"

    def backward_axes_of(
        dout: Any, x: Any, mean: Any, rstd: Any, weight: Any, bias: Any, dsummed: Any, axes: int, *_: Any
    ) -> str:
        row = dots(axes)
        sums = [f"{row}+*" if p is not None else "" for p in (weight, bias)]
        branch = f"*{row}" if dout.tensor_meta.dtype != x.tensor_meta.dtype else ""
        given = f"*{row}, *{row}, {'*' if centred else '.'}, *, {row}, {row}, *{row}"
        return f"{given} -> *{row}, {sums[0]}, {sums[1]}, {branch}"

    op = Recorded(
        name,
        "(Tensor x, int axes, Tensor? weight, Tensor? bias, Tensor? residual, float eps, int weight_offset)"
        " -> (Tensor out, Tensor mean, Tensor rstd, Tensor summed)",
        kernel,
        fake,
        axes=axes_of,
        setup=setup,
        backward=grad,
    )
    backward = Recorded(
        f"{name}_backward",
        "(Tensor dout, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, Tensor? dsummed, int axes,"
        " int weight_offset) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dbranch)",
        backward_kernel,
        backward_fake,
        axes=backward_axes_of,
        setup=backward_setup,
        backward=backward_grad,
    )
    return op, backward


#: Results, where the ``axes`` trailing axes of x form a row: the norm, mean (empty in rms_norm), rstd, x + residual.
rms_norm_op, _ = _make("rms_norm", RmsNormPlan, RmsNormBackwardPlan)
layer_norm_op, _ = _make("layer_norm", LayerNormPlan, LayerNormBackwardPlan)


# --- l2_norm, of the rows of a matrix ---


def _l2_norm_fake(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _statistic(x, 1, x.dtype)


def _l2_norm_kernel(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, norm = _l2_norm_fake(x, eps)
    run(L2NormPlan, {"x": x, "out": out, "norm": norm}, eps=eps)
    return out, norm


def _l2_norm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.eps = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, output[1])


def _l2_norm_grad(ctx: Any, dout: Tensor | None, dnorm: Tensor | None) -> Any:
    x, norm = ctx.saved_tensors
    dx = torch.zeros_like(x) if dout is None else _l2_norm_backward(dout, x, norm, ctx.eps)
    if dnorm is not None:  # in second derivatives only
        scale = torch.where(norm > 0, dnorm / torch.where(norm > 0, norm, 1), 0)
        dx = dx + (x.to(norm.dtype) * scale.unsqueeze(1)).to(x.dtype)
    return dx, None


def _l2_norm_backward_fake(dout: Tensor, x: Tensor, norm: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _l2_norm_backward_kernel(dout: Tensor, x: Tensor, norm: Tensor, eps: float) -> Tensor:
    dx = x.new_empty(x.shape)
    run(L2NormBackwardPlan, {"dout": dout, "x": x, "norm": norm.contiguous(), "dx": dx}, eps=eps)
    return dx


def _l2_norm_backward_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _l2_norm_backward_grad(ctx: Any, of_dx: Tensor) -> Any:
    dout, x, norm = ctx.saved_tensors
    d, v, wide = (t.to(norm.dtype) for t in (dout, of_dx, x))
    length = norm.unsqueeze(1)
    short = length < ctx.eps
    inverse = 1 / torch.where(short, ctx.eps, length)
    # dx = inverse * (d - hat * sum(d * hat)); rows that are divided by eps lack the second term.
    hat = torch.where(short, 0, wide * inverse)
    v_hat, d_hat = ((t * hat).sum(1, keepdim=True) for t in (v, d))
    to_d = inverse * (v - hat * v_hat)
    to_x = -inverse * inverse * (v * d_hat + d * v_hat)
    to_norm = torch.where(short, 0, inverse * inverse * (3 * v_hat * d_hat - (v * d).sum(1, keepdim=True))).squeeze(1)
    return to_d.to(dout.dtype), to_x.to(x.dtype), to_norm, None


l2_norm_op = Recorded(
    "l2_norm",
    "(Tensor x, float eps) -> (Tensor out, Tensor norm)",
    _l2_norm_kernel,
    _l2_norm_fake,
    axes="n. -> n., n",
    setup=_l2_norm_setup,
    backward=_l2_norm_grad,
)
_l2_norm_backward = Recorded(
    "l2_norm_backward",
    "(Tensor dout, Tensor x, Tensor norm, float eps) -> Tensor",
    _l2_norm_backward_kernel,
    _l2_norm_backward_fake,
    axes="n., n., n -> n.",
    setup=_l2_norm_backward_setup,
    backward=_l2_norm_backward_grad,
)
