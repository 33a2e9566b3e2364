"""Muon, with torch's arguments and state dicts: matrices of equal shape are orthogonalized together."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

import triplan.functional as F  # noqa: N812
from triplan.facade import SGDPlan
from triplan.functional._sharding import is_dtensor
from triplan.functional.optim import ListStep, packed, symmetric_product
from triplan.optim._base import check_range
from triplan.optim._exchange import Whole, exchange
from triplan.optim._shards import local, local_as
from triplan.optim.adam import Adam

__all__ = ["Muon"]

Scaling = str | None
#: Of AdamW, for the groups that are updated so.
ADAMW = {"betas": (0.9, 0.999), "amsgrad": False, "maximize": False, "decoupled_weight_decay": True}


class Muon(Adam):
    """torch.optim.Muon (Jordan et al., 2024), and AdamW for what is no matrix.

    A matrix moves by its momentum made nearly orthogonal by ``ns_steps`` Newton-Schulz steps, in bf16 with sums in f32:
    X <- a X + (b A + c A^2) X, A = X X^T. ``adjust_lr_fn`` scales its rate: "original" (None) by sqrt(max(1, rows /
    columns)), "match_rms_adamw" by 0.2 sqrt(max(rows, columns)). Weight decay multiplies the parameters. ``lr`` may be
    a tensor. A group with ``use_muon=False`` (embeddings, vectors) is updated as by ``AdamW``, with ``betas`` and
    ``eps`` of its own. State dicts of torch's Muon can be loaded, and ours there.

    Of DTensors, as fully_shard makes them, each rank orthogonalizes some whole matrices, and ranks exchange momenta and
    moves while others are multiplied. All ranks must have gradients of the same parameters.

    Raises ``ValueError`` for numbers out of their range and for parameters of ``use_muon`` that are no matrices,
    ``RuntimeError`` for sparse gradients.
    """

    #: Gradients of matrices are not unscaled in registers: a GradScaler does it before the step.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Scaling = None,
    ) -> None:
        for name, value in (("learning rate", lr), ("momentum", momentum), ("weight decay", weight_decay)):
            check_range(name, value)
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(f"Adjust learning rate function {adjust_lr_fn} is not supported")
        if len(ns_coefficients) != 3 or not 0 <= ns_steps < 100:
            raise ValueError(f"Expected three coefficients and less than 100 steps: {ns_coefficients}, {ns_steps}")
        own = {"momentum": momentum, "nesterov": nesterov, "ns_coefficients": ns_coefficients, "ns_steps": ns_steps}
        own |= {"lr": lr, "weight_decay": weight_decay, "eps": eps, "adjust_lr_fn": adjust_lr_fn, "use_muon": True}
        super(Adam, self).__init__(params, own | ADAMW)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not param_group.get("use_muon", True):
            param_group.setdefault("eps", 1e-8)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        shapes = [tuple(p.shape) for p in group["params"] if p.dim() != 2]
        if group["use_muon"] and shapes:
            self.param_groups.pop()
            raise ValueError(f"Muon orthogonalizes matrices, but a parameter has shape {shapes[0]}: use_muon=False")

    def _update(self, number: int, group: dict[str, Any], scale: Tensor | None, found: Tensor | None) -> None:
        if not group["use_muon"]:
            super()._update(number, group, scale, found)
            return
        alike: dict[tuple[Any, ...], list[Any]] = {}
        for (device, dtype, of_grad, _), params in self._together(group).items():
            p: Any
            for p in params:
                how = (p.device_mesh, p.placements) if is_dtensor(p) else None
                alike.setdefault((device, dtype, of_grad, p.shape, how), []).append(p)
        keys, lists = list(alike), list(alike.values())
        firsts = [0, *accumulate(map(len, lists))]
        begun: dict[int, Whole] = {}

        def begin(i: int) -> None:
            begun[i] = exchange(self._momenta(group, lists[i]), lists[i], firsts[i])

        def multiply(i: int) -> None:
            whole = begun[i].wait()
            begun[i].send(_moves(group, whole) if whole.size(0) else whole.bfloat16())

        def descend(i: int) -> None:
            moves = [packed(t, local(p)) for t, p in zip(begun.pop(i).receive(), lists[i], strict=True)]
            rate = _rate(group["adjust_lr_fn"], *lists[i][0].shape)
            # SGD without momentum: p - lr * rate * (move + decay / rate * p).
            numbers = (group["lr"] * rate, 0.0, 0.0, group["weight_decay"] / rate)
            self._descent((number, *keys[i]), lists[i])(moves, numbers)

        # While matrices of one shape are multiplied, ranks exchange those of the next and of the last one.
        stages = (begin, multiply, descend)
        for time in range(len(lists) + len(stages) - 1):
            for late, stage in enumerate(stages):
                if 0 <= time - late < len(lists):
                    stage(time - late)

    def _momenta(self, group: dict[str, Any], params: list[Any]) -> Tensor:
        """What is to be orthogonalized, one matrix after the other: this rank's part of each."""
        grads = [local_as(p.grad, p) for p in params]
        found = grads[0].new_empty(len(params), *grads[0].shape)
        for p, grad, own in zip(params, grads, found.unbind(), strict=True):
            state: dict[str, Any] = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p, dtype=grad.dtype, memory_format=torch.preserve_format)
            momentum = F.lerp_(local(state["momentum_buffer"]), grad, 1 - group["momentum"])
            if group["nesterov"]:
                F.lerp(grad, momentum, group["momentum"], out=own)
            else:
                F.copy_(own, momentum)
        return found

    def _descent(self, key: tuple[Any, ...], params: list[Tensor]) -> ListStep:
        which = tuple([local(p).data_ptr() for p in params])
        known = self._lists.get(key)
        if known is None or known[0] != which:
            steps = torch.zeros(len(params), device=local(params[0]).device)
            operands = {"steps": steps, "param": self._dense("param", params, params)}
            known = self._lists[key] = which, ListStep(SGDPlan, operands, 4, {"maximize": False, "nesterov": False})
        return known[1]


def _moves(group: dict[str, Any], whole: Tensor) -> Tensor:
    """The orthogonalized momenta (matrices, rows, columns)."""
    norm = F.vector_norm(whole, 2, (1, 2), True, dtype=torch.float32)
    x = torch.empty_like(whole, dtype=torch.bfloat16)
    F.div(whole, F.clamp(norm, min=group["eps"]), out=x)
    return orthogonalized(x, group["ns_coefficients"], group["ns_steps"])


def _rate(how: Scaling, rows: int, columns: int) -> float:
    """What the learning rate of a matrix is multiplied by."""
    return 0.2 * math.sqrt(max(rows, columns)) if how == "match_rms_adamw" else math.sqrt(max(1.0, rows / columns))


def orthogonalized(x: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Newton-Schulz steps of matrices x (batch, rows, columns), whose singular values are 1 at most.

    Those of tall matrices multiply from the right, so that the products in the middle are the smaller ones: nothing is
    transposed in memory. The first two products of a step are symmetric, and only half of them is computed.
    """
    a, b, c = coefficients
    tall = x.size(1) > x.size(2)
    for _ in range(steps):
        gram = symmetric_product(x.mT, x) if tall else symmetric_product(x, x.mT)
        by = symmetric_product(gram, gram, gram, beta=b, alpha=c)
        x = F.baddbmm(x, x, by, beta=a) if tall else F.baddbmm(x, by, x, beta=a)
    return x
