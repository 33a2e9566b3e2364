"""Args and plans of rms_norm, layer_norm and l2_norm. An Args' fields are the operands of its descriptor, in order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from triplan.descriptors import (
    L2NormBackwardDescriptor,
    L2NormDescriptor,
    LayerNormBackwardDescriptor,
    LayerNormDescriptor,
    RmsNormBackwardDescriptor,
    RmsNormDescriptor,
)
from triplan.facade.plan import Plan

__all__ = ["L2NormArgs", "L2NormBackwardArgs", "L2NormBackwardPlan", "L2NormPlan"]
__all__ += ["LayerNormArgs", "LayerNormBackwardArgs", "LayerNormBackwardPlan", "LayerNormPlan"]
__all__ += ["RmsNormArgs", "RmsNormBackwardArgs", "RmsNormBackwardPlan", "RmsNormPlan"]


@dataclass(frozen=True, slots=True)
class RmsNormArgs:
    """Pass ``weight``, and ``residual`` with ``summed``, if the descriptor has them, else None."""

    x: Tensor
    out: Tensor
    rstd: Tensor
    weight: Tensor | None = None
    residual: Tensor | None = None
    summed: Tensor | None = None


class RmsNormPlan(Plan[RmsNormDescriptor, RmsNormArgs]):
    descriptor_type, args_type = RmsNormDescriptor, RmsNormArgs


@dataclass(frozen=True, slots=True)
class RmsNormBackwardArgs:
    """``rstd`` is the output of rms_norm. Pass the last four if the descriptor has them, else None."""

    dout: Tensor
    x: Tensor
    rstd: Tensor
    dx: Tensor
    weight: Tensor | None = None
    dweight: Tensor | None = None
    dsummed: Tensor | None = None
    dbranch: Tensor | None = None


class RmsNormBackwardPlan(Plan[RmsNormBackwardDescriptor, RmsNormBackwardArgs]):
    descriptor_type, args_type = RmsNormBackwardDescriptor, RmsNormBackwardArgs


@dataclass(frozen=True, slots=True)
class LayerNormArgs:
    """Pass ``weight``, ``bias``, and ``residual`` with ``summed``, if the descriptor has them, else None."""

    x: Tensor
    out: Tensor
    mean: Tensor
    rstd: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    summed: Tensor | None = None


class LayerNormPlan(Plan[LayerNormDescriptor, LayerNormArgs]):
    descriptor_type, args_type = LayerNormDescriptor, LayerNormArgs


@dataclass(frozen=True, slots=True)
class LayerNormBackwardArgs:
    """``mean`` and ``rstd`` are outputs of layer_norm. Pass the last five if the descriptor has them, else None."""

    dout: Tensor
    x: Tensor
    mean: Tensor
    rstd: Tensor
    dx: Tensor
    weight: Tensor | None = None
    dweight: Tensor | None = None
    dbias: Tensor | None = None
    dsummed: Tensor | None = None
    dbranch: Tensor | None = None


class LayerNormBackwardPlan(Plan[LayerNormBackwardDescriptor, LayerNormBackwardArgs]):
    descriptor_type, args_type = LayerNormBackwardDescriptor, LayerNormBackwardArgs


@dataclass(frozen=True, slots=True)
class L2NormArgs:
    x: Tensor
    out: Tensor
    norm: Tensor


class L2NormPlan(Plan[L2NormDescriptor, L2NormArgs]):
    descriptor_type, args_type = L2NormDescriptor, L2NormArgs


@dataclass(frozen=True, slots=True)
class L2NormBackwardArgs:
    """``norm`` is the output of l2_norm."""

    dout: Tensor
    x: Tensor
    norm: Tensor
    dx: Tensor


class L2NormBackwardPlan(Plan[L2NormBackwardDescriptor, L2NormBackwardArgs]):
    descriptor_type, args_type = L2NormBackwardDescriptor, L2NormBackwardArgs
