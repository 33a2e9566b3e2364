"""LayerNorm and RMSNorm: torch's modules, with the same parameters, state and options, over our kernels."""

from __future__ import annotations

from typing import Any, overload

import torch

from triplan import functional
from triplan.errors import shown
from triplan.nn._modules import parameter

__all__ = ["LayerNorm", "RMSNorm"]

Tensor = torch.Tensor


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm, computed by ``triplan.functional.layer_norm``."""

    @overload
    def forward(self, input: Tensor, residual: None = None) -> Tensor: ...

    @overload
    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of ``input`` over the trailing axes; with a ``residual`` of its shape, (the norm of their sum, the
        sum)."""
        shape, parameters = self.normalized_shape, (parameter(self, "weight"), parameter(self, "bias"), self.eps)
        if residual is None:
            return functional.layer_norm(input, shape, *parameters)
        return functional.layer_norm(input, shape, *parameters, residual=residual)


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm, computed by ``triplan.functional.rms_norm``.

    ``weight_offset`` (0 or 1) is added to the weight, for checkpoints that store weight - 1; such weights are
    initialised to 0.
    """

    weight_offset = 0

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        weight_offset: int = 0,
    ) -> None:
        if weight_offset not in (0, 1):
            raise ValueError(f"weight_offset = {shown(weight_offset)}: must be 0 or 1")
        if weight_offset and not elementwise_affine:
            raise ValueError("weight_offset = 1: needs a weight to be added to, but elementwise_affine = False")
        self.weight_offset = weight_offset
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1 - self.weight_offset)

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of ``x`` over the trailing axes; with a ``residual`` of its shape, (the norm of their sum, the
        sum)."""
        shape, weight, offset = self.normalized_shape, parameter(self, "weight"), self.weight_offset
        if residual is None:
            return functional.rms_norm(x, shape, weight, self.eps, weight_offset=offset)
        return functional.rms_norm(x, shape, weight, self.eps, weight_offset=offset, residual=residual)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", weight_offset={self.weight_offset}" if self.weight_offset else "")
