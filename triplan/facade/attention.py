"""Args and plans of attention. Each Args' fields are the operands of its descriptor, in order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from triplan.descriptors import AttentionBackwardDescriptor, AttentionDescriptor
from triplan.facade.plan import Plan

__all__ = ["AttentionArgs", "AttentionBackwardArgs", "AttentionBackwardPlan", "AttentionPlan"]


@dataclass(frozen=True, slots=True)
class AttentionArgs:
    """Operands of attention. ``mask``, ``slopes``, ``sink``, and ``state`` and ``dropout_p`` of dropout are None unless
    the descriptor has them; ``scale`` is ``head_dim ** -0.5`` if it is None.

    Starts are None unless sequences are packed. They must not decrease: sequence s has the rows from ``starts[s]`` up
    to ``starts[s + 1]``, perhaps none. Rows before the first start or from the last on are queries that see no key, and
    keys that no query sees. Starts outside of the rows are clamped, so that nothing outside of the operands is touched.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    mask: Tensor | None = None
    scale: float | None = None
    query_starts: Tensor | None = None
    key_starts: Tensor | None = None
    slopes: Tensor | None = None
    state: Tensor | None = None
    dropout_p: float | None = None
    sink: Tensor | None = None


class AttentionPlan(Plan[AttentionDescriptor, AttentionArgs]):
    descriptor_type, args_type = AttentionDescriptor, AttentionArgs


@dataclass(frozen=True, slots=True)
class AttentionBackwardArgs:
    """``out`` and ``lse`` are outputs of attention; the last seven as there."""

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
    query_starts: Tensor | None = None
    key_starts: Tensor | None = None
    slopes: Tensor | None = None
    state: Tensor | None = None
    dropout_p: float | None = None


class AttentionBackwardPlan(Plan[AttentionBackwardDescriptor, AttentionBackwardArgs]):
    descriptor_type, args_type = AttentionBackwardDescriptor, AttentionBackwardArgs
