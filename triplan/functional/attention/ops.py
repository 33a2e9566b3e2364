"""The registered ops: attention and its gradients, with a backward of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from triplan.facade import AttentionBackwardPlan, AttentionPlan
from triplan.functional._ops import Recorded
from triplan.functional._plans import run
from triplan.functional.attention.plain import factors_of, plain, repeated, scale_of, scores, softmax, summed, wide
from triplan.functional.attention.shared import ABSENT, HOW, NONE, OTHERS, How, Tensor


def fields_of(q: Tensor, how: How) -> dict[str, Any]:
    found: dict[str, Any] = {"causal": how.causal, "align": how.align, "softcap": how.softcap}
    if q.dtype == torch.float32:  # as torch's own kernel multiplies it
        found["math"] = "tf32x3"
    return found | {"window_left": how.left, "window_right": how.right}


def operands_of(*others: Tensor | None, **operands: Tensor) -> dict[str, Tensor]:
    return operands | {name: t for name, t in zip(ABSENT, others, strict=True) if t is not None}


def scalars_of(how: How, operands: dict[str, Tensor]) -> dict[str, Any]:
    found = {} if how.scale is None else {"scale": how.scale}
    return found | {"dropout_p": how.dropout_p} if "state" in operands else found


def empty_results(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    b, m, h, _ = q.shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((b, m, h, v.size(3))), q.new_empty((b, h, m), dtype=wide)


def forward(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    others, how = options[: len(ABSENT)], How(*options[len(ABSENT) :])
    out, lse = empty_results(q, k, v)
    operands = operands_of(*others, q=q, k=k, v=v, out=out, lse=lse) | ({} if sink is None else {"sink": sink})
    run(AttentionPlan, operands, scalars=scalars_of(how, operands), **fields_of(q, how))
    return out, lse


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, sink, *others = inputs
    others, ctx.how = others[: len(ABSENT)], others[len(ABSENT) :]
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, sink, *others)


def _grad(ctx: Any, dout: Tensor, _: Any) -> Any:
    q, k, v, out, lse, sink, *others = ctx.saved_tensors
    rest = (*NONE, *(None,) * len(ctx.how))
    if sink is None:
        return *_attention_backward(dout, q, k, v, out, lse, *others, *ctx.how), None, *rest
    if torch.is_grad_enabled():  # second derivatives: lse, which has the sink, has no gradient

        def out_of(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
            return plain(q, k, v, sink, How(*ctx.how), *others)[0]

        return *torch.func.vjp(out_of, q, k, v, sink)[1](dout), *rest
    found = _attention_backward(dout, q, k, v, out, lse, *others, *ctx.how)
    share = (sink[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf)).exp()
    of_sink = -(share * (dout.to(lse.dtype) * out).sum(-1).transpose(1, 2)).sum((0, 2))
    return *found, of_sink, *rest


def _empty_gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Each packed: strides of q, k and v need not be of a dense tensor."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    others, how = options[: len(ABSENT)], How(*options[len(ABSENT) :])
    dq, dk, dv = found = _empty_gradients(dout, q, k, v)
    operands = operands_of(*others, dout=dout, q=q, k=k, v=v, out=out, lse=lse, dq=dq, dk=dk, dv=dv)
    run(AttentionBackwardPlan, operands, scalars=scalars_of(how, operands), **fields_of(q, how))
    return found


def _backward_setup(ctx: Any, inputs: Any, output: Any) -> None:
    dout, q, k, v, _, _, *others = inputs
    others, ctx.how = others[: len(ABSENT)], others[len(ABSENT) :]
    ctx.save_for_backward(dout, q, k, v, *others)


def _backward_grad(ctx: Any, *grads: Tensor) -> Any:
    dout, q, k, v, *others = ctx.saved_tensors
    found = second_derivative(dout, q, k, v, others, How(*ctx.how), *grads)
    return *found, *(None,) * (len(ctx.how) + 2 + len(ABSENT))


def second_derivative(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    others: Sequence[Tensor | None],
    how: How,
    of_dq: Tensor,
    of_dk: Tensor,
    of_dv: Tensor,
) -> tuple[Tensor, ...]:
    """The derivative of the backward as a function of dout, q, k and v alone: out and lse follow from these.

    Tensors are (batch, length, heads, width), ``others`` those of ``ABSENT``. Returns the gradients of these four from
    those of dq, dk and dv.

    With ds = p * (dp - sum(p * dp)), dp = dout @ v.T, and g the gradient that comes to ds: p's is r, dp's is e. Dropout
    multiplies dout @ v.T, and p where it multiplies values, by its factors.
    """
    dtype, group = q.dtype, q.size(2) // k.size(2)
    dout, q, of_dq = (t.transpose(1, 2).to(wide(dtype)) for t in (dout, q, of_dq))
    k, v, of_dk, of_dv = (repeated(t, group).to(wide(dtype)) for t in (k, v, of_dk, of_dv))
    *others, state = others
    s, bent = scores(q, k, how, *others)
    p, scale = softmax(s), scale_of(q, how)
    factors = 1 if state is None else factors_of(s, state, how, *others[1:3])

    def centred(t: Tensor) -> Tensor:
        return p * (t - (p * t).sum(-1, keepdim=True))

    dp = factors * (dout @ v.mT)
    ds = centred(dp)
    slope = 1 if bent is None else 1 - bent * bent
    incoming = scale * (of_dq @ k.mT + q @ of_dk.mT)
    g = incoming * slope
    e = factors * centred(g)
    r = g * (dp - (p * dp).sum(-1, keepdim=True)) - (p * g).sum(-1, keepdim=True) * dp
    r = r + factors * (dout @ of_dv.mT)
    to_s = centred(r) * slope
    if bent is not None:
        to_s = to_s - incoming * ds * bent * slope * (2 / how.softcap)
    ds = ds * slope
    to_dout = ((factors * p) @ of_dv + e @ v).transpose(1, 2)
    to_q = (scale * (to_s @ k + ds @ of_dk)).transpose(1, 2)
    to_k, to_v = (summed(t, group) for t in (scale * (to_s.mT @ q + ds.mT @ of_dq), e.mT @ dout))
    return tuple(t.to(dtype) for t in (to_dout, to_q, to_k, to_v))


def _axes(*args: Any) -> str | None:
    """(Dropout draws by the number of a row among all.)"""
    return None if args[8] is not None else "b.h., b.h., b.h., h, bh.., ., ., h, . -> b.h., bh."


def _backward_axes(*args: Any) -> str | None:
    pattern = "b.h., b.h., b.h., b.h., b.h., bh., bh.., ., ., h, . -> b.h., b.h., b.h."
    return None if args[10] is not None else pattern


attention_op = Recorded(
    "attention",
    f"(Tensor q, Tensor k, Tensor v, Tensor? sink, {OTHERS}, {HOW}) -> (Tensor, Tensor)",
    forward,
    empty_results,
    axes=_axes,
    setup=_setup,
    backward=_grad,
)
_attention_backward = Recorded(
    "attention_backward",
    f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {OTHERS}, {HOW}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _empty_gradients,
    axes=_backward_axes,
    setup=_backward_setup,
    backward=_backward_grad,
)
