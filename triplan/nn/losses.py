"""Losses as modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from triplan import functional
from triplan.functional.losses.shared import legacy
from triplan.nn._modules import buffer, parameter

__all__ = [
    "CrossEntropyLoss",
    "HuberLoss",
    "L1Loss",
    "LinearCrossEntropyLoss",
    "MSELoss",
    "NLLLoss",
    "SmoothL1Loss",
]


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss, computed by ``triplan.functional.cross_entropy``.

    ``weight`` and ``bytes`` (for reduction ``"byte_mean"``), one value a class, are buffers; the state dict leaves
    ``bytes`` out. The other arguments are those of ``functional.cross_entropy``.
    """

    weight: Tensor | None
    bytes: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        bytes: Tensor | None = None,
    ) -> None:
        reduction = legacy(reduction, size_average, reduce)
        super().__init__(weight, None, ignore_index, None, reduction, label_smoothing)
        self.register_buffer("bytes", bytes, persistent=False)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(
            input,
            target,
            buffer(self, "weight"),
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            bytes=getattr(self, "bytes", None),  # a patched module of torch has none
        )

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}"


class LinearCrossEntropyLoss(nn.Module):
    """A linear layer and its ``functional.linear_cross_entropy``, without the logits of all rows
    (torch.nn.LinearCrossEntropyLoss, whose state dicts it loads).

    ``linear`` has the weight (num_classes, in_features) and, with ``bias``, a bias. ``out_features``: further axes of
    the loss; with any, all logits exist. The other arguments are those of ``functional.linear_cross_entropy``.
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: object = None,
        softcap: float = 0.0,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.num_classes, self.out_features = num_classes, tuple(out_features)
        columns = math.prod(self.out_features, start=num_classes)
        self.linear = nn.Linear(in_features, columns, bias=bias, device=device, dtype=dtype)
        self.reduction, self.ignore_index, self.label_smoothing = reduction, ignore_index, label_smoothing
        self.softcap, self.options = softcap, options

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        shape, linear = (self.num_classes, *self.out_features), self.linear
        matrix, bias = parameter(linear, "weight"), parameter(linear, "bias")
        if self.out_features:
            matrix = matrix.reshape(*shape, linear.in_features)
            bias = None if bias is None else bias.reshape(shape)
        return functional.linear_cross_entropy(
            input,
            matrix,
            target,
            linear_bias=bias,
            weight=buffer(self, "weight"),
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            options=self.options,
            softcap=self.softcap,
        )

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}"


def _loss(name: str, function: Callable[..., Tensor], *options: str) -> type[nn.Module]:
    """torch's module of that name, computed by ``function`` of two tensors and of these attributes of the module."""

    def forward(self: Any, input: Tensor, target: Tensor) -> Tensor:
        return function(input, target, **{option: buffer(self, option) for option in options})

    doc = f"torch.nn.{name}, computed by ``triplan.functional.{function.__name__}``."
    made: type[nn.Module] = type(
        name, (getattr(nn, name),), {"forward": forward, "__doc__": doc, "__module__": "triplan.nn"}
    )
    return made


NLLLoss = _loss("NLLLoss", functional.nll_loss, "weight", "ignore_index", "reduction")
MSELoss = _loss("MSELoss", functional.mse_loss, "reduction")
L1Loss = _loss("L1Loss", functional.l1_loss, "reduction")
SmoothL1Loss = _loss("SmoothL1Loss", functional.smooth_l1_loss, "reduction", "beta")
HuberLoss = _loss("HuberLoss", functional.huber_loss, "reduction", "delta")
