"""Args and plans of attention. Each Args' fields are the operands of its descriptor, in order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from triplan.descriptors import AttentionBackwardDescriptor, AttentionDescriptor
from triplan.facade.plan import Plan

__all__ = ["AttentionArgs", "AttentionBackwardArgs", "AttentionBackwardPlan", "AttentionPlan"]


@dataclass(frozen=True, slots=True)
class AttentionArgs:
    """Operands of attention. ``mask`` is None unless the descriptor has one; ``scale`` is ``head_dim ** -0.5`` if it is
    None."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    mask: Tensor | None = None
    scale: float | None = None


class AttentionPlan(Plan[AttentionDescriptor, AttentionArgs]):
    descriptor_type, args_type = AttentionDescriptor, AttentionArgs


@dataclass(frozen=True, slots=True)
class AttentionBackwardArgs:
    """``out`` and ``lse`` are outputs of attention; ``mask`` and ``scale`` as there."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    mask: Tensor | None = None
    scale: float | None = None


class AttentionBackwardPlan(Plan[AttentionBackwardDescriptor, AttentionBackwardArgs]):
    descriptor_type, args_type = AttentionBackwardDescriptor, AttentionBackwardArgs
