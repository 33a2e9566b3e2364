"""Attention of q, k and v in one tensor."""

from __future__ import annotations

from typing import Any, Literal

import torch

from triplan.facade import AttentionBackwardPlan
from triplan.functional._autocast import narrowed
from triplan.functional._ops import Recorded
from triplan.functional._plans import run
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import require
from triplan.functional.attention.ops import empty_results, fields_of, forward, scalars_of, second_derivative
from triplan.functional.attention.shared import HOW, NONE, How, Tensor, check

__all__ = ["attention_qkvpacked"]


def _parts(packed: Tensor, key_heads: int) -> tuple[Tensor, ...]:
    """q, k and v, or their gradients, as views. (Calls with ``split``, of several results, would not be replayed.)"""
    heads = packed.size(2) - 2 * key_heads
    return tuple(packed.narrow(2, at, n) for at, n in ((0, heads), (heads, key_heads), (heads + key_heads, key_heads)))


def _forward(qkv: Tensor, key_heads: int, *how: Any) -> tuple[Tensor, Tensor]:
    return forward(*_parts(qkv, key_heads), None, *NONE, *how)


def _empty(qkv: Tensor, key_heads: int, *how: Any) -> tuple[Tensor, Tensor]:
    q, k, v = _parts(qkv, key_heads)
    return empty_results(q, k, v)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    qkv, *ctx.rest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(qkv, *output)


def _grad(ctx: Any, dout: Tensor, _: Any) -> Any:
    return _backward_op(dout, *ctx.saved_tensors, *ctx.rest), *(None,) * len(ctx.rest)


def _backward(dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, key_heads: int, *how: Any) -> Tensor:
    found = _empty_gradient(dout, qkv)
    operands = dict(zip("qkv", _parts(qkv, key_heads), strict=True))
    operands |= dict(zip(("dq", "dk", "dv"), _parts(found, key_heads), strict=True))
    operands |= {"dout": dout, "out": out, "lse": lse}
    options = How(*how)
    run(AttentionBackwardPlan, operands, scalars=scalars_of(options, operands), **fields_of(qkv, options))
    return found


def _empty_gradient(dout: Tensor, qkv: Tensor, *others: Any) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _backward_setup(ctx: Any, inputs: Any, output: Any) -> None:
    dout, qkv, _, _, *ctx.rest = inputs
    ctx.save_for_backward(dout, qkv)


def _backward_grad(ctx: Any, of_dqkv: Tensor) -> Any:
    (dout, qkv), (key_heads, *how) = ctx.saved_tensors, ctx.rest
    q, k, v = _parts(qkv, key_heads)
    to_dout, *to_qkv = second_derivative(dout, q, k, v, NONE, How(*how), *_parts(of_dqkv, key_heads))
    return to_dout, torch.cat(to_qkv, 2), *(None,) * (2 + len(ctx.rest))


_op = Recorded(
    "attention_qkvpacked",
    f"(Tensor qkv, int key_heads, {HOW}) -> (Tensor, Tensor)",
    _forward,
    _empty,
    axes="b... -> b..., b..",
    setup=_setup,
    backward=_grad,
)
_backward_op = Recorded(
    "attention_qkvpacked_backward",
    f"(Tensor dout, Tensor qkv, Tensor out, Tensor lse, int key_heads, {HOW}) -> Tensor",
    _backward,
    _empty_gradient,
    axes="b..., b..., b..., b.. -> b...",
    setup=_backward_setup,
    backward=_backward_grad,
)


@replayed
def attention_qkvpacked(
    qkv: Tensor,
    key_heads: int | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    align: Literal["start", "end"] = "end",
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """``attention`` of q, k and v in one tensor, as one linear layer gives them; so is their gradient, without a copy.

    ``qkv`` (batch, length, heads + 2 * key_heads, width): the heads of q, then those of k, then those of v.
    ``key_heads``: by default a third. The other arguments, what is returned and raised, are as in ``attention``.
    """
    name = "attention_qkvpacked"
    (qkv,) = narrowed("scaled_dot_product_attention", qkv)
    check(name, qkv, qkv, qkv, None)
    if qkv.dim() != 4 or (key_heads is None and qkv.size(2) % 3):
        raise RuntimeError(f"{name}(): expected (batch, length, heads + 2 * key_heads, width), got {list(qkv.shape)}")
    of_keys = qkv.size(2) // 3 if key_heads is None else key_heads
    heads = qkv.size(2) - 2 * of_keys
    require(
        of_keys > 0 and heads > 0 and heads % max(of_keys, 1) == 0,
        lambda: f"{name}(): {heads} heads of q are no multiple of the {of_keys} of k and v",
    )
    found: tuple[Tensor, Tensor] = _op(qkv, of_keys, *How(scale, causal, align, window_left, window_right, softcap))
    return found
