"""SGD, with torch's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from triplan.facade import SGDPlan
from triplan.optim._base import ListOptimizer, check_range

__all__ = ["SGD"]


class SGD(ListOptimizer):
    """torch.optim.SGD with momentum, dampening and Nesterov's momentum, over f32, bf16 and f16 parameters.

    Its state dict has a ``step`` besides torch's ``momentum_buffer``. Raises ``ValueError`` for numbers out of their
    range, ``RuntimeError`` for sparse gradients.
    """

    plan = SGDPlan

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        for name, value in (("learning rate", lr), ("momentum value", momentum), ("weight_decay value", weight_decay)):
            check_range(name, value)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        defaults |= {"nesterov": nesterov, "maximize": maximize}
        super().__init__(params, defaults, master_weights, stochastic_rounding)

    def numbers(self, group: dict[str, Any]) -> Sequence[float | Tensor]:
        return (group["lr"], group["momentum"], group["dampening"], group["weight_decay"])

    def options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"maximize": group["maximize"], "nesterov": bool(group["nesterov"] and group["momentum"] != 0)}

    def states(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def _initialized(self, p: Tensor, names: Sequence[str]) -> list[Tensor]:
        # A new buffer begins with the whole gradient, whenever the group gets its momentum: the count of steps begins
        # anew, and with it the bits of stochastic rounding.
        if "momentum_buffer" in names and self.state[p].get("momentum_buffer") is None:
            self.state[p]["step"] = torch.tensor(0.0)
        return super()._initialized(p, names)
