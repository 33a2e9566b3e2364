"""Adam and AdamW, with torch's arguments and state dicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from triplan.facade import AdamPlan
from triplan.optim._base import ListOptimizer, check_range

__all__ = ["Adam", "AdamW"]


class Adam(ListOptimizer):
    """torch.optim.Adam (Kingma and Ba, 2015), over f32, bf16 and f16 parameters. States have the parameter's dtype.

    Elements are computed in f32, bias corrections in f64 from the step on the device. ``lr`` may be a tensor. Raises
    ``ValueError`` for numbers out of their range, ``RuntimeError`` for sparse gradients.
    """

    plan = AdamPlan

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        for name, value in (("learning rate", lr), ("epsilon value", eps), ("weight_decay value", weight_decay)):
            check_range(name, value)
        for i, beta in enumerate(betas):
            check_range(f"beta parameter at index {i}", beta, 1.0)
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
        }
        defaults |= {"maximize": maximize, "decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, defaults, master_weights, stochastic_rounding)

    def numbers(self, group: dict[str, Any]) -> Sequence[float | Tensor]:
        return (group["lr"], *group["betas"], group["eps"], group["weight_decay"])

    def options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"maximize": group["maximize"], "decoupled": group["decoupled_weight_decay"]}

    def states(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


class AdamW(Adam):
    """torch.optim.AdamW (Loshchilov and Hutter, 2019): ``Adam`` whose weight decay multiplies the parameters."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            decoupled_weight_decay=True,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
        )
