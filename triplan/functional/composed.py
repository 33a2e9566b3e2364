"""Functions of several families: losses of differences, which one launch computes, and others their mean or sum."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from triplan import expr
from triplan.errors import shown
from triplan.functional._autocast import widened
from triplan.functional._replay.replay import replayed
from triplan.functional.elementwise.expressions import expression
from triplan.functional.losses.shared import legacy
from triplan.functional.reductions import mean, sum

__all__ = ["huber_loss", "l1_loss", "mse_loss", "smooth_l1_loss"]

Tensor = torch.Tensor
Tree = Callable[..., Any]  # of operands, as ``expression`` takes it


def _smooth(x: Any, y: Any, bound: Any) -> Any:
    apart = expr.abs(x - y)
    return expr.where(expr.lt(apart, bound), 0.5 * apart * apart / bound, apart - 0.5 * bound)


def _huber(x: Any, y: Any, bound: Any) -> Any:
    apart = expr.abs(x - y)
    return expr.where(expr.lt(apart, bound), 0.5 * apart * apart, bound * (apart - 0.5 * bound))


_TREES: dict[str, Tree] = {
    "l1_loss": lambda x, y: expr.abs(x - y),
    "mse_loss": lambda x, y: expr.square(x - y),
    "smooth_l1_loss": _smooth,
    "huber_loss": _huber,
}


def _quotient(x: Any, y: Any) -> Any:
    return x / y


def _weighted(tree: Tree) -> Tree:
    return lambda *operands: tree(*operands[:-1]) * operands[-1]


_WEIGHTED = {name: _weighted(tree) for name, tree in _TREES.items()}


def _loss(name: str, input: Tensor, target: Tensor, reduction: str, weight: Tensor | None, *bound: float) -> Tensor:
    """The elements' losses by the expression of ``name``, or their mean or sum."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{shown(reduction)} is not a valid value for reduction; valid are none, mean, sum")
    if input.shape != target.shape:
        warnings.warn(
            f"{name}(): a target of size {list(target.shape)} is broadcast against an input of {list(input.shape)}",
            stacklevel=4,
        )
    if weight is not None and weight.shape != input.shape:
        raise ValueError("Weights and input must have the same size.")
    input, target = widened(name, input, target)
    if weight is None:
        losses: Tensor = expression(_TREES[name], input, target, *bound)
    else:
        losses = expression(_WEIGHTED[name], input, target, *bound, weight)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return sum(losses)
    # torch divides a weighted mean by the sum of weights, except that of huber_loss.
    return mean(losses) if weight is None or name == "huber_loss" else expression(_quotient, sum(losses), sum(weight))


@replayed
def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """(input - target)^2, and its "mean" or "sum" unless ``reduction`` is "none" (torch.nn.functional.mse_loss).

    ``weight``, of the input's shape, multiplies the elements; a mean is then divided by its sum.
    """
    return _loss("mse_loss", input, target, legacy(reduction, size_average, reduce), weight)


@replayed
def l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """|input - target|, and its mean or sum (torch.nn.functional.l1_loss). ``weight``: as in ``mse_loss``."""
    return _loss("l1_loss", input, target, legacy(reduction, size_average, reduce), weight)


@replayed
def smooth_l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Tensor:
    """d^2 / (2 beta) where d = |input - target| < beta, and d - beta / 2 elsewhere; its mean or sum
    (torch.nn.functional.smooth_l1_loss). Raises ``RuntimeError`` for a negative beta.
    """
    if beta < 0:
        raise RuntimeError(f"smooth_l1_loss does not support negative values for beta, but got {beta}")
    reduction = legacy(reduction, size_average, reduce)
    if beta == 0:
        return _loss("l1_loss", input, target, reduction, None)
    return _loss("smooth_l1_loss", input, target, reduction, None, float(beta))


@replayed
def huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """d^2 / 2 where d = |input - target| < delta, and delta (d - delta / 2) elsewhere; its mean or sum
    (torch.nn.functional.huber_loss). ``weight``, of the input's shape, multiplies the elements. Raises ``RuntimeError``
    unless delta > 0.
    """
    if delta <= 0:
        raise RuntimeError(f"huber_loss does not support non-positive values for delta, but got {delta}")
    return _loss("huber_loss", input, target, reduction, weight, float(delta))
