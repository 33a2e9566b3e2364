"""nll_loss, as torch has it, and its mean over bytes."""

from __future__ import annotations

from typing import Any

import torch

from triplan.facade import (
    NllLossBackwardPlan,
    NllLossPlan,
)
from triplan.functional._autocast import widened
from triplan.functional._forward import Linearity
from triplan.functional._ops import Recorded
from triplan.functional._replay.replay import replayed
from triplan.functional._sharding import is_dtensor
from triplan.functional.losses.divided import of_dtensor
from triplan.functional.losses.shared import (
    HOW,
    TABLES,
    How,
    checked,
    compute_dtype,
    legacy,
    loss_axes,
    loss_backward_axes,
    new_result,
    run_loss,
    shaped,
)

__all__ = ["nll_loss"]

Tensor = torch.Tensor


@replayed
def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    *,
    bytes: Tensor | None = None,
    check_indices: bool = False,
) -> Tensor:
    """Negative log-likelihood of log-probabilities with class indices (torch.nn.functional.nll_loss): as
    ``cross_entropy``, of an ``input`` that log_softmax gave.
    """
    (input,) = widened("nll_loss", input)
    how = How(legacy(reduction, size_average, reduce), ignore_index, 0.0, check_indices)
    given = checked("nll_loss", input, target, weight, bytes, how)
    if is_dtensor(input) and not torch.compiler.is_compiling() and bytes is None:
        return shaped(of_dtensor("nll_loss", *given[:3], how), input, target, how).to(input.dtype)
    return shaped(_nll_loss(*given, *how), input, target, how)


# --- registered ops ---


def _nll_fake(x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, *how: Any) -> Tensor:
    return new_result(x, target, How(*how).reduction)


def _nll_kernel(x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, *how: Any) -> Tensor:
    out, reduced = _nll_fake(x, target, weight, bytes, *how), How(*how).reduction != "none"
    losses = x.new_empty(target.shape, dtype=compute_dtype(x)) if reduced else out
    operands = {"x": x, "target": target, "losses": losses, "loss": out if reduced else None}
    run_loss(NllLossPlan, How(*how), {**operands, "weight": weight, "bytes": bytes})
    return out


def _nll_backward_fake(dloss: Tensor, x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


def _nll_backward_kernel(
    dloss: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, bytes: Tensor | None, *how: Any
) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    operands = {"dloss": dloss.contiguous(), "target": target, "dx": dx, "weight": weight, "bytes": bytes}
    run_loss(NllLossBackwardPlan, How(*how), operands)
    return dx


def _nll_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, target, weight, counts, *ctx.how = inputs
    ctx.save_for_backward(x, target, weight, counts)


def _nll_grad(ctx: Any, dloss: Tensor) -> Any:
    how = How(*ctx.how)._replace(check_indices=False)
    return _nll_loss_backward(dloss, *ctx.saved_tensors, *how), *(None,) * (len(ctx.how) + 3)


def _nll_backward_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, target, weight, counts, *ctx.how = inputs
    ctx.save_for_backward(target, weight, counts)


def _nll_backward_grad(ctx: Any, of_dx: Tensor) -> Any:
    # The loss is linear in x, so the backward of its backward is the loss itself.
    return _nll_loss(of_dx, *ctx.saved_tensors, *ctx.how), *(None,) * (len(ctx.how) + 4)


_nll_loss = Recorded(
    "nll_loss",
    f"(Tensor x, Tensor target, {TABLES}, {HOW}) -> Tensor",
    _nll_kernel,
    _nll_fake,
    axes=loss_axes(1),
    setup=_nll_setup,
    backward=_nll_grad,
    linearity=Linearity((0,)),
)
_nll_loss_backward = Recorded(
    "nll_loss_backward",
    f"(Tensor dloss, Tensor x, Tensor target, {TABLES}, {HOW}) -> Tensor",
    _nll_backward_kernel,
    _nll_backward_fake,
    axes=loss_backward_axes(lse=False),
    setup=_nll_backward_setup,
    backward=_nll_backward_grad,
    linearity=Linearity((0,)),
)
