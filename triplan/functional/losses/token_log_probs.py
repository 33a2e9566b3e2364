"""Log-probabilities of tokens: a cross-entropy of each row, whose sign another launch changes as it rounds."""

from __future__ import annotations

from typing import Any

import torch

from triplan import expr
from triplan.facade import CrossEntropyPlan
from triplan.functional._autocast import widened
from triplan.functional._ops import RECORDED, Recorded
from triplan.functional._plans import run_expression
from triplan.functional._replay.recording import is_plain
from triplan.functional._replay.replay import replayed
from triplan.functional.losses.shared import How, checked, compute_dtype, run_loss

__all__ = ["token_log_probs"]

Tensor = torch.Tensor
#: The cross-entropy of which log-probabilities are the negative. ``sample`` returns -1 where no token can be drawn.
_HOW = How("none", -1, 0.0, False)


def _negative(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``-t`` in ``dtype``, by one launch unless somebody watches."""
    if torch.is_grad_enabled() or not is_plain(t):
        return -t.to(dtype)
    found = torch.empty_like(t, dtype=dtype)
    run_expression({"x": t, "out": found}, "out", -expr.operand("x"))
    return found


def _fake(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    return logits.new_empty(tokens.shape), logits.new_empty(tokens.shape, dtype=compute_dtype(logits))


def _kernel(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    _, lse = _fake(logits, tokens)
    losses = torch.empty_like(lse)
    run_loss(CrossEntropyPlan, _HOW, {"x": logits, "target": tokens, "losses": losses, "lse": lse})
    with torch.no_grad():
        return _negative(losses, logits.dtype), lse


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, output[1])


def _grad(ctx: Any, grad: Tensor, _: Any) -> Any:
    logits, tokens, lse = ctx.saved_tensors
    of_losses = _negative(grad, lse.dtype)
    return RECORDED["cross_entropy_backward"](of_losses, logits, tokens, lse, None, None, *_HOW), None


_log_probs = Recorded(
    "token_log_probs",
    "(Tensor logits, Tensor tokens) -> (Tensor, Tensor)",
    _kernel,
    _fake,
    axes="n., n -> n, n",
    setup=_setup,
    backward=_grad,
)


@replayed
def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """``log_softmax(logits)[r, tokens[r]]`` of each row r, without the log-probabilities of all tokens.

    Differentiable by ``logits``.

    Args:
        logits: [rows, vocabulary], floats.
        tokens: [rows], i64, as ``sample`` returns them; -1, which it returns where no token can be drawn, has 0.

    Returns:
        [rows], of the logits' dtype, or f32 where autocast converts for log_softmax: computed in f32 (f64 for f64), and
        rounded once.
    """
    if logits.dim() != 2 or tokens.shape != logits.shape[:1]:
        raise RuntimeError(
            f"token_log_probs(): logits {tuple(logits.shape)}, tokens {tuple(tokens.shape)}; expected (rows, "
            "vocabulary) and (rows,)"
        )
    (logits,) = widened("log_softmax", logits)
    logits, tokens, _, _ = checked("token_log_probs", logits, tokens, None, None, _HOW)
    found: Tensor = _log_probs(logits, tokens)[0]
    return found
