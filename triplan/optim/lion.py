"""Lion, with the arguments of its authors' code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from triplan.facade import LionPlan
from triplan.optim._base import ListOptimizer, check_range

__all__ = ["Lion"]


class Lion(ListOptimizer):
    """Chen et al., "Symbolic discovery of optimization algorithms", 2023, algorithm 2, over f32, bf16 and f16.

    Raises ``ValueError`` for numbers out of their range, ``RuntimeError`` for sparse gradients.
    """

    plan = LionPlan

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        check_range("learning rate", lr)
        check_range("weight_decay value", weight_decay)
        for i, beta in enumerate(betas):
            check_range(f"beta parameter at index {i}", beta, 1.0)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, master_weights, stochastic_rounding)

    def numbers(self, group: dict[str, Any]) -> Sequence[float | Tensor]:
        return (group["lr"], *group["betas"], group["weight_decay"])

    def states(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)
