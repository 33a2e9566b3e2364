"""Losses as modules."""

from __future__ import annotations

from torch import Tensor, nn

from triplan import functional
from triplan.functional.losses.shared import legacy

__all__ = ["CrossEntropyLoss"]


class CrossEntropyLoss(nn.Module):
    """``functional.cross_entropy`` as a module (torch.nn.CrossEntropyLoss, whose state dicts it loads).

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
        super().__init__()
        reduction = legacy(reduction, size_average, reduce)
        self.register_buffer("weight", weight)
        self.register_buffer("bytes", bytes, persistent=False)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            bytes=self.bytes,
        )

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}"
